"""A pattern behind every piece of the CPU kernels' own memory: who writes past an end is found out.

Compiled code follows addresses, and what it writes a few bytes too far shows up as something else, later, in somebody
else's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from overspill.kernels.numba.workspace import Memory

GUARD = bytes(range(1, 129))


@contextmanager
def guarded() -> Iterator[None]:
    """Every `Memory` made inside has a guard, looked at when the memory goes and at the end."""
    make, pieces, broken = Memory.__init__, WeakSet[Memory](), list[str]()

    def look(piece: Memory) -> None:
        end = piece.n_bytes
        if getattr(piece, "has_guard", False) and bytes(piece._bytes[end:]) != GUARD:
            broken.append(f"something was written past the end of {end} bytes")
            piece._bytes[end:] = GUARD

    def make_guarded(piece: Memory, n_bytes: int) -> None:
        make(piece, n_bytes + len(GUARD))
        piece.n_bytes, piece.has_guard = n_bytes, True  # type: ignore[attr-defined]
        piece._bytes[n_bytes:] = GUARD
        pieces.add(piece)

    Memory.__init__ = make_guarded  # type: ignore[method-assign]
    Memory.__del__ = look  # type: ignore[attr-defined]
    try:
        yield
        for piece in list(pieces):
            look(piece)
    finally:
        Memory.__init__ = make  # type: ignore[method-assign]
        del Memory.__del__  # type: ignore[attr-defined]
    assert not broken, broken[0]
