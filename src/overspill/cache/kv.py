"""Keys and values of one layer: a view over memory that the layer's device owns.

Layout `[slot, kv head, cell, channel]`: the keys of one head of one sequence are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from overspill.cache.cells import Segment


@dataclass(frozen=True, eq=False)
class KvCache:
    """k: `[S, G, C, A]`, v: `[S, G, C, A]` (S slots, G kv heads, C cells a slot, A head dim)."""

    k: torch.Tensor
    v: torch.Tensor

    def append(self, segment: Segment, k_TGA: torch.Tensor, v_TGA: torch.Tensor) -> None:
        """Write the keys and values of a segment's tokens into their cells."""
        cells = slice(segment.first_pos, segment.end_pos)
        self.k[segment.slot, :, cells] = k_TGA.transpose(0, 1)
        self.v[segment.slot, :, cells] = v_TGA.transpose(0, 1)

    def visible(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values `[G, C', A]` of the sequence up to and including the segment's last token."""
        return self.k[segment.slot, :, : segment.end_pos], self.v[segment.slot, :, : segment.end_pos]
