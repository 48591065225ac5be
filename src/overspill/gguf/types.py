"""Tensor types of GGUF: id, block size in elements, block size in bytes.

Facts: the GGUF specification and ggml's type table. Rows are contiguous runs of whole blocks; there is no row
padding, so one row takes `n_elements / block_elements * block_bytes` bytes.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Block(NamedTuple):
    """Unit of a tensor type: `n_elements` values stored in `n_bytes` bytes."""

    n_elements: int
    n_bytes: int


class TensorType(IntEnum):
    """The `ggml_type` ids that may occur in a file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block(self) -> Block:
        return _BLOCKS[self]

    @property
    def is_integer(self) -> bool:
        return self in _INTEGERS

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of one row of `n_elements` values; `n_elements` must be a multiple of the block."""
        return n_elements // self.block.n_elements * self.block.n_bytes


_T = TensorType
_INTEGERS = frozenset({_T.I8, _T.I16, _T.I32, _T.I64})
_BLOCKS = {
    _T.F32: Block(1, 4),
    _T.F16: Block(1, 2),
    _T.Q4_0: Block(32, 18),
    _T.Q4_1: Block(32, 20),
    _T.Q5_0: Block(32, 22),
    _T.Q5_1: Block(32, 24),
    _T.Q8_0: Block(32, 34),
    _T.Q8_1: Block(32, 36),
    _T.Q2_K: Block(256, 84),
    _T.Q3_K: Block(256, 110),
    _T.Q4_K: Block(256, 144),
    _T.Q5_K: Block(256, 176),
    _T.Q6_K: Block(256, 210),
    _T.Q8_K: Block(256, 292),
    _T.IQ2_XXS: Block(256, 66),
    _T.IQ2_XS: Block(256, 74),
    _T.IQ3_XXS: Block(256, 98),
    _T.IQ1_S: Block(256, 50),
    _T.IQ4_NL: Block(32, 18),
    _T.IQ3_S: Block(256, 110),
    _T.IQ2_S: Block(256, 82),
    _T.IQ4_XS: Block(256, 136),
    _T.I8: Block(1, 1),
    _T.I16: Block(1, 2),
    _T.I32: Block(1, 4),
    _T.I64: Block(1, 8),
    _T.F64: Block(1, 8),
    _T.IQ1_M: Block(256, 56),
    _T.BF16: Block(1, 2),
    _T.TQ1_0: Block(256, 54),
    _T.TQ2_0: Block(256, 66),
    _T.MXFP4: Block(32, 17),
    _T.NVFP4: Block(64, 36),
    _T.Q1_0: Block(128, 18),
    _T.Q2_0: Block(64, 18),
}
