"""A weight whose rows are interleaved by sixteen: what a CPU with sixteen lanes reads in one stream, lane by lane.

The same bytes as in the file, in another order. A panel is sixteen rows; their blocks at one place follow each other
field by field: a number of row 0, the same of row 1, and so on. Fields are the 32-bit words of a block, and what its
size leaves over before or after them. So vector i of a panel is word i of sixteen rows, and no kernel has to transpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from overspill.gguf.types import TensorType
from overspill.quant.qtensor import QTensor

PANEL_ROWS: Final = 16
_WORD_BYTES: Final = 4
_T = TensorType
# How many bytes of a block come before its words.
_FRONT_BYTES: Final = {
    _T.Q8_0: 2,
    _T.Q4_0: 2,
    _T.Q4_1: 0,
    _T.Q5_0: 2,
    _T.Q5_1: 0,
    _T.IQ4_NL: 2,
    _T.MXFP4: 1,
    _T.Q2_K: 0,
    _T.Q3_K: 0,
    _T.Q4_K: 0,
    _T.Q5_K: 0,
    _T.Q6_K: 0,
    _T.IQ4_XS: 0,
}


class Field(NamedTuple):
    """Bytes `first <= i < last` of a block, numbers of `width` bytes."""

    first: int
    last: int
    width: int


def fields_of(type: TensorType) -> list[Field]:
    """The fields of a block, in order."""
    n_bytes, front = type.block.n_bytes, _FRONT_BYTES[type]
    end = n_bytes - (n_bytes - front) % _WORD_BYTES
    fields = Field(0, front, front), Field(front, end, _WORD_BYTES), Field(end, n_bytes, n_bytes - end)
    return [field for field in fields if field.width]


def takes_panels(type: TensorType, shape: Sequence[int]) -> bool:
    """Whether a weight of this type and shape can be `Panels`."""
    return type in _FRONT_BYTES and len(shape) > 1 and shape[-2] % PANEL_ROWS == 0


class Panels(QTensor):
    """data: uint8, contiguous, `[*shape[:-2], shape[-2] / 16, 16 * row_bytes]`."""

    @classmethod
    def from_bytes(cls, raw: torch.Tensor, type: TensorType, shape: tuple[int, ...]) -> Panels:
        """View a flat uint8 tensor of exactly the right size as panels of a weight of `shape`."""
        n_panels = shape[-2] // PANEL_ROWS
        return cls(raw.view(*shape[:-2], n_panels, PANEL_ROWS * type.row_bytes(shape[-1])), type, shape)

    def in_rows(self) -> QTensor:
        """A copy in the order of the file."""
        n_bytes, n_columns = self.type.block.n_bytes, self.shape[-1]
        blocks = self.data.reshape(-1, n_columns // self.type.block.n_elements, PANEL_ROWS * n_bytes)
        rows = torch.empty(len(blocks), PANEL_ROWS, blocks.shape[1], n_bytes, dtype=torch.uint8)
        for first, last, width in fields_of(self.type):
            numbers = blocks[:, :, PANEL_ROWS * first : PANEL_ROWS * last].unflatten(-1, (-1, PANEL_ROWS, width))
            rows[..., first:last].unflatten(-1, (-1, width)).copy_(numbers.permute(0, 3, 1, 2, 4))
        return QTensor.from_bytes(rows.flatten(), self.type, self.shape)

    def __getitem__(self, index: int) -> Panels:
        if len(self.shape) < 3:
            raise IndexError("a row of panels is not in one place")
        return Panels(self.data[index], self.type, self.shape[1:])

    def rows(self, first: int, last: int) -> Panels:
        n = PANEL_ROWS if len(self.shape) < 3 else 1
        if first % n or last % n:
            raise IndexError(f"rows {first} to {last} are not whole panels")
        return Panels(self.data[first // n : last // n], self.type, (last - first, *self.shape[1:]))
