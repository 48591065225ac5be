"""What the stored blocks mean, inside a kernel: one function per type, 16 values at a time.

All types are read in groups of 16 consecutive values. A tile is `[R, 16]`: `block [R]` says in which block a row's
group lies, counted from `src`, `part [R]` which group of the block it is, `j [16]` the value inside the group.
`src` points to bytes; every function returns float32 `[R, 16]`, in the order of operations of `quant.dequant`, so
the values are bit-equal to it as long as the compiler fuses no product with a sum.

Offsets are 32-bit: a program moves `src` to its own first block before it calls. Blocks of all types but MXFP4 have
an even number of bytes, so 16-bit fields are aligned wherever a block starts at an even address.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from overspill.gguf.types import TensorType
from overspill.quant.codebooks import FP4_VALUES, IQ4_VALUES

GROUP = 16


@triton.jit
def _f16(src, offset):
    """The halves at byte offsets `offset`, which are even."""
    return tl.load(src.to(tl.pointer_type(tl.float16)) + (offset >> 1)).to(tl.float32)


@triton.jit
def _byte(src, offset):
    return tl.load(src + offset).to(tl.int32)


@triton.jit
def _u16(src, offset):
    return tl.load(src.to(tl.pointer_type(tl.uint16)) + (offset >> 1)).to(tl.int32)


@triton.jit
def f32(src, table, block, part, j):
    return tl.load(src.to(tl.pointer_type(tl.float32)) + block[:, None] * 16 + j[None, :])


@triton.jit
def f16(src, table, block, part, j):
    return tl.load(src.to(tl.pointer_type(tl.float16)) + block[:, None] * 16 + j[None, :]).to(tl.float32)


@triton.jit
def bf16(src, table, block, part, j):
    bits = tl.load(src.to(tl.pointer_type(tl.uint16)) + block[:, None] * 16 + j[None, :])
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def q8_0(src, table, block, part, j):
    at = block * 34
    q = tl.load(src.to(tl.pointer_type(tl.int8)) + (at + 2 + part * 16)[:, None] + j[None, :])
    return _f16(src, at)[:, None] * q.to(tl.float32)


@triton.jit
def _pairs(src, at):
    """The 16 bytes at `at [R]` as 8 words of two, in int32.

    Written so that the compiler does not see that they are neighbours: it would then spread a row over threads, which
    costs more than it saves where blocks are aligned to 2 bytes only.
    """
    return _u16(src, at[:, None] + 2 * tl.arange(0, 8)[None, :])


@triton.jit
def _aligned_pairs(src, at):
    """As `_pairs`, in one load of 16 bytes, for types whose blocks are aligned to them."""
    words = src.to(tl.pointer_type(tl.uint16))
    return tl.load(words + (at >> 1)[:, None] + tl.arange(0, 8)[None, :]).to(tl.int32)


@triton.jit
def _bytes(words):
    """Words `[R, 8]` of two bytes -> `[R, 16]`."""
    return tl.reshape(tl.join(words & 0xFF, words >> 8), [words.shape[0], 16])


@triton.jit
def _nibbles(src, at, shift):
    """4 bits, from bit `shift [R]` on, of the 16 bytes at `at [R]`, as words."""
    return (_pairs(src, at) >> shift[:, None]) & 0x0F0F


@triton.jit
def q4_0(src, table, block, part, j):
    at = block * 18
    q = _bytes(_nibbles(src, at + 2, part * 4)) - 8
    return _f16(src, at)[:, None] * q.to(tl.float32)


@triton.jit
def q4_1(src, table, block, part, j):
    at = block * 20
    q = _bytes(_nibbles(src, at + 4, part * 4))
    return _f16(src, at)[:, None] * q.to(tl.float32) + _f16(src, at + 2)[:, None]


@triton.jit
def _fifth_bit(src, at, part, j):
    """Bit j of the 16 bits that belong to the group, of the 32 at `at [R]`, as 0 or 16."""
    return ((_u16(src, at + part * 2)[:, None] >> j[None, :]) & 1) << 4


@triton.jit
def q5_0(src, table, block, part, j):
    at = block * 22
    q = (_bytes(_nibbles(src, at + 6, part * 4)) | _fifth_bit(src, at + 2, part, j)) - 16
    return _f16(src, at)[:, None] * q.to(tl.float32)


@triton.jit
def q5_1(src, table, block, part, j):
    at = block * 24
    q = _bytes(_nibbles(src, at + 8, part * 4)) | _fifth_bit(src, at + 4, part, j)
    return _f16(src, at)[:, None] * q.to(tl.float32) + _f16(src, at + 2)[:, None]


@triton.jit
def iq4_nl(src, table, block, part, j):
    at = block * 18
    return _f16(src, at)[:, None] * tl.load(table + _bytes(_nibbles(src, at + 2, part * 4)))


@triton.jit
def mxfp4(src, table, block, part, j):
    at = block * 17
    e = _byte(src, at)
    # 2^(e - 128) from its bits; the two smallest are subnormal.
    bits = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23)
    values = tl.load(table + ((_byte(src, (at + 1)[:, None] + j[None, :]) >> (part * 4)[:, None]) & 15))
    return bits.to(tl.float32, bitcast=True)[:, None] * values


@triton.jit
def _two_bits(src, at, part):
    """2 bits of the 64 bytes at `at [R]`, as words: per half of 32 bytes, 4 fields, field-major."""
    shift = (part >> 1 & 3) * 2
    return (_pairs(src, at + (part >> 3) * 32 + (part & 1) * 16) >> shift[:, None]) & 0x0303


@triton.jit
def q2_k(src, table, block, part, j):
    at = block * 84
    scale = _byte(src, at + part)
    step = _f16(src, at + 80) * (scale & 15).to(tl.float32)
    floor = _f16(src, at + 82) * (scale >> 4).to(tl.float32)
    q = _bytes(_two_bits(src, at + 16, part))
    return step[:, None] * q.to(tl.float32) - floor[:, None]


@triton.jit
def q3_k(src, table, block, part, j):
    at = block * 110
    low = _byte(src, at + 96 + (part & 7)) >> ((part >> 3) * 4)
    high = _byte(src, at + 104 + (part & 3)) >> ((part >> 2) * 2)
    scale = ((low & 15) | ((high & 3) << 4)) - 32
    mask = _pairs(src, at + (part & 1) * 16) >> (part >> 1)[:, None]
    q = _bytes(_two_bits(src, at + 32, part) | ((mask & 0x0101) << 2)) - 4
    return (_f16(src, at + 108) * scale.to(tl.float32))[:, None] * q.to(tl.float32)


@triton.jit
def k_step_and_floor(src, at, part):
    """d * scale and dmin * min of a group of 32, from the 6-bit pairs in bytes 4..15."""
    g = part >> 1
    first = _byte(src, at + 4 + (g & 3))
    second = _byte(src, at + 8 + (g & 3))
    third = _byte(src, at + 12 + (g & 3))
    scale = tl.where(g < 4, first & 63, (third & 15) | ((first >> 6) << 4))
    minimum = tl.where(g < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
    return _f16(src, at) * scale.to(tl.float32), _f16(src, at + 2) * minimum.to(tl.float32)


@triton.jit
def _k_nibbles(src, at, part):
    """4 bits of the 128 bytes at `at [R]`, as words: of each run of 32 bytes first the low ones, then the high ones."""
    words = _aligned_pairs(src, at + (part >> 2) * 32 + (part & 1) * 16)
    return (words >> ((part >> 1 & 1) * 4)[:, None]) & 0x0F0F


@triton.jit
def q4_k(src, table, block, part, j):
    at = block * 144
    step, floor = k_step_and_floor(src, at, part)
    return step[:, None] * _bytes(_k_nibbles(src, at + 16, part)).to(tl.float32) - floor[:, None]


@triton.jit
def q5_k(src, table, block, part, j):
    at = block * 176
    step, floor = k_step_and_floor(src, at, part)
    high = _aligned_pairs(src, at + 16 + (part & 1) * 16) >> (part >> 1)[:, None]
    q = _bytes(_k_nibbles(src, at + 48, part) | ((high & 0x0101) << 4))
    return step[:, None] * q.to(tl.float32) - floor[:, None]


@triton.jit
def q6_k(src, table, block, part, j):
    at = block * 210
    half, field, sixteen = part >> 3, part >> 1 & 3, (part & 1) * 16
    low = _nibbles(src, at + half * 64 + (field & 1) * 32 + sixteen, (field >> 1) * 4)
    high = _pairs(src, at + 128 + half * 32 + sixteen) >> (field * 2)[:, None]
    q = _bytes(low | ((high & 0x0303) << 4)) - 32
    scale = tl.load(src.to(tl.pointer_type(tl.int8)) + at + 192 + part).to(tl.float32)
    return (_f16(src, at + 208) * scale)[:, None] * q.to(tl.float32)


@triton.jit
def iq4_xs(src, table, block, part, j):
    at = block * 136
    g = part >> 1
    low = _byte(src, at + 4 + (g >> 1)) >> ((g & 1) * 4)
    high = _u16(src, at + 2) >> (g * 2)
    scale = ((low & 15) | ((high & 3) << 4)) - 32
    q = _bytes(_nibbles(src, at + 8 + g * 16, (part & 1) * 4))
    return (_f16(src, at) * scale.to(tl.float32))[:, None] * tl.load(table + q)


class Decoder(NamedTuple):
    """How a kernel reads a type. n_parts: groups of 16 in a block. codebook: the values that `table` holds."""

    decode: Callable[..., Any]
    n_parts: int
    block_bytes: int
    codebook: tuple[int, ...] | None


_T = TensorType
_FUNCTIONS = {
    _T.F32: f32,
    _T.F16: f16,
    _T.BF16: bf16,
    _T.Q4_0: q4_0,
    _T.Q4_1: q4_1,
    _T.Q5_0: q5_0,
    _T.Q5_1: q5_1,
    _T.Q8_0: q8_0,
    _T.Q2_K: q2_k,
    _T.Q3_K: q3_k,
    _T.Q4_K: q4_k,
    _T.Q5_K: q5_k,
    _T.Q6_K: q6_k,
    _T.IQ4_NL: iq4_nl,
    _T.IQ4_XS: iq4_xs,
    _T.MXFP4: mxfp4,
}
_CODEBOOKS = {_T.IQ4_NL: IQ4_VALUES, _T.IQ4_XS: IQ4_VALUES, _T.MXFP4: FP4_VALUES}


def _decoder(type: TensorType) -> Decoder:
    n_blocks = max(1, GROUP // type.block.n_elements)
    n_parts = max(1, type.block.n_elements // GROUP)
    return Decoder(_FUNCTIONS[type], n_parts, n_blocks * type.block.n_bytes, _CODEBOOKS.get(type))


DECODERS = {type: _decoder(type) for type in _FUNCTIONS}
"""The types that kernels read; plain floats count 16 values as a block."""


def table_of(decoder: Decoder, device: torch.device) -> torch.Tensor | None:
    """The codebook of a type as float32 on a device, None where it has none."""
    return None if decoder.codebook is None else _table(decoder.codebook, device)


@cache
def _table(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device)
