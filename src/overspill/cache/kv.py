"""What one layer keeps of sequences: a view over memory that the layer's device owns.

Layout of keys and values `[slot, kv head, cell, channel]`: the keys of one head of one sequence are contiguous. The
cells of a layer with a window are a ring (see `cache.cells`): what goes past its end goes on at its beginning, so runs
of positions may be two of cells. Who reads such a run gets a contiguous copy. States are float32, see
`cache.recurrent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from overspill.cache.cells import KvShape, Segment
from overspill.quant.q8_rows import TORCH_ROWS, Q8Rows, decode


@dataclass(frozen=True, eq=False)
class KvCache:
    """k: `[S, G, C, A]`, v: `[S, G, C, B]` (S slots, G kv heads, C cells a slot, A and B channels).

    v may be a view of the first B channels of k; then the values of a token are those channels of its key. Both are
    empty where the layer keeps nothing of positions. blocks: `[S, 1, P / ratio, ...]` each (P positions). state:
    `[R, ...]` each (R rows). is_ring: position p is cell p modulo C; otherwise there are C positions.
    """

    k: torch.Tensor
    v: torch.Tensor
    blocks: tuple[torch.Tensor, ...] = ()
    state: tuple[torch.Tensor, ...] = ()
    is_ring: bool = False

    @classmethod
    def over(cls, shape: KvShape, tensors: Sequence[torch.Tensor], q8_rows: Q8Rows = TORCH_ROWS) -> KvCache:
        """A cache over tensors of the shapes that `KvShape.tensor_shapes` and then `state_shapes` give.

        q8_rows: of the device, for cells that are uint8.
        """
        n_state = len(tensors) - len(shape.state)
        n_cells = n_state - len(shape.blocks)
        cells, blocks, state = tensors[:n_cells], tuple(tensors[n_cells:n_state]), tuple(tensors[n_state:])
        if shape.n_heads == 0:
            return cls(torch.empty(0), torch.empty(0), blocks, state)
        is_ring = shape.reach is not None
        if cells[0].dtype == torch.uint8:
            dims = shape.key_dim, shape.value_dim
            return Q8Cache(cells[0], cells[-1], blocks, state, is_ring, dims, shape.has_values, q8_rows)
        values = cells[1] if shape.has_values else cells[0][..., : shape.value_dim]
        return cls(cells[0], values, blocks, state, is_ring)

    @property
    def value_dim(self) -> int:
        """Channels of a value."""
        return self.v.shape[-1]

    @property
    def n_cells(self) -> int:
        """Cells of a slot."""
        return self.k.shape[2]

    def cut(self, segment: Segment) -> tuple[Segment, ...]:
        """Parts of a segment, at most two, the cells of each of which follow each other."""
        n_left = self.n_cells - segment.first_pos % self.n_cells if self.is_ring else segment.n_tokens
        if segment.n_tokens <= n_left:
            return (segment,)
        n_rest = segment.n_tokens - n_left
        first = Segment(segment.slot, segment.first_pos, n_left)
        return first, Segment(segment.slot, first.end_pos, n_rest)

    def append(self, segment: Segment, k_TGA: torch.Tensor, v_TGB: torch.Tensor) -> None:
        """Write the keys and values of a segment's tokens into their cells."""
        parts = self.cut(segment)
        if len(parts) == 1:
            self._put(segment, k_TGA, v_TGB)
            return
        sizes = [part.n_tokens for part in parts]
        for part, keys, values in zip(parts, k_TGA.split(sizes), v_TGB.split(sizes), strict=True):
            self._put(part, keys, values)

    def _put(self, segment: Segment, k_TGA: torch.Tensor, v_TGB: torch.Tensor) -> None:
        keys, values = self.cells(segment)
        keys.copy_(k_TGA.transpose(0, 1))
        values.copy_(v_TGB.transpose(0, 1))

    def append_steps(
        self, slots: torch.Tensor, positions: torch.Tensor, k_TGA: torch.Tensor, v_TGB: torch.Tensor
    ) -> None:
        """Write the key and value of each token into its own cell; slots and positions: integers `[T]`."""
        cells = positions.long() % self.n_cells if self.is_ring else positions.long()
        at = (slots.long()[:, None], torch.arange(self.k.shape[1], device=self.k.device), cells[:, None])
        self.k.index_put_(at, k_TGA.to(self.k.dtype))
        self.v.index_put_(at, v_TGB.to(self.v.dtype))

    def cells(self, segment: Segment) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the keys `[G, T, A]` and values of a segment's tokens go; it is one part, see `cut`."""
        first = segment.first_pos % self.n_cells if self.is_ring else segment.first_pos
        cells = slice(first, first + segment.n_tokens)
        return self.k[segment.slot, :, cells], self.v[segment.slot, :, cells]

    def visible(self, segment: Segment, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[G, C', A]` and values of the positions from `first` to the segment's last."""
        return self._run(self.k, segment, first), self._run(self.v, segment, first)

    def _run(self, stored: torch.Tensor, segment: Segment, first: int) -> torch.Tensor:
        """Of one tensor, what those positions have: a view, or a copy where they go past the end of a ring."""
        if not self.is_ring:
            return stored[segment.slot, :, first : segment.end_pos]
        of_slot, n, cell = stored[segment.slot], self.n_cells, first % self.n_cells
        end = cell + segment.end_pos - first
        if end <= n:
            return of_slot[:, cell:end]
        return torch.cat([of_slot[:, cell:], of_slot[:, : end - n]], 1)

    def gather_keys(self, slots: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Keys `[T, G, N, A]` of any cells: slots `[T, 1]` and cells `[T, N]`, int64."""
        return self.k[slots, :, cells].transpose(1, 2)

    def gather_values(self, slots: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """Values `[T, G, N, B]` likewise."""
        return self.v[slots, :, cells].transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Q8Cache(KvCache):
    """Cells of type q8_0: k and v are rows of `quant.q8_rows`, and the same where the value is part of the key.

    Who reads them gets them decoded, in memory that lasts until the next reading. dims: values of a key and of a value.
    """

    dims: tuple[int, int] = (0, 0)
    has_values: bool = True
    rows: Q8Rows = TORCH_ROWS

    @property
    def value_dim(self) -> int:
        return self.dims[1]

    def _put(self, segment: Segment, k_TGA: torch.Tensor, v_TGB: torch.Tensor) -> None:
        keys, values = self.cells(segment)
        self.rows.put(k_TGA, keys)
        if self.has_values:
            self.rows.put(v_TGB, values)

    def append_steps(
        self, slots: torch.Tensor, positions: torch.Tensor, k_TGA: torch.Tensor, v_TGB: torch.Tensor
    ) -> None:
        self.rows.put_steps(k_TGA, self.k, slots, positions)
        if self.has_values:
            self.rows.put_steps(v_TGB, self.v, slots, positions)

    def visible(self, segment: Segment, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        stored = (self.k, self.v) if self.has_values else (self.k,)
        read = self.rows.read([self._run(x, segment, first) for x in stored], self.dims[: len(stored)])
        return read[0], read[1] if self.has_values else read[0][..., : self.dims[1]]

    def gather_keys(self, slots: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        return decode(super().gather_keys(slots, cells), self.dims[0])

    def gather_values(self, slots: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        if self.has_values:
            return decode(super().gather_values(slots, cells), self.dims[1])
        return self.gather_keys(slots, cells)[..., : self.dims[1]]
