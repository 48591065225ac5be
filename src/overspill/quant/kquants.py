"""Reference dequantisation of the K types: super-blocks of 256 values with quantised scales per group.

Every function takes blocks, uint8 `[n, block_bytes]`, and returns float32 `[n, 256]`. Formulas: the GGUF block
formats (ggml's block structs). The group scale is rounded first (d * scale), then its product with q, then the
difference: that order is what makes the values equal to other readers' bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overspill.quant.bits import as_f16, as_i8, fields


def q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16: d * scale * q - dmin * min, scale and min in one byte, q of 2 bits."""
    scales = blocks[:, :16].to(torch.int32)
    step = as_f16(blocks[:, 80:82]) * (scales & 15)
    floor = as_f16(blocks[:, 82:84]) * (scales >> 4)
    q = _two_bits(blocks[:, 16:80]).view(-1, 16, 16)
    return (step[..., None] * q - floor[..., None]).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """16 groups of 16: d * (scale - 32) * q, q of 3 bits; a clear bit of the mask subtracts 4."""
    high = fields(blocks[:, :32], 1, 8).flatten(1)
    q = _two_bits(blocks[:, 32:96]) - 4 + (high << 2)
    low_scale = fields(blocks[:, 96:104], 4, 2).flatten(1)
    high_scale = fields(blocks[:, 104:108], 2, 4).flatten(1)
    step = as_f16(blocks[:, 108:110]) * ((low_scale | high_scale << 4) - 32)
    return (step[..., None] * q.view(-1, 16, 16)).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    """8 groups of 32: d * scale * q - dmin * min, q of 4 bits, 64 values per run of 32 bytes."""
    return _with_floor(blocks, _nibble_runs(blocks[:, 16:144]))


def q5_k(blocks: Tensor) -> Tensor:
    """As q4_k with a fifth bit: bit g of high byte l belongs to element l of group g."""
    high = fields(blocks[:, 16:48], 1, 8)
    return _with_floor(blocks, _nibble_runs(blocks[:, 48:176]) | high << 4)


def q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16: d * scale * (q - 32), signed 8-bit scales, q of 6 bits; two halves of 128 values."""
    low = fields(blocks[:, :128].unflatten(1, (2, 64)), 4, 2)
    high = fields(blocks[:, 128:192].unflatten(1, (2, 32)), 2, 4)
    q = (low.reshape(-1, 16, 16) | high.reshape(-1, 16, 16) << 4) - 32
    step = as_f16(blocks[:, 208:210]) * as_i8(blocks[:, 192:208])
    return (step[..., None] * q).flatten(1)


def _two_bits(raw: Tensor) -> Tensor:
    """64 bytes -> `[n, 256]`: per half of 32 bytes, 4 fields of 2 bits, field-major."""
    return fields(raw.unflatten(1, (2, 32)), 2, 4).flatten(1)


def _nibble_runs(raw: Tensor) -> Tensor:
    """128 bytes -> `[n, 8, 32]`: per run of 32 bytes the low nibbles are one group, the high ones the next."""
    return fields(raw.unflatten(1, (4, 32)), 4, 2).flatten(1, 2)


def _with_floor(blocks: Tensor, q: Tensor) -> Tensor:
    """d * scale * q - dmin * min for q `[n, 8, 32]`; 6-bit scales and minima packed in bytes 4..15."""
    first, second, third = blocks[:, 4:16].to(torch.int32).unflatten(1, (3, 4)).unbind(1)
    scale = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minimum = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    step = as_f16(blocks[:, :2]) * scale
    floor = as_f16(blocks[:, 2:4]) * minimum
    return (step[..., None] * q - floor[..., None]).flatten(1)
