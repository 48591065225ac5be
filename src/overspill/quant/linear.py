"""Reference dequantisation of the types whose block has one scale (and perhaps one offset).

Every function takes blocks, uint8 `[n, block_bytes]`, and returns float32 `[n, block_elements]`. Formulas: the
GGUF block formats (ggml's block structs). Products and differences are rounded one by one, in the written order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overspill.quant.bits import as_f16, as_i8, as_u32, fields


def q4_0(blocks: Tensor) -> Tensor:
    """f16 d, 16 bytes of nibbles (low ones are elements 0..15): d * (q - 8)."""
    return as_f16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]) - 8)


def q4_1(blocks: Tensor) -> Tensor:
    """f16 d, f16 m, 16 bytes of nibbles: d * q + m."""
    return as_f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]) + as_f16(blocks[:, 2:4])


def q5_0(blocks: Tensor) -> Tensor:
    """f16 d, u32 of fifth bits, 16 bytes of nibbles: d * (q - 16)."""
    return as_f16(blocks[:, :2]) * (_five_bits(blocks[:, 2:]) - 16)


def q5_1(blocks: Tensor) -> Tensor:
    """f16 d, f16 m, u32 of fifth bits, 16 bytes of nibbles: d * q + m."""
    return as_f16(blocks[:, :2]) * _five_bits(blocks[:, 4:]) + as_f16(blocks[:, 2:4])


def q8_0(blocks: Tensor) -> Tensor:
    """f16 d, 32 signed bytes: d * q."""
    return as_f16(blocks[:, :2]) * as_i8(blocks[:, 2:])


def q1_0(blocks: Tensor) -> Tensor:
    """f16 d, 128 bits, least significant first: +d where set, -d where not."""
    bits = fields(blocks[:, 2:, None], 1, 8).flatten(1)
    return as_f16(blocks[:, :2]) * (2 * bits - 1)


def q2_0(blocks: Tensor) -> Tensor:
    """f16 d, 64 fields of 2 bits, least significant first: d * (q - 1)."""
    return as_f16(blocks[:, :2]) * (fields(blocks[:, 2:, None], 2, 4).flatten(1) - 1)


def tq2_0(blocks: Tensor) -> Tensor:
    """Two halves of 32 bytes with 4 fields of 2 bits (field-major), f16 d: d * (q - 1)."""
    halves = blocks[:, :64].unflatten(1, (2, 32))
    return as_f16(blocks[:, 64:]) * (fields(halves, 2, 4).flatten(1) - 1)


def tq1_0(blocks: Tensor) -> Tensor:
    """Ternary digits, five to a byte (the last 4 bytes hold four), digit-major per run, f16 d: d * (digit - 1)."""
    runs = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    digits = torch.cat([_ternary(raw, n_digits) for raw, n_digits in runs], dim=1)
    return as_f16(blocks[:, 52:]) * (digits - 1)


def _ternary(raw: Tensor, n_digits: int) -> Tensor:
    powers = torch.tensor([3**n for n in range(n_digits)], dtype=torch.int32, device=raw.device)
    shifted = raw.to(torch.int32)[:, None, :] * powers[:, None] & 0xFF
    return (shifted * 3 >> 8).flatten(1)


def _nibbles(raw: Tensor) -> Tensor:
    return fields(raw, 4, 2).flatten(1)


def _five_bits(raw: Tensor) -> Tensor:
    high = fields(as_u32(raw[:, :4]), 1, 32).flatten(1).to(torch.int32)
    return _nibbles(raw[:, 4:]) | high << 4
