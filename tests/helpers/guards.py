"""A pattern behind every piece of the CPU kernels' own memory: who writes past an end is found out.

Compiled code follows addresses, and what it writes a few bytes too far shows up as something else, later, in somebody
else's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch
from weakref import WeakSet

from overspill.kernels.numba.workspace import Memory

GUARD = bytes(range(1, 129))


class GuardedMemory(Memory):
    """Looked at when it goes, and when `guarded` ends."""

    def __init__(self, n_bytes: int) -> None:
        super().__init__(n_bytes + len(GUARD))
        self.n_bytes = n_bytes
        self._bytes[n_bytes:] = GUARD
        _LIVE.add(self)

    def look(self) -> None:
        if bytes(self._bytes[self.n_bytes :]) != GUARD:
            _BROKEN.append(f"something was written past the end of {self.n_bytes} bytes")
            self._bytes[self.n_bytes :] = GUARD

    __del__ = look


_LIVE = WeakSet[GuardedMemory]()
_BROKEN: list[str] = []


@contextmanager
def guarded() -> Iterator[None]:
    """All memory of kernels that is made inside has a guard."""
    makers = [module for module in list(sys.modules.values()) if vars(module).get("Memory") is Memory]
    with ExitStack() as patches:
        for module in makers:
            if module.__name__.startswith("overspill."):
                patches.enter_context(patch.object(module, "Memory", GuardedMemory))
        yield
    for piece in list(_LIVE):
        piece.look()
    broken = [_BROKEN.pop() for _ in range(len(_BROKEN))]
    assert not broken, broken[0]
