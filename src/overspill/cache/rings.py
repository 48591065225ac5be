"""How far back a sequence can be cut where cells are rings. Pure Python, no torch.

A ring of R cells has the last R positions that were written. A layer that reaches W positions back needs W - 1 of them
before the one it goes on from, so a slot that was written up to position p serves from p - (R - W + 1) on, its floor;
as long as the ring has not come round, from any. At position 0 a sequence always begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from overspill.cache.cells import KvShape, Segment


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of a model's layers. n_cells: of the smallest. n_back: how far back from the last position."""

    n_cells: int
    n_back: int

    @classmethod
    def of(cls, shapes: Iterable[KvShape], n_positions: int, n_spare: int | None) -> Rings | None:
        """Of slots for so many positions, see `KvShape.n_cells`; None where no layer has fewer cells than these."""
        sizes = [shape.n_cells(n_positions, n_spare) for shape in shapes if shape.reach is not None]
        if n_spare is None or min(sizes, default=n_positions) == n_positions:
            return None
        return cls(min(sizes), n_spare + 1)

    def floor(self, floor: int, end_pos: int) -> int:
        """The floor of a slot that had this one, once it is written up to `end_pos`."""
        return floor if end_pos <= self.n_cells else max(floor, end_pos - self.n_back)


class RingGuard:
    """Knows the floor of each slot, and refuses to go on below it.

    Cells that have been written over would give wrong numbers without any other sign.
    """

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._floors: dict[int, int] = {}

    def put(self, slot: int, floor: int) -> None:
        """What a slot holds came from elsewhere."""
        self._floors[slot] = floor

    def advance(self, segment: Segment) -> None:
        """Note what a segment writes. RuntimeError when what it must see is not there any more."""
        floor = self._floors.get(segment.slot, 0) if segment.first_pos else 0
        if segment.first_pos < floor:
            raise RuntimeError(
                f"slot {segment.slot} goes on at position {segment.first_pos}, but layers with a window have written "
                f"over what is needed before position {floor}"
            )
        self._floors[segment.slot] = self._rings.floor(floor, segment.end_pos)
