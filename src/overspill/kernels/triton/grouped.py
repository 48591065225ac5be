"""Grouped products of a layer's experts: many small matrix products, of sizes that only the device knows.

A program computes one tile of rows of one expert; which one, `Sorted.tiles` says. The first product reads the
tokens' rows where they lie (no gathered copy), multiplies them with gate and up at once and writes the activated
hidden values; the second multiplies those with down. Accumulation is float32 over the whole inner dimension in
order, so a row's result does not depend on the other rows, nor on how experts are cut into slabs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv
from overspill.kernels.triton.norm import Gated
from overspill.kernels.triton.sort import Sorted


@triton.jit
def _affine(y, scale, bias, expert_of, slot, cols, N: tl.constexpr):
    """y * scale[expert] + bias[expert], where there are such; expert_of is None only where there are not."""
    if scale is not None:
        y *= tl.load(scale + tl.load(expert_of + slot))
    if bias is not None:
        at = tl.load(expert_of + slot).to(tl.int64) * N + cols
        y += tl.load(bias + at, mask=cols < N, other=0.0)[None, :]
    return y


@triton.jit
def _gate_up(
    x, gate, up, hidden, order, offsets, tiles, expert_of, gate_scale, up_scale, gate_bias, up_bias,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    ACTIVATE: tl.constexpr, LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n_col_tiles = tl.cdiv(F, BN)
    i_tile = tl.program_id(0) // n_col_tiles
    slot = tl.load(tiles + 2 * i_tile)
    if slot < 0:
        return
    rows = tl.load(tiles + 2 * i_tile + 1) + tl.arange(0, BM)
    is_row = rows < tl.load(offsets + slot + 1)
    tokens = tl.load(order + rows, mask=is_row, other=0) // K
    cols = tl.program_id(0) % n_col_tiles * BN + tl.arange(0, BN)
    is_col = cols < F
    d = tl.arange(0, BK)
    x += tokens.to(tl.int64)[:, None] * D + d[None, :]
    there = tl.where(is_col, cols, 0)[None, :] * D + d[:, None]
    gate += slot.to(tl.int64) * GATE_STRIDE + there
    up += slot.to(tl.int64) * UP_STRIDE + there
    g = tl.zeros([BM, BN], tl.float32)
    u = tl.zeros([BM, BN], tl.float32)
    for first in range(0, D, BK):
        if D % BK == 0:
            a = tl.load(x + first)
            b_gate = tl.load(gate + first)
            b_up = tl.load(up + first)
        else:
            is_inner = first + d < D
            a = tl.load(x + first, mask=is_inner[None, :], other=0.0)
            b_gate = tl.load(gate + first, mask=is_inner[:, None], other=0.0)
            b_up = tl.load(up + first, mask=is_inner[:, None], other=0.0)
        g = tl.dot(a, b_gate, g, input_precision="ieee")
        u = tl.dot(a, b_up, u, input_precision="ieee")
    g = _affine(g, gate_scale, gate_bias, expert_of, slot, cols, F)
    u = _affine(u, up_scale, up_bias, expert_of, slot, cols, F)
    at = rows.to(tl.int64)[:, None] * F + cols[None, :]
    tl.store(hidden + at, ACTIVATE(g, u, LIMIT).to(hidden.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


@triton.jit
def _down(
    hidden, down, out, offsets, tiles, expert_of, scale, bias,
    F: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n_col_tiles = tl.cdiv(D, BN)
    i_tile = tl.program_id(0) // n_col_tiles
    slot = tl.load(tiles + 2 * i_tile)
    if slot < 0:
        return
    first_row = tl.load(tiles + 2 * i_tile + 1)
    rows = first_row + tl.arange(0, BM)
    end = tl.load(offsets + slot + 1)
    is_row = rows < end
    cols = tl.program_id(0) % n_col_tiles * BN + tl.arange(0, BN)
    is_col = cols < D
    f = tl.arange(0, BK)
    hidden += tl.where(is_row, rows, first_row).to(tl.int64)[:, None] * F + f[None, :]
    down += slot.to(tl.int64) * STRIDE + (tl.where(is_col, cols, 0)[None, :] * F + f[:, None])
    y = tl.zeros([BM, BN], tl.float32)
    for first in range(0, F, BK):
        if F % BK == 0:
            a = tl.load(hidden + first)
            b = tl.load(down + first)
        else:
            is_inner = first + f < F
            a = tl.load(hidden + first, mask=is_inner[None, :], other=0.0)
            b = tl.load(down + first, mask=is_inner[:, None], other=0.0)
        y = tl.dot(a, b, y, input_precision="ieee")
    y = _affine(y, scale, bias, expert_of, slot, cols, D)
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    tl.store(out + at, y.to(out.dtype.element_ty), mask=is_row[:, None] & is_col[None, :])


_gate_up_kernel = Kernel(_gate_up)
_down_kernel = Kernel(_down)


class Shape(NamedTuple):
    """n_used: experts of a token. D, F: widths of hidden states and of an expert."""

    n_used: int
    D: int
    F: int


class Tiles(NamedTuple):
    """Rows, columns and inner values of a tile, and how its kernel is compiled."""

    m: int
    n: int
    k: int
    tuning: Tuning


class Stacks(NamedTuple):
    """Plain matrices of some experts, each contiguous: gate and up `[n, F, D]`, down `[n, D, F]`, of one dtype."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Extras(NamedTuple):
    """Scales `[E]` and biases `[E, F or D]` of gate, up, down, float32 or None. expert_of: int32, expert of a slot."""

    expert_of: torch.Tensor | None
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


