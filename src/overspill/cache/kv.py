"""What one layer keeps of sequences: a view over memory that the layer's device owns.

Layout of keys and values `[slot, kv head, cell, channel]`: the keys of one head of one sequence are contiguous. Layers
with a sliding window keep all positions too, and read only those in the window. States are float32, see
`cache.recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overspill.cache import q8
from overspill.cache.cells import KvShape, Segment


@dataclass(frozen=True, eq=False)
class KvCache:
    """k: `[S, G, C, A]`, v: `[S, G, C, B]` (S slots, G kv heads, C cells a slot, A and B channels).

    v may be a view of the first B channels of k; then the values of a token are those channels of its key. Both are
    empty where the layer keeps nothing of positions. blocks: `[S, 1, C / ratio, ...]` each. state: `[R, ...]` each (R
    rows).
    """

    k: torch.Tensor
    v: torch.Tensor
    blocks: tuple[torch.Tensor, ...] = ()
    state: tuple[torch.Tensor, ...] = ()

    @classmethod
    def over(cls, shape: KvShape, tensors: Sequence[torch.Tensor]) -> KvCache:
        """A cache over tensors of the shapes that `KvShape.tensor_shapes` and then `state_shapes` give."""
        n_state = len(tensors) - len(shape.state)
        n_cells = n_state - len(shape.blocks)
        cells, blocks, state = tensors[:n_cells], tuple(tensors[n_cells:n_state]), tuple(tensors[n_state:])
        if shape.n_heads == 0:
            return cls(torch.empty(0), torch.empty(0), blocks, state)
        if cells[0].dtype == torch.uint8:
            return Q8Cache(cells[0], cells[-1], blocks, state, (shape.key_dim, shape.value_dim), shape.has_values)
        return cls(cells[0], cells[1] if shape.has_values else cells[0][..., : shape.value_dim], blocks, state)

    @property
    def has_plain_cells(self) -> bool:
        """Whether cells hold numbers as they are, so that kernels may write them in place."""
        return True

    def append(self, segment: Segment, k_TGA: torch.Tensor, v_TGB: torch.Tensor) -> None:
        """Write the keys and values of a segment's tokens into their cells."""
        cells = slice(segment.first_pos, segment.end_pos)
        self.k[segment.slot, :, cells] = k_TGA.transpose(0, 1)
        self.v[segment.slot, :, cells] = v_TGB.transpose(0, 1)

    def append_steps(
        self, slots: torch.Tensor, positions: torch.Tensor, k_TGA: torch.Tensor, v_TGB: torch.Tensor
    ) -> None:
        """Write the key and value of each token into its own cell; slots and positions: integers `[T]`."""
        at = (slots.long()[:, None], torch.arange(self.k.shape[1], device=self.k.device), positions.long()[:, None])
        self.k.index_put_(at, k_TGA.to(self.k.dtype))
        self.v.index_put_(at, v_TGB.to(self.v.dtype))

    def cells(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the keys `[G, T, A]` and values of a segment's tokens go."""
        cells = slice(segment.first_pos, segment.end_pos)
        return self.k[segment.slot, :, cells], self.v[segment.slot, :, cells]

    def all_cells(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[G, C, A]` and values of the segment's sequence, written or not."""
        return self.k[segment.slot], self.v[segment.slot]

    def visible(self, segment: Segment, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[G, C', A]` and values of the positions from `first` to the segment's last."""
        cells = slice(first, segment.end_pos)
        return self.k[segment.slot, :, cells], self.v[segment.slot, :, cells]


@dataclass(frozen=True, eq=False)
class Q8Cache(KvCache):
    """Cells of type q8_0: k and v are rows of `cache.q8`, and the same where the value is part of the key.

    Who reads them gets them decoded, in memory of their own. dims: values of a key and of a value.
    """

    dims: tuple[int, int] = (0, 0)
    has_values: bool = True

    @property
    def has_plain_cells(self) -> bool:
        return False

    def append(self, segment: Segment, k_TGA: torch.Tensor, v_TGB: torch.Tensor) -> None:
        cells = slice(segment.first_pos, segment.end_pos)
        self.k[segment.slot, :, cells] = q8.encode(k_TGA.transpose(0, 1))
        if self.has_values:
            self.v[segment.slot, :, cells] = q8.encode(v_TGB.transpose(0, 1))

    def visible(self, segment: Segment, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        cells = slice(first, segment.end_pos)
        keys = q8.decode(self.k[segment.slot, :, cells], self.dims[0])
        if not self.has_values:
            return keys, keys[..., : self.dims[1]]
        return keys, q8.decode(self.v[segment.slot, :, cells], self.dims[1])
