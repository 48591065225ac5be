"""Reading fields out of stored blocks, in plain torch, for the reference dequantisation.

A batch of blocks is a uint8 tensor `[n_blocks, block_bytes]`; all numbers in it are little-endian. Every helper
works on any torch device and returns int32 or float32, so that later arithmetic neither wraps nor truncates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_f16(raw: Tensor) -> Tensor:
    """uint8 `[..., 2 n]` -> float32 `[..., n]`, read as IEEE half."""
    return raw.clone(memory_format=torch.contiguous_format).view(torch.float16).to(torch.float32)


def as_i8(raw: Tensor) -> Tensor:
    """uint8 -> int32 of the same shape, read as signed bytes."""
    return raw.view(torch.int8).to(torch.int32)


def as_u16(raw: Tensor) -> Tensor:
    """uint8 `[..., 2 n]` -> int32 `[..., n]`."""
    wide = raw.to(torch.int32)
    return wide[..., ::2] | wide[..., 1::2] << 8


def as_u32(raw: Tensor) -> Tensor:
    """uint8 `[..., 4 n]` -> int64 `[..., n]` (int64: torch shifts signed integers arithmetically)."""
    wide = as_u16(raw).to(torch.int64)
    return wide[..., ::2] | wide[..., 1::2] << 16


def fields(raw: Tensor, width: int, n_fields: int) -> Tensor:
    """Integers `[..., m]` -> int `[..., n_fields, m]`: field f is the bits `width * f ...` of every integer."""
    wide = raw.to(torch.int32) if raw.dtype == torch.uint8 else raw
    shifts = torch.arange(0, width * n_fields, width, device=raw.device)[:, None]
    return wide.unsqueeze(-2) >> shifts.to(wide.dtype) & (1 << width) - 1


def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A lookup table as a float32 tensor on `device`."""
    return torch.tensor(values, dtype=torch.float32, device=device)
