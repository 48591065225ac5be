"""Which cells of the KV cache a run of tokens owns. Pure Python, no torch.

Every sequence slot owns a contiguous range of cells, one per position, so a sequence's keys are one slice and a
position is its own cell index. A slot is emptied by forgetting its length; nothing has to be cleared.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive positions of one sequence inside a ubatch.

    slot: which sequence slot of the cache. first_pos: position of the first token. n_tokens: how many.
    """

    slot: int
    first_pos: int
    n_tokens: int

    @property
    def end_pos(self) -> int:
        """One past the last position: how many cells the sequence fills once these tokens are in."""
        return self.first_pos + self.n_tokens
