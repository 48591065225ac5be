"""Which cells of the KV cache a run of tokens owns, and what a cell holds. Pure Python, no torch.

Every sequence slot owns a contiguous range of cells, one per position, so a sequence's keys are one slice and a
position is its own cell index. A slot is emptied by forgetting its length; nothing has to be cleared.

Where a layer never looks back further than a window, its range is a ring of fewer cells: position p is cell p modulo
their number. No state says where a ring stands, so recorded work stays valid. `cache.rings` knows how far a sequence
can be cut back then.

A layer may also keep a state: numbers that stand for all that a sequence has seen, and change with each token. Cells
of the past stay, so a sequence can be cut back to any position; a state can only be had again where it was kept. State
tensors therefore have rows, more than one for each slot, and a segment says which row it starts from and which one it
leaves (`cache.states` chooses them). A sequence that begins, at position 0, starts from zeros, whatever is in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NamedTuple

_Q8_GROUP = 32  # as of `TensorType.Q8_0`, whose package imports numpy: whoever only counts cells needs none


class CellType(StrEnum):
    """How keys and values are stored. q8_0: see `quant.q8_rows`."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"

    def row_bytes(self, n_values: int) -> int:
        """Bytes of so many values of one cell."""
        if self is CellType.Q8_0:
            return n_values + 2 * -(-n_values // _Q8_GROUP)
        return n_values * self.value_bytes

    @property
    def value_bytes(self) -> int:
        """Of numbers that are stored one by one, as those of blocks are: q8_0 stands for float16 there."""
        return 4 if self is CellType.F32 else 2


class BlockShape(NamedTuple):
    """Numbers that a layer keeps of every `ratio` positions that follow each other: `dim` of them."""

    ratio: int
    dim: int


class KvShape(NamedTuple):
    """What one layer keeps of a position, per kv head: `key_dim` values of the key and `value_dim` of the value.

    n_heads: 0 where a layer keeps nothing of positions.
    has_values: False where the value is the first `value_dim` channels of the key, and takes no room of its own
    (latent attention, arXiv:2405.04434).
    blocks: what it keeps of positions together, such as one key for several. Like the cells of positions, blocks stay
    when a sequence is cut back, and those that are complete there are sound.
    state: dimensions of the float32 tensors that the layer keeps of a sequence, whatever its length.
    reach: positions that a query may see, its own the last; None: all. Blocks are not among them.
    """

    n_heads: int
    key_dim: int
    value_dim: int
    has_values: bool = True
    blocks: tuple[BlockShape, ...] = ()
    state: tuple[tuple[int, ...], ...] = ()
    reach: int | None = None

    @classmethod
    def of_state(cls, *dims: tuple[int, ...]) -> KvShape:
        """For a layer that keeps a state and nothing of positions."""
        return cls(0, 0, 0, state=dims)

    @property
    def n_state_values(self) -> int:
        """Numbers of one state."""
        return sum(map(prod, self.state))

    def cell_bytes(self, type: CellType) -> int:
        """Bytes stored for each position, a block's rounded up."""
        n_of_blocks = sum(-(-block.dim // block.ratio) for block in self.blocks)
        values_bytes = type.row_bytes(self.value_dim) if self.has_values else 0
        return self.n_heads * (type.row_bytes(self.key_dim) + values_bytes) + n_of_blocks * type.value_bytes

    def n_cells(self, n_positions: int, n_spare: int | None = None) -> int:
        """Cells of a slot for so many positions. n_spare: of a ring, beyond the reach; None: there are no rings."""
        if self.reach is None or n_spare is None:
            return n_positions
        return min(n_positions, self.reach + n_spare)

    def tensor_shapes(
        self, n_slots: int, n_positions: int, n_spare: int | None = None
    ) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes of the tensors to reserve for so many slots: keys, values, blocks, as there are. See `n_cells`."""
        dims = (self.key_dim, self.value_dim) if self.has_values else (self.key_dim,)
        n_cells = self.n_cells(n_positions, n_spare)
        cells = [(n_slots, self.n_heads, n_cells, dim) for dim in dims] if self.n_heads else []
        return (*cells, *((n_slots, 1, n_positions // block.ratio, block.dim) for block in self.blocks))

    def state_shapes(self, n_rows: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors to reserve for so many states."""
        return tuple((n_rows, *dims) for dims in self.state)


class StateRows(NamedTuple):
    """Rows of the state tensors: where the state before a segment is read, and where the one after it is written."""

    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive positions of one sequence inside a ubatch.

    slot: which sequence slot of the cache. first_pos: position of the first token. n_tokens: how many.
    rows: of its states, in models that have some; None: the slot has one row, of its own number.
    """

    slot: int
    first_pos: int
    n_tokens: int
    rows: StateRows | None = None

    @property
    def states(self) -> StateRows:
        """Where its states are; what is before position 0 is not read."""
        return self.rows or StateRows(self.slot, self.slot)

    @property
    def end_pos(self) -> int:
        """One past the last position: how many cells the sequence fills once these tokens are in."""
        return self.first_pos + self.n_tokens
