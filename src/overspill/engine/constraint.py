"""What an answer may consist of: the engine's side of constrained decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # the scheduler, which knows requests, does without numpy
    import numpy as np
    from numpy.typing import NDArray


class Constraint(Protocol):
    """Says which token may follow those that were accepted. One per request, used by one thread at a time.

    Methods raise UserError when the constraint turns out to be more than can be followed.
    """

    def allows(self, token_id: int) -> bool:
        """Whether this token may follow."""
        ...

    def allowed(self, n_vocab: int) -> NDArray[np.bool_]:
        """For each of n_vocab ids whether it may follow; slower than `allows` for one."""
        ...

    def accept(self, token_id: int) -> None:
        """This token, which is allowed, follows."""
        ...
