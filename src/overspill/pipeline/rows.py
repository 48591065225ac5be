"""Short prompts as rows of a decoding step. Pure.

A step has one token of each of several sequences. But in each layer all rows write their keys and values before any
attends, and a row sees cells up to its own position: rows of one sequence, at positions that follow each other, are as
right. A state goes from one token to the next, so models that have some keep their waves.

A step is recorded for its number of rows, so few numbers are used: the first rows stand there twice. Both write the
same into the same cells, and name no expert that is not named anyhow. To record takes longer than to issue, and some
lengths never come again, so a number of rows may have to come before (`ShortPrompts`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from overspill.cache.cells import Segment
from overspill.pipeline.wave import Ubatch, Wave

ROW_COUNTS: Final = (1, 2, 4, 8, 16, 24, 32)

MOST_READ: Final = 1 << 19
"""Cells that all rows may read together: each reads those of its sequence for itself, where a wave reads them once."""


def n_step_rows(n_tokens: int, end_pos: int, most: int) -> int:
    """Rows of a step for so many tokens, the last of them before `end_pos`; 0 where a wave is better. most: rows."""
    if n_tokens > most:
        return 0
    n_rows = min(most, next(n for n in ROW_COUNTS if n >= n_tokens))
    return n_rows if n_rows * end_pos <= MOST_READ else 0


@dataclass(frozen=True)
class Rows:
    """A wave cut into rows. step: of one ubatch. wanted: of each ubatch that was cut, its rows of the step's logits."""

    step: Wave
    wanted: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, wave: Wave, n_rows: int) -> Rows:
        """So many rows, at most twice as many as tokens. Logits are computed of the last one, or of all."""
        ids = [i for ubatch in wave.ubatches for i in ubatch.ids]
        segments = [
            Segment(s.slot, position, 1)
            for ubatch in wave.ubatches
            for s in ubatch.segments
            for position in range(s.first_pos, s.end_pos)
        ]
        n_copies = n_rows - len(ids)
        assert 0 <= n_copies <= len(ids)
        wanted, first = [], n_copies
        for ubatch in wave.ubatches:
            wanted.append(tuple(first + row for row in ubatch.output_rows))
            first += ubatch.n_tokens
        output = tuple(range(n_rows))
        if all(row == n_rows - 1 for rows in wanted for row in rows):
            output, wanted = output[-1:], [(0,) * len(rows) for rows in wanted]
        ubatch = Ubatch((*ids[:n_copies], *ids), (*segments[:n_copies], *segments), output)
        return cls(Wave((ubatch,), n_copies), tuple(wanted))

    @property
    def kind(self) -> tuple[int, int]:
        """What is recorded once for all of a kind: how many rows, and rows of logits."""
        (ubatch,) = self.step.ubatches
        return ubatch.n_tokens, len(ubatch.output_rows)


class ShortPrompts:
    """Knows which kinds of rows have come before. n_before: how often one must have; 0: equal prompts are always
    computed alike."""

    def __init__(self, n_before: int) -> None:
        self._n_before = n_before
        self._n_seen: Counter[tuple[int, int]] = Counter()

    def forget(self) -> None:
        """As if none had come."""
        self._n_seen.clear()

    def rows_of(self, wave: Wave, n_rows: int) -> Rows | None:
        """A wave as so many rows; None where its kind is too new."""
        rows = Rows.of(wave, n_rows)
        self._n_seen[rows.kind] += 1
        return rows if self._n_seen[rows.kind] > self._n_before else None
