"""Attention of decoding sequences: one token each, whose slots and positions lie on the device.

Nothing here depends on how long a sequence is except how often loops run, so the launches can be recorded and replayed
for the tokens that follow. The cells that a token sees are shared out evenly over a fixed number of programs; what
these gather is merged by their log-sum-exp, always in the same order (flash decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels import Steps
from overspill.kernels.triton.flash import LOG2E, cut_channels, fold
from overspill.kernels.triton.heads import Angles, HeadGains, move, turn_of
from overspill.kernels.triton.launch import Kernel, Tuning, follow, power_of_two
from overspill.kernels.triton.q8_rows import n_row_values, reading_dtype

_N_PROGRAMS = 264
_MAX_SPLITS = 64
_TILE = 64


@triton.jit
def _prepare(
    q, k, v, q_out, k_cache, v_cache, slots, positions, q_gain, k_gain, cos, sin, eps,
    A: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, B: tl.constexpr, V_REST: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr, K_CELL: tl.constexpr,
    V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, V_CELL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. H of q go to q_out, the next G are k and the last G v: they go to their token's cell."""
    follow(IS_CHAINED)
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    is_there = tokens >= 0
    slot = tl.load(slots + tokens).to(tl.int64)
    cell = (tl.load(positions + tokens) % (K_HEAD // K_CELL)).to(tl.int64)
    if head < H:
        move(q + tokens * Q_STRIDE + head * A, q_out + tokens * (H * A) + head * A, q_gain, cos, sin, tokens, is_there,
              eps, A, N_ROT, PAIRS, HALF, REST, True)  # fmt: skip
    elif head < H + G:
        g = (head - H).to(tl.int64)
        to = k_cache + slot * K_SLOT + g * K_HEAD + cell * K_CELL
        move(k + tokens * K_STRIDE + g * A, to, k_gain, cos, sin, tokens, is_there, eps, A, N_ROT, PAIRS, HALF, REST,
              True)  # fmt: skip
    else:
        g = (head - H - G).to(tl.int64)
        to = v_cache + slot * V_SLOT + g * V_HEAD + cell * V_CELL
        move(v + tokens * V_STRIDE + g * B, to, None, cos, sin, tokens, is_there, eps, B, 0, False, 1, V_REST,
              False)  # fmt: skip


@triton.jit(do_not_specialize=["window"])
def _attend(
    q, k, v, out, lse, slots, positions, window, scale,
    R: tl.constexpr, A: tl.constexpr, A1: tl.constexpr, A2: tl.constexpr, B: tl.constexpr, B1: tl.constexpr,
    G: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr, K_CELL: tl.constexpr, V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr, V_CELL: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token, kv head, split): its share of the token's cells, for the R query heads of the kv head. Cells of
    layers with a window or chunks are a ring."""
    RING: tl.constexpr = K_HEAD // K_CELL if HAS_WINDOW or IS_CHUNK else 0
    follow(IS_CHAINED)
    t = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    slot = tl.load(slots + t).to(tl.int64)
    position = tl.load(positions + t)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, position - window + 1)
    if IS_CHUNK:
        first = position // window * window
    share = tl.cdiv(tl.cdiv(position + 1 - first, SPLITS), N) * N
    start = first + split * share
    end = tl.minimum(start + share, position + 1)
    rows = tl.arange(0, M)
    heads = g * R + rows
    is_there = rows < R
    q += t * (G * R * A) + heads[:, None] * A
    a1 = tl.arange(0, A1)
    q1 = tl.load(q + a1[None, :], mask=is_there[:, None] & (a1 < A)[None, :], other=0.0)
    q2 = q1
    if A2 > 0:
        a2 = A1 + tl.arange(0, A2)
        q2 = tl.load(q + a2[None, :], mask=is_there[:, None] & (a2 < A)[None, :], other=0.0)
    k += slot * K_SLOT + g * K_HEAD
    v += slot * V_SLOT + g * V_HEAD
    total = tl.zeros([M, B1], tl.float32)
    weight = tl.zeros([M], tl.float32)
    top = tl.full([M], float("-inf"), tl.float32)
    last_seen = tl.zeros([M], tl.int32) + (end - 1)
    for at in range(start, end, N):
        total, weight, top = fold(
            total, weight, top, q1, q2, k, v, at + tl.arange(0, N), last_seen, end, 0, scale, A, A1, A2, B, B1, K_CELL,
            V_CELL, K_SCALES, V_SCALES, True, False, RING
        )  # fmt: skip
    b = tl.arange(0, B1)
    row = (t * (G * R) + heads) * SPLITS + split
    # Without cells: zeros, and the log of nothing.
    weight = tl.where(weight > 0.0, weight, 1.0)
    tl.store(out + row[:, None] * B + b[None, :], total / weight[:, None], mask=is_there[:, None] & (b < B)[None, :])
    tl.store(lse + row, top + tl.log2(weight), mask=is_there)


@triton.jit
def _merge(
    parts, lse, out, sinks,
    H: tl.constexpr, B: tl.constexpr, B1: tl.constexpr, SPLITS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (token, head): the sum of its parts, weighed by the exponentials they stand for (base 2)."""
    follow(IS_CHAINED)
    h = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * H + h
    splits = tl.arange(0, SPLITS)
    logs = tl.load(lse + row * SPLITS + splits)
    top = tl.max(logs, axis=0)
    rest = 0.0
    if sinks is not None:
        sink = tl.load(sinks + h) * 1.4426950408889634
        top = tl.maximum(top, sink)
        rest = tl.exp2(sink - top)
    weights = tl.exp2(logs - top)
    b = tl.arange(0, B1)
    at = (row * SPLITS + splits)[:, None] * B + b[None, :]
    values = tl.load(parts + at, mask=(b < B)[None, :], other=0.0)
    total = tl.sum(values * weights[:, None], axis=0) / (tl.sum(weights, axis=0) + rest)
    tl.store(out + row * B + b, total.to(out.dtype.element_ty), mask=b < B)


_prepare_kernel = Kernel(_prepare, may_chain=True)
_attend_kernel = Kernel(_attend, may_chain=True)
_merge_kernel = Kernel(_merge, may_chain=True)


def prepare_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    steps: Steps,
    angles: Angles,
    gains: HeadGains,
) -> torch.Tensor:
    """`kernels.PrepareSteps`: for cells that hold numbers as they are; returns the queries in their dtype."""
    k_cache, v_cache = caches
    _, G, _, A = k_cache.shape
    B = v_cache.shape[3]
    T, H = len(q), q.shape[1] // A
    q_out = torch.empty((T, H, A), dtype=k_cache.dtype, device=q.device)
    args = (q, k, v, q_out, k_cache, v_cache, *steps, gains.q, gains.k, angles.cos, angles.sin, gains.eps)
    rows = (q.stride(0), k.stride(0), v.stride(0))
    constants = (*turn_of(A, angles), H, G, B, power_of_two(B), *rows, *k_cache.stride()[:3], *v_cache.stride()[:3])
    _prepare_kernel((T, H + 2 * G), args, constants, Tuning(n_warps=1))
    return q_out


def attend_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    value_dim: int,
    steps: Steps,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`kernels.AttendSteps`, in `dtype`."""
    assert k.stride(3) == v.stride(3) == 1, "channels must be contiguous"
    q = q.to(reading_dtype(k.dtype, dtype)).contiguous()
    T, H, A = q.shape
    G, B = k.shape[1], value_dim
    n_splits = min(_MAX_SPLITS, power_of_two(max(1, _N_PROGRAMS // (T * G)) + 1) // 2)
    parts = torch.empty((T, H, n_splits, B), dtype=torch.float32, device=q.device)
    lse = torch.empty((T, H, n_splits), dtype=torch.float32, device=q.device)
    out = torch.empty((T, H * B), dtype=dtype, device=q.device)
    b1 = max(16, power_of_two(B))
    strides, scales = (*k.stride()[:3], *v.stride()[:3]), (0, 0)
    if k.dtype == torch.uint8:
        scales = n_row_values(k.shape[3]), n_row_values(v.shape[3])
        k, v = k.view(torch.int8), v.view(torch.int8)
    is_wide = A > 256
    constants = (H // G, *cut_channels(A), B, b1, G, *strides, *scales, window is not None, chunk is not None, n_splits)
    tile = (max(16, power_of_two(H // G)), 32 if is_wide or q.dtype == torch.float32 else _TILE)
    args = (q, k, v, parts, lse, *steps, window or chunk or 0, scale * LOG2E)
    _attend_kernel((T, G, n_splits), args, (*constants, *tile), Tuning(n_warps=8 if is_wide else 4, n_stages=2))
    _merge_kernel((T, H), (parts, lse, out, sinks), (H, B, b1, n_splits), Tuning(n_warps=4))
    return out
