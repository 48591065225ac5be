"""Causal attention with running softmax, for any head size, any number of queries and cells, on any card.

The H / G query heads that share a kv head are rows of one tile: row m of a program is query m // (H / G), head
m % (H / G), so keys and values are read once for all of them. Softmax is computed with exp2, in float32; keys and
values that every row of a tile sees are processed without masks (Dao et al., arXiv:2205.14135).
Head sizes are cut into a power of two and a rest, so that 192 or 576 channels cost what they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two
from overspill.kernels.triton.q8_rows import read_tile

_LN2 = tl.constexpr(math.log(2.0))
LOG2E = math.log2(math.e)


@triton.jit
def _keys(
    k, cells, is_cell, FIRST: tl.constexpr, A: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    SCALES: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Channels from FIRST on of cells `[N]`: `[WIDTH, N]`."""
    if SCALES > 0:
        keys = tl.trans(read_tile(k, cells, is_cell, FIRST, A, WIDTH, CELL, SCALES))
    else:
        a = FIRST + tl.arange(0, WIDTH)
        k += cells.to(tl.int64)[None, :] * CELL
        if IS_MASKED or FIRST + WIDTH > A:
            keys = tl.load(k + a[:, None], mask=is_cell[None, :] & (a < A)[:, None], other=0.0)
        else:
            keys = tl.load(k + a[:, None])
    return keys


