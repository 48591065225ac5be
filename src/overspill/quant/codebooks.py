"""Reference dequantisation of the types that look values up: IQ4, the 4-bit floats, and the IQ1-IQ3 grids.

Every function takes blocks, uint8 `[n, block_bytes]`, and returns float32 `[n, block_elements]`. Formulas: the
GGUF block formats (ggml's block structs). Indices become int64 only where torch's indexing asks for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overspill.quant import grids
from overspill.quant.bits import as_f16, as_u16, as_u32, fields, table
from overspill.quant.grids import Grid, grid_on, signs_on

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# E2M1 numbers doubled; the scales below are halved to match.
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ1_DELTA = 0.125


def iq4_nl(blocks: Tensor) -> Tensor:
    """f16 d, 16 bytes of nibbles: d * table[q]."""
    return as_f16(blocks[:, :2]) * _lookup(IQ4_VALUES, fields(blocks[:, 2:], 4, 2).flatten(1))


def iq4_xs(blocks: Tensor) -> Tensor:
    """8 groups of 32 with 6-bit scales: d * (scale - 32) * table[q]."""
    high = fields(as_u16(blocks[:, 2:4]), 2, 8).flatten(1)
    low = fields(blocks[:, 4:8, None], 4, 2).flatten(1)
    step = as_f16(blocks[:, :2]) * ((low | high << 4) - 32)
    q = fields(blocks[:, 8:].unflatten(1, (8, 16)), 4, 2).flatten(2)
    return (step[..., None] * _lookup(IQ4_VALUES, q)).flatten(1)


def mxfp4(blocks: Tensor) -> Tensor:
    """u8 exponent e, 16 bytes of nibbles: 2^(e - 128) * table[q]; e = 255 is a number like the others."""
    e = blocks[:, :1].to(torch.int32)
    bits = torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23)
    return bits.view(torch.float32) * _lookup(FP4_VALUES, fields(blocks[:, 1:], 4, 2).flatten(1))


def nvfp4(blocks: Tensor) -> Tensor:
    """4 groups of 16, each with an unsigned E4M3 scale: scale / 2 * table[q]; codes 0 and 0x7F scale by 0."""
    code = blocks[:, :4].to(torch.int32)
    exponent, mantissa = code >> 3 & 15, (code & 7).to(torch.float32)
    normal = (8 + mantissa) * torch.exp2((exponent - 11).to(torch.float32))
    half_scale = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    half_scale = half_scale.masked_fill((code == 0) | (code == 0x7F), 0.0)
    q = fields(blocks[:, 4:].unflatten(1, (4, 8)), 4, 2).flatten(2)
    return (half_scale[..., None] * _lookup(FP4_VALUES, q)).flatten(1)


def iq2_xxs(blocks: Tensor) -> Tensor:
    """Per 32 values: 4 grid bytes, 4 x 7 sign bits and a 4-bit scale: d * (0.5 + scale) / 4 * sign * point."""
    words = as_u32(blocks[:, 2:]).unflatten(1, (8, 2))
    index = fields(words[..., :1], 8, 4).squeeze(-1)
    return _signed_sevens(grids.IQ2_XXS, blocks, index, words[..., 1], 0.25)


def iq2_xs(blocks: Tensor) -> Tensor:
    """Per 8 values a u16: 9 bits of grid index, 7 of signs; 4-bit scale per 16 values."""
    words = as_u16(blocks[:, 2:66])
    step = _half_steps(blocks[:, :2], fields(blocks[:, 66:74, None], 4, 2).flatten(1), 0.25)
    points = _points(grids.IQ2_XS, words & 511) * signs_on(blocks.device)[words >> 9]
    return _scaled(step, points)


def iq2_s(blocks: Tensor) -> Tensor:
    """Per 8 values a 10-bit grid index (8 + 2 bits) and a sign byte; 4-bit scale per 16 values."""
    high = fields(blocks[:, 66:74, None], 2, 4).flatten(1)
    step = _half_steps(blocks[:, :2], fields(blocks[:, 74:82, None], 4, 2).flatten(1), 0.25)
    points = _points(grids.IQ2_S, blocks[:, 2:34] | high << 8) * _sign_bytes(blocks[:, 34:66])
    return _scaled(step, points)


def iq3_xxs(blocks: Tensor) -> Tensor:
    """Per 32 values: 8 grid bytes (4 values each), 4 x 7 sign bits and a 4-bit scale: d * (0.5 + scale) / 2."""
    index = blocks[:, 2:66].to(torch.int32).unflatten(1, (8, 8))
    return _signed_sevens(grids.IQ3_XXS, blocks, index, as_u32(blocks[:, 66:]), 0.5)


def iq3_s(blocks: Tensor) -> Tensor:
    """Per 4 values a 9-bit grid index (8 + 1 bits), sign bits, 4-bit scale per 32 values: d * (1 + 2 scale)."""
    high = fields(blocks[:, 66:74, None], 1, 8).flatten(1)
    step = as_f16(blocks[:, :2]) * (1 + 2 * fields(blocks[:, 106:110, None], 4, 2).flatten(1))
    points = _points(grids.IQ3_S, blocks[:, 2:66] | high << 8).unflatten(1, (32, 2)).flatten(2)
    return _scaled(step, points * _sign_bytes(blocks[:, 74:106]))


def iq1_s(blocks: Tensor) -> Tensor:
    """Per 8 values an 11-bit index; per 32 a 3-bit scale, the sign of delta: d * (1 + 2 scale) * (point + delta)."""
    words = as_u16(blocks[:, 34:])
    index = blocks[:, 2:34] | fields(words[..., None], 3, 4).flatten(1) << 8
    step = as_f16(blocks[:, :2]) * (1 + 2 * (words >> 12 & 7))
    delta = IQ1_DELTA * (1 - 2 * (words >> 15))
    return _scaled(step, _points(grids.IQ1, index).unflatten(1, (8, 4)) + delta[..., None, None])


def iq1_m(blocks: Tensor) -> Tensor:
    """As iq1_s with the sign of delta per 8 values, a 3-bit scale per 16, and d spread over the scale words."""
    words = as_u16(blocks[:, 48:])
    shifts = torch.tensor((12, 8, 4, 0), dtype=torch.int32, device=blocks.device)
    masks = torch.tensor((0xF, 0xF0, 0xF00, 0xF000), dtype=torch.int32, device=blocks.device)
    d_bits = (words >> shifts & masks).sum(1, keepdim=True, dtype=torch.int32)
    d = d_bits.to(torch.int16).view(torch.float16).to(torch.float32)
    high = fields(blocks[:, 32:48, None], 4, 2).flatten(1)
    points = _points(grids.IQ1, blocks[:, :32] | (high & 7) << 8)
    delta = IQ1_DELTA * (1 - 2 * (high >> 3))
    return _scaled(d * (1 + 2 * fields(words[..., None], 3, 4).flatten(1)), points + delta[..., None])


def _lookup(values: tuple[int, ...], index: Tensor) -> Tensor:
    return table(values, index.device)[index]


def _points(grid: Grid, index: Tensor) -> Tensor:
    return grid_on(grid, index.device)[index]


def _sign_bytes(raw: Tensor) -> Tensor:
    """Bytes `[n, m]` -> `[n, m, 8]` of +1.0 and -1.0: bit j set makes element j negative."""
    return (1 - 2 * fields(raw[..., None], 1, 8).squeeze(-1)).to(torch.float32)


def _half_steps(d: Tensor, scale: Tensor, factor: float) -> Tensor:
    """d * (0.5 + scale) * factor; `factor` is a power of two."""
    return as_f16(d) * (0.5 + scale) * factor


def _signed_sevens(grid: Grid, blocks: Tensor, index: Tensor, words: Tensor, factor: float) -> Tensor:
    """Groups of 32 whose word `[n, 8]` holds 4 x 7 sign bits and, in its top 4 bits, the scale."""
    points = _points(grid, index).reshape(-1, 8, 4, 8)
    signs = signs_on(blocks.device)[fields(words[..., None], 7, 4).squeeze(-1)]
    return _scaled(_half_steps(blocks[:, :2], words >> 28, factor), points * signs)


def _scaled(step: Tensor, values: Tensor) -> Tensor:
    """Multiply equal runs of `values` `[n, ...]` by the steps `[n, n_steps]` of their groups."""
    return (step[..., None] * values.reshape(*step.shape, -1)).flatten(1)
