"""What the engine asks of the pipeline: waves of micro-batches.

A *ubatch* is at most `n_ubatch` tokens computed together; a *wave* is the ubatches that share one pass of uploads.
Ubatches of one sequence stand in a wave in the order of their positions. Pure values, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from overspill.cache.cells import Segment

__all__ = ["MAX_STEP_TOKENS", "STEP_HEADER_WORDS", "STEP_ROWS", "STEP_WORDS", "Segment", "Ubatch", "Wave"]

MAX_STEP_TOKENS = 32
"""Of a wave that is computed as a decoding step."""

STEP_HEADER_WORDS, STEP_ROWS = 2, 5
STEP_WORDS = STEP_HEADER_WORDS + STEP_ROWS * MAX_STEP_TOKENS
"""32-bit words of what a device reads at the start of a step: its number, and rows of as many numbers as tokens."""


@dataclass(frozen=True, slots=True)
class Ubatch:
    """Token ids, the segments they belong to (in row order), and the rows whose logits are wanted."""

    ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    output_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == sum(s.n_tokens for s in self.segments) > 0

    @property
    def n_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Wave:
    """Ubatches that go through the layers together. n_copies: rows among theirs that are there for the second time."""

    ubatches: tuple[Ubatch, ...]
    n_copies: int = 0

    @property
    def n_tokens(self) -> int:
        return sum(u.n_tokens for u in self.ubatches) - self.n_copies

    @property
    def end_pos(self) -> int:
        """One past the last position of any sequence."""
        return max(s.end_pos for u in self.ubatches for s in u.segments)

    @property
    def is_step(self) -> bool:
        """Whether it is few rows, each a segment of its own."""
        (ubatch, *others) = self.ubatches
        return not others and ubatch.n_tokens <= MAX_STEP_TOKENS and len(ubatch.segments) == ubatch.n_tokens