@triton.jit
def _values(
    v, cells, is_cell, B: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr, SCALES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Values of cells `[N]`: `[N, WIDTH]`."""
    if SCALES > 0:
        values = read_tile(v, cells, is_cell, 0, B, WIDTH, CELL, SCALES)
    else:
        b = tl.arange(0, WIDTH)
        v += cells.to(tl.int64)[:, None] * CELL
        if IS_MASKED or WIDTH > B:
            values = tl.load(v + b[None, :], mask=is_cell[:, None] & (b < B)[None, :], other=0.0)
        else:
            values = tl.load(v + b[None, :])
    return values


@triton.jit
def fold(
    total, weight, top, q1, q2, k, v, cells, last_seen, n_cells, window, scale,
    A: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, B: tl.constexpr, B1: tl.constexpr, K_CELL: tl.constexpr,
    V_CELL: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, IS_MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, RING: tl.constexpr = 0,
):  # fmt: skip
    """One tile of cells into the running sums: total `[M, B1]`, weight `[M]`, top `[M]` (of logits in base 2).

    K_SCALES, V_SCALES: see `q8_rows`; 0: cells are numbers as they are. RING: cells stand at their number modulo RING;
    0: at their number.
    """
    is_cell = cells < n_cells
    at = cells
    if RING > 0:
        at = cells % RING
    keys = _keys(k, at, is_cell, 0, A, A1, K_CELL, K_SCALES, IS_MASKED).to(q1.dtype)
    logits = tl.dot(q1, keys, input_precision="ieee")
    if A2 > 0:
        keys = _keys(k, at, is_cell, A1, A, A2, K_CELL, K_SCALES, True).to(q2.dtype)
        logits = tl.dot(q2, keys, logits, input_precision="ieee")
    logits *= scale
    if IS_MASKED:
        is_seen = cells[None, :] <= last_seen[:, None]
        if HAS_WINDOW:
            is_seen = is_seen & (cells[None, :] > last_seen[:, None] - window)
        logits = tl.where(is_seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    base = new_top
    if HAS_WINDOW:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    share = tl.exp2(logits - base[:, None])
    keep = tl.exp2(top - base)
    weight = weight * keep + tl.sum(share, axis=1)
    values = _values(v, at, is_cell, B, B1, V_CELL, V_SCALES, IS_MASKED).to(q1.dtype)
    total = tl.dot(share.to(values.dtype), values, total * keep[:, None], input_precision="ieee")
    return total, weight, new_top


@triton.jit(do_not_specialize=["n_queries", "n_cells", "window"])
def _flash(
    q, k, v, out, lse, sinks, n_queries, n_cells, window, scale,
    R: tl.constexpr, A: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, B: tl.constexpr, B1: tl.constexpr,
    G: tl.constexpr, Q_TOKEN: tl.constexpr, Q_HEAD: tl.constexpr, K_HEAD: tl.constexpr, K_CELL: tl.constexpr,
    V_HEAD: tl.constexpr, V_CELL: tl.constexpr, HAS_WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # The last queries see most: start them first.
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    g = tl.program_id(1)
    rows = i_tile * M + tl.arange(0, M)
    tokens = rows // R
    heads = g * R + rows % R
    is_there = tokens < n_queries
    last_seen = n_cells - n_queries + tokens
    q += tokens.to(tl.int64)[:, None] * Q_TOKEN + heads[:, None] * Q_HEAD
    a1 = tl.arange(0, A1)
    q1 = tl.load(q + a1[None, :], mask=is_there[:, None] & (a1 < A)[None, :], other=0.0)
    q2 = q1
    if A2 > 0:
        a2 = A1 + tl.arange(0, A2)
        q2 = tl.load(q + a2[None, :], mask=is_there[:, None] & (a2 < A)[None, :], other=0.0)
    k += g.to(tl.int64) * K_HEAD
    v += g.to(tl.int64) * V_HEAD
    total = tl.zeros([M, B1], tl.float32)
    weight = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + heads, mask=is_there, other=0.0) * 1.4426950408889634
        weight += 1.0
    cells = tl.arange(0, N)
    first_token = i_tile * M // R
    last_token = tl.minimum((i_tile * M + M - 1) // R, n_queries - 1)
    seen_by_some = n_cells - n_queries + last_token + 1
    first_cell = 0
    seen_by_all = (n_cells - n_queries + first_token + 1) // N * N
    if HAS_WINDOW:
        first_cell = tl.maximum(0, n_cells - n_queries + first_token - window + 1) // N * N
        seen_by_all = first_cell
    for start in range(first_cell, seen_by_all, N):
        total, weight, top = fold(
            total, weight, top, q1, q2, k, v, start + cells, last_seen, n_cells, window, scale, A, A1, A2, B, B1,
            K_CELL, V_CELL, 0, 0, False, HAS_WINDOW
        )  # fmt: skip
    for start in range(seen_by_all, seen_by_some, N):
        total, weight, top = fold(
            total, weight, top, q1, q2, k, v, start + cells, last_seen, n_cells, window, scale, A, A1, A2, B, B1,
            K_CELL, V_CELL, 0, 0, True, HAS_WINDOW
        )  # fmt: skip
    b = tl.arange(0, B1)
    at = (tokens.to(tl.int64) * (G * R) + heads)[:, None] * B + b[None, :]
    mask = is_there[:, None] & (b < B)[None, :]
    tl.store(out + at, (total / weight[:, None]).to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + heads.to(tl.int64) * n_queries + tokens, (top + tl.log2(weight)) * _LN2, mask=is_there)


_kernel = Kernel(_flash)


class Partial(NamedTuple):
    """Attention over a part of the cells: output `[T, H, B]` and the log of the sum of exponentials, `[H, T]`."""

    out: torch.Tensor
    lse: torch.Tensor


class Tile(NamedTuple):
    """Rows (queries times heads of a group) and cells that a program takes at once, and how it is compiled."""

    n_rows: int
    n_cells: int
    tuning: Tuning


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """`kernels.Attention` without a limit: returns `[T, H * B]` in the dtype of q. tile: None = the usual one."""
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    _run(q, k, v, out, None, scale, window, sinks, tile)
    return out.flatten(1)


def flash_partial(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> Partial:
    """As `flash`, to be merged with attention over earlier cells."""
    out = torch.empty((q.shape[0], q.shape[1], v.shape[2]), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    _run(q, k, v, out, lse, scale, None, None, None)
    return Partial(out, lse)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
    tile: Tile | None,
) -> None:
    T, H, A = q.shape
    G, C, B = v.shape
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "channels must be contiguous"
    tile = tile or _tile(T * (H // G), A, q.dtype)
    strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    constants = (H // G, *cut_channels(A), B, max(16, power_of_two(B)), G, *strides, window is not None)
    args = (q, k, v, out, lse, sinks, T, C, window or 0, scale * LOG2E)
    grid = (cdiv(T * (H // G), tile.n_rows), G)
    _kernel(grid, args, (*constants, tile.n_rows, tile.n_cells), tile.tuning)


def cut_channels(A: int) -> tuple[int, int, int]:
    """A head size, the power of two in it, and the padded rest: 576 -> 512 + 64, 128 -> 128 + 0."""
    first = max(16, power_of_two(A + 1) // 2)
    return A, first, max(16, power_of_two(A - first)) if first < A else 0


def _tile(n_rows: int, A: int, dtype: torch.dtype) -> Tile:
    """Rows and cells of a tile; few rows where there are few, small tiles where heads are wide."""
    m = 16 if n_rows <= 16 else 64 if n_rows <= 256 or A > 256 else 128
    if dtype == torch.float32:
        return Tile(min(m, 32), 32, Tuning(4, 1))
    if A > 256:
        return Tile(m, 32, Tuning(8, 2))
    return Tile(m, 64, Tuning(8 if m == 128 else 4, 3 if A <= 128 else 2))