_GATE_UP_TILES = {
    16: Tiles(16, 64, 128, Tuning(4, 3)),
    32: Tiles(32, 64, 64, Tuning(4, 4)),
    64: Tiles(64, 128, 64, Tuning(8, 3)),
    128: Tiles(128, 128, 64, Tuning(8, 3)),
}
_DOWN_TILES = {
    16: Tiles(16, 64, 128, Tuning(4, 4)),
    32: Tiles(32, 128, 64, Tuning(4, 4)),
    64: Tiles(64, 128, 64, Tuning(4, 4)),
    128: Tiles(128, 256, 64, Tuning(8, 3)),
}
_F32_TILES = Tiles(16, 32, 32, Tuning(4, 1))


def tile_rows(n_pairs: int, n_experts: int) -> int:
    """Rows of a tile that suit the average number of tokens of an expert; n_experts: of the layer, not of a slab."""
    average = n_pairs / n_experts
    return 16 if average <= 16 else 32 if average <= 48 else 64 if average <= 96 else 128


def gate_up(
    x: torch.Tensor,
    stacks: Stacks,
    rows: Sorted,
    hidden: torch.Tensor,
    extras: Extras,
    shape: Shape,
    activate: Gated,
    tile_m: int,
    tiles: Tiles | None = None,
) -> None:
    """hidden = activate(x gate^T, x up^T) for every row of work. x: `[T, D]`; hidden: `[T K, F]`."""
    tiles = tiles or _pick(_GATE_UP_TILES, tile_m, x.dtype)
    args = (x, stacks.gate, stacks.up, hidden, rows.order, rows.offsets, rows.tiles, extras.expert_of)
    vectors = (*extras.scales[:2], *extras.biases[:2])
    strides = (stacks.gate.stride(0), stacks.up.stride(0))
    constants = (*shape, *strides, *activate, tile_m, tiles.n, tiles.k)
    grid = (len(rows.tiles) * cdiv(shape.F, tiles.n),)
    _gate_up_kernel(grid, (*args, *vectors), constants, tiles.tuning)


def down(
    hidden: torch.Tensor,
    stacks: Stacks,
    rows: Sorted,
    out: torch.Tensor,
    extras: Extras,
    shape: Shape,
    tile_m: int,
    tiles: Tiles | None = None,
) -> None:
    """out = hidden down^T for every row of work. hidden: `[T K, F]`; out: `[T K, D]`."""
    tiles = tiles or _pick(_DOWN_TILES, tile_m, hidden.dtype)
    args = (hidden, stacks.down, out, rows.offsets, rows.tiles, extras.expert_of, extras.scales[2], extras.biases[2])
    constants = (shape.F, shape.D, stacks.down.stride(0), tile_m, tiles.n, tiles.k)
    grid = (len(rows.tiles) * cdiv(shape.D, tiles.n),)
    _down_kernel(grid, args, constants, tiles.tuning)


def _pick(table: dict[int, Tiles], tile_m: int, dtype: torch.dtype) -> Tiles:
    return _F32_TILES if dtype == torch.float32 else table[tile_m]
