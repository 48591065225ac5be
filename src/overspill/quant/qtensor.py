"""A weight as it is stored in the file: raw blocks, their type and the logical shape.

A `QTensor` never owns a conversion: kernels read the blocks, `quant.dequant` is the reference that turns them
into float32. Indexing the first dimension gives a view (one expert of a stacked `[E, F, D]` tensor).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from overspill.gguf.types import TensorType

_DTYPES = {
    TensorType.F32: torch.float32,
    TensorType.BF16: torch.bfloat16,
    TensorType.F16: torch.float16,
}


@dataclass(frozen=True, eq=False)
class QTensor:
    """Quantised (or plain) weight.

    data: uint8, contiguous, `[*shape[:-1], row_bytes]`, on the device that holds it.
    shape: logical shape in torch order: `[out, in]` or `[expert, out, in]`; the GGUF order reversed.
    """

    data: torch.Tensor
    type: TensorType
    shape: tuple[int, ...]

    @classmethod
    def from_bytes(cls, raw: torch.Tensor, type: TensorType, shape: tuple[int, ...]) -> QTensor:
        """View a flat uint8 tensor of exactly the right size as a weight of `shape`."""
        return cls(raw.view(*shape[:-1], type.row_bytes(shape[-1])), type, shape)

    @property
    def n_bytes(self) -> int:
        return self.data.numel()

    @cached_property
    def plain(self) -> torch.Tensor | None:
        """The values in place, `shape`; None where they are stored in blocks, or not as floats."""
        dtype = _DTYPES.get(self.type)
        return None if dtype is None else self.data.view(dtype)

    def in_rows(self) -> QTensor:
        """The weight as a file has it."""
        return self

    def __getitem__(self, index: int) -> QTensor:
        return QTensor(self.data[index], self.type, self.shape[1:])

    def rows(self, first: int, last: int) -> QTensor:
        """View of the rows (or experts) `first <= i < last` of the first dimension."""
        return QTensor(self.data[first:last], self.type, (last - first, *self.shape[1:]))
