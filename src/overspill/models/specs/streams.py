"""Models whose hidden state is several residual streams (hyper-connections, arXiv:2409.19606).

Between layers a token is one row: its streams, the output of the layer's experts that has not been added yet, and how
much of it each stream gets. So experts may be added slab by slab, to one place, and give the same bits however a layer
is cut; whoever reads the streams next adds what is pending first.
"""

from __future__ import annotations

from dataclasses import dataclass

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs.base import HParams

_MOST_STREAMS = 64


@dataclass(frozen=True, kw_only=True)
class StreamHParams(HParams):
    """n_streams: residual streams of a token, each `n_embd` wide."""

    n_streams: int

    @property
    def streams_dim(self) -> int:
        """Numbers in all streams of a token."""
        return self.n_streams * self.n_embd

    @property
    def n_scratch(self) -> int:
        """Streams are settled, normed, mixed and added to: so many copies of them at once, beside other scratch."""
        return super().n_scratch + 6 * self.streams_dim

    @property
    def x_dim(self) -> int:
        """`[streams | pending | shares]`."""
        return self.streams_dim + self.n_embd + self.n_streams


def read_n_streams(a: Keys) -> int:
    """`hyper_connection.count`; one stream would be an ordinary residual, which has other tensors."""
    n = a.u32("hyper_connection.count")
    if not 1 < n <= _MOST_STREAMS:
        raise UserError(f"{a.full_name('hyper_connection.count')} is {n}: must be from 2 to {_MOST_STREAMS}")
    return n
