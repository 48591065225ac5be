"""Rows of cells in q8_0: 32 values that follow each other share a scale, and each is a signed byte times that.

A row is its bytes, then its scales as float16, so that it stays one run of memory; a last group may be shorter. The
scale is the largest magnitude over 127, as in llama.cpp's type of that name, whose blocks hold the same numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from overspill.cache.cells import Q8_GROUP


def encode(x: torch.Tensor) -> torch.Tensor:
    """`[..., A]` -> rows, uint8 `[..., A + 2 ceil(A / 32)]`."""
    n_values = x.shape[-1]
    groups = F.pad(x.float(), (0, -n_values % Q8_GROUP)).unflatten(-1, (-1, Q8_GROUP))
    scales = groups.abs().amax(-1) / 127.0
    inverse = torch.where(scales > 0, 1.0 / scales, 0.0)
    values = torch.round(groups * inverse[..., None]).to(torch.int8).flatten(-2)[..., :n_values]
    return torch.cat([values.view(torch.uint8), scales.to(torch.float16).contiguous().view(torch.uint8)], -1)


def decode(rows: torch.Tensor, n_values: int) -> torch.Tensor:
    """Rows -> float32 `[..., A]`, contiguous."""
    values = rows[..., :n_values].view(torch.int8).to(torch.float32, memory_format=torch.contiguous_format)
    scales = rows[..., n_values:].view(torch.float16).to(torch.float32)
    n_whole = n_values // Q8_GROUP
    values[..., : n_whole * Q8_GROUP].unflatten(-1, (n_whole, Q8_GROUP)).mul_(scales[..., :n_whole, None])
    if n_whole * Q8_GROUP < n_values:
        values[..., n_whole * Q8_GROUP :].mul_(scales[..., n_whole:])
    return values
