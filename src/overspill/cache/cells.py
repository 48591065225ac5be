"""Which cells of the KV cache a run of tokens owns, and what a cell holds. Pure Python, no torch.

Every sequence slot owns a contiguous range of cells, one per position, so a sequence's keys are one slice and a
position is its own cell index. A slot is emptied by forgetting its length; nothing has to be cleared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KvShape(NamedTuple):
    """What one layer keeps of a position, per kv head: `key_dim` values of the key and `value_dim` of the value.

    has_values: False where the value is the first `value_dim` channels of the key, and takes no room of its own
    (latent attention, arXiv:2405.04434).
    """

    n_heads: int
    key_dim: int
    value_dim: int
    has_values: bool = True

    @property
    def n_channels(self) -> int:
        """Numbers stored for each position."""
        return self.n_heads * (self.key_dim + self.value_dim * self.has_values)

    def tensor_shapes(self, n_slots: int, n_cells: int) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of the tensors to reserve for so many slots of so many cells: keys, and values if there are any."""
        dims = (self.key_dim, self.value_dim) if self.has_values else (self.key_dim,)
        return tuple((n_slots, self.n_heads, n_cells, dim) for dim in dims)


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
