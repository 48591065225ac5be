"""Attention of a few tokens, or of one to many cells, in one compiled call; see `rows`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.kernels.numba.finish import exp_from
from overspill.kernels.numba.jit import inner, inner_sums
from overspill.kernels.numba.memory import load_f32, next_number, reader, store_f32
from overspill.kernels.numba.native import callable_at, direct_address, float_bits
from overspill.kernels.numba.rows import ONE, ZERO, check_rows, dot
from overspill.kernels.numba.target import LANES, SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE


class AttentionCall(NamedTuple):
    """Addresses, and strides in bytes. window: of cells; sinks: 0 for none. scores: room for one head of each thread.

    n_run: so many of the cells follow each other, at least; the rest stand `ring_bytes` before where they would.
    scale: float32, in the low half. n_tasks: parts of the heads. next_task: a counter, to be set to 0 before.
    """

    q: int
    q_stride: int
    q_head_stride: int
    k: int
    k_stride: int
    k_head_stride: int
    v: int
    v_stride: int
    v_head_stride: int
    out: int
    sinks: int
    scores: int
    n_queries: int
    n_cells: int
    n_run: int
    n_heads: int
    n_kv_heads: int
    n_channels: int
    n_values: int
    window: int
    scale: int
    n_tasks: int
    next_task: int = 0
    k_ring_bytes: int = 0
    v_ring_bytes: int = 0


_SCALE, _NEXT_TASK = (AttentionCall._fields.index(name) for name in ("scale", "next_task"))
_read_attention = reader(AttentionCall)


def attend_few(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None, sinks: Tensor | None = None
) -> Tensor:
    """`kernels.Attention`, one head of one query after the other."""
    check_rows(q, k, v)
    (T, H, A), (G, C, _), B = q.shape, k.shape, v.shape[2]
    if k.shape != (G, C, A) or v.shape != (G, C, B) or H % G or T > C:
        raise ValueError(f"queries {q.shape}, keys {k.shape} and values {v.shape} do not fit")
    if sinks is not None and (sinks.shape != (H,) or sinks.dtype != torch.float32 or not sinks.is_contiguous()):
        raise ValueError(f"sinks {sinks.dtype} {tuple(sinks.shape)} do not fit {H} heads")
    out = torch.empty(T, H * B)
    call = WORKSPACE.memory("call", 8 * len(AttentionCall._fields))
    call.write(
        AttentionCall(
            *(q.data_ptr(), 4 * q.stride(0), 4 * q.stride(1)),
            *(k.data_ptr(), 4 * k.stride(1), 4 * k.stride(0)),
            *(v.data_ptr(), 4 * v.stride(1), 4 * v.stride(0)),
            out=out.data_ptr(),
            sinks=0 if sinks is None else sinks.data_ptr(),
            scores=WORKSPACE.memory("scores", scores_bytes(C)).address,
            n_queries=T,
            n_cells=C,
            n_run=C,
            n_heads=H,
            n_kv_heads=G,
            n_channels=A,
            n_values=B,
            window=C if window is None else window,
            scale=float_bits(scale),
            n_tasks=1,
        )
    )
    callable_at(attend_address(), 2)(call.address, 0)
    return out


@cache
def attend_address() -> int:
    """(call, i_thread). Tasks are neighbouring heads, which share keys and values."""
    digest = SOURCE_DIGEST

    def attend_some(call, i_thread):
        _ = digest
        c = _read_attention(call)
        scores = c.scores + i_thread * _scores_bytes(c.n_cells)
        while True:
            task = next_number(call + 8 * _NEXT_TASK)
            if task >= c.n_tasks:
                break
            for h in range(c.n_heads * task // c.n_tasks, c.n_heads * (task + 1) // c.n_tasks):
                _attend_head(c, h, scores, load_f32(call, 2 * _SCALE))

    return direct_address(attend_some, 2)


def scores_bytes(n_cells: int) -> int:
    """What a thread needs: whole lines, for the cells and the vector that may begin at the last."""
    return (4 * (n_cells + LANES) + 63) // 64 * 64


_scores_bytes = inner(scores_bytes)


@inner_sums
def _attend_head(c, h, scores, scale):
    n_shared = c.n_heads // c.n_kv_heads
    for t in range(c.n_queries):
        last = c.n_cells - c.n_queries + t + 1
        first = max(0, last - c.window)
        q = c.q + t * c.q_stride + h * c.q_head_stride
        k = c.k + h // n_shared * c.k_head_stride + first * c.k_stride
        v = c.v + h // n_shared * c.v_head_stride + first * c.v_stride
        out = c.out + 4 * (t * c.n_heads + h) * c.n_values
        n_run = min(last, c.n_run) - first
        total = _weigh(q, k, c, scores, n_run, last - first, h, scale)
        _mix(v, c, scores, n_run, last - first, out, ONE / total)


@inner_sums
def _weigh(q, k, c, scores, n_run, n, h, scale):
    """The weights of n cells, not divided by their sum, to `scores`; returns the sum, with the sink's."""
    top = load_f32(c.sinks, h) if c.sinks != 0 else np.float32(-np.inf)
    for i in range(n_run):
        score = dot(q, k + i * c.k_stride, c.n_channels) * scale
        store_f32(scores, i, score)
        top = max(top, score)
    for i in range(n_run, n):
        score = dot(q, k - c.k_ring_bytes + i * c.k_stride, c.n_channels) * scale
        store_f32(scores, i, score)
        top = max(top, score)
    for i in range(n, n + LANES):
        store_f32(scores, i, top)
    for i in range(0, n, LANES):
        exp_from(scores + 4 * i, top)
    total = np.exp(load_f32(c.sinks, h) - top) if c.sinks != 0 else ZERO
    for i in range(n):
        total += load_f32(scores, i)
    return total


@inner_sums
def _mix(v, c, scores, n_run, n, out, factor):
    for b in range(c.n_values):
        store_f32(out, b, ZERO)
    _add(v, c, scores, 0, n_run, out, factor)
    _add(v - c.v_ring_bytes, c, scores, n_run, n, out, factor)


@inner_sums
def _add(v, c, scores, first, end, out, factor):
    for i in range(first, end):
        weight = load_f32(scores, i) * factor
        for b in range(c.n_values):
            store_f32(out, b, load_f32(out, b) + weight * load_f32(v + i * c.v_stride, b))
