"""Rows of cells in q8_0: 32 values that follow each other share a scale, and each is a signed byte times that.

A row is its bytes, then its scales as float16, so that it stays one run of memory; a last group may be shorter. The
scale is the largest magnitude over 127, as in llama.cpp's type of that name, whose blocks hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
import torch.nn.functional as F

from overspill.gguf.types import TensorType

Q8_GROUP: Final = TensorType.Q8_0.block.n_elements


class Q8Rows(Protocol):
    """Reads and writes cells that are such rows, R bytes each, on one kind of device."""

    def put(self, x_TGA: torch.Tensor, cells_GTR: torch.Tensor) -> None:
        """Heads of tokens into cells that follow each other."""

    def put_steps(self, x_TGA: torch.Tensor, cells_SGCR: torch.Tensor, slots: torch.Tensor, at: torch.Tensor) -> None:
        """Heads of token t into cell `at[t]`, modulo C, of slot `slots[t]`; integers `[T]` on the device."""

    def read(self, cells_GCR: Sequence[torch.Tensor], dims: Sequence[int]) -> list[torch.Tensor]:
        """Values `[G, C, A]` of each, in memory that the next call may use again."""


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


class TorchRows:
    """`Q8Rows` on any device; reads float32."""

    def put(self, x_TGA: torch.Tensor, cells_GTR: torch.Tensor) -> None:
        cells_GTR.copy_(encode(x_TGA.transpose(0, 1)))

    def put_steps(self, x_TGA: torch.Tensor, cells_SGCR: torch.Tensor, slots: torch.Tensor, at: torch.Tensor) -> None:
        heads = torch.arange(cells_SGCR.shape[1], device=cells_SGCR.device)
        cells = at.long() % cells_SGCR.shape[2]
        cells_SGCR.index_put_((slots.long()[:, None], heads, cells[:, None]), encode(x_TGA))

    def read(self, cells_GCR: Sequence[torch.Tensor], dims: Sequence[int]) -> list[torch.Tensor]:
        return [decode(cells, dim) for cells, dim in zip(cells_GCR, dims, strict=True)]


TORCH_ROWS: Final = TorchRows()
