"""Which rows of the state tensors hold what. Pure Python, no torch.

Slot s owns the rows s, S + s, 2 S + s and so on (S slots), so that row s is always its own. One row holds the state
at the end of its sequence; the others keep states of earlier positions, from where a sequence with the same beginning
can go on. A kept state is not copied: the next segment is written to another row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from overspill.cache.cells import Segment, StateRows


class SlotStates:
    """The states of one slot: position -> row, in ascending order of positions."""

    def __init__(self, rows: Iterable[int], at: Mapping[int, int] | None = None) -> None:
        self._rows = tuple(rows)
        self._at = dict(at or {})

    @classmethod
    def of_slot(cls, slot: int, n_slots: int, n_rows: int) -> SlotStates:
        """A slot that has `n_rows` rows, all empty."""
        return cls(range(slot, n_slots * n_rows, n_slots))

    def copy(self) -> SlotStates:
        """The same, to plan ahead with."""
        return SlotStates(self._rows, self._at)

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the sequence can go on, besides its beginning."""
        return tuple(self._at)

    @property
    def rows(self) -> Mapping[int, int]:
        """The row of each position."""
        return dict(self._at)

    def place(self, positions: Iterable[int]) -> None:
        """Forget all that is held; states of these positions, at most as many as there are rows, will be put in."""
        self._at = dict(zip(sorted(positions), self._rows, strict=False))

    def latest(self, pos: int) -> int:
        """The last position up to `pos` that the sequence can go on from; 0 if there is none."""
        return max((p for p in self._at if p <= pos), default=0)

    def cut(self, pos: int) -> None:
        """What was after `pos` is void."""
        self._at = {p: row for p, row in self._at.items() if p <= pos}

    def plan(self, first_pos: int, *, keeps: bool) -> StateRows:
        """Rows for a segment that begins at `first_pos`. keeps: the state there should stay."""
        before = self._at.get(first_pos, self._rows[0])
        if first_pos and not keeps:
            return StateRows(before, before)
        free = [row for row in self._rows if row not in self._at.values()]
        return StateRows(before, free[0] if free else self._at[self._least_useful(first_pos)])

    def put(self, segment: Segment) -> None:
        """A segment was computed, or will be before anything that is planned from now on."""
        row = segment.states.after
        self._at = {p: r for p, r in self._at.items() if r != row} | {segment.end_pos: row}

    def _least_useful(self, first_pos: int) -> int:
        """The kept position that is missed least: the gap that it leaves is small for how long ago it is.

        This thins out what is long ago, and always leaves something in the first, second, fourth .. part.
        """
        kept = [0, *self._at]
        if len(kept) == 2:
            return kept[1]

        def loss(i: int) -> float:
            return (kept[i + 1] - kept[i - 1]) / (first_pos - kept[i - 1])

        return kept[min(range(1, len(kept) - 1), key=loss)]


class StateGuard:
    """Knows where the state of each row stands, and refuses to go on from any other position.

    A state that is not what its reader takes it for would give wrong numbers without any other sign.
    """

    def __init__(self) -> None:
        self._pos: dict[int, int] = {}

    def put(self, row: int, pos: int) -> None:
        """A state that stands at `pos` was written to a row."""
        self._pos[row] = pos

    def advance(self, segment: Segment) -> None:
        """Note what a segment does. RuntimeError when the state it starts from is not there."""
        before, after = segment.states
        found = self._pos.get(before, 0)
        if segment.first_pos and found != segment.first_pos:
            raise RuntimeError(
                f"slot {segment.slot} goes on at position {segment.first_pos}, but row {before} of its states stands "
                f"at {found}"
            )
        self._pos[after] = segment.end_pos
