"""Attention of a few tokens, in one compiled call on the calling thread; see `rows`."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.kernels.numba.finish import exp_from
from overspill.kernels.numba.jit import inner_sums
from overspill.kernels.numba.memory import load_f32, reader, store_f32
from overspill.kernels.numba.native import callable_at, direct_address
from overspill.kernels.numba.rows import ONE, ZERO, check_rows, dot
from overspill.kernels.numba.target import LANES, SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE


class AttentionCall(NamedTuple):
    """Addresses, and strides in bytes. window: of cells; sinks: 0 for none. scores: room for one head."""

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
    n_heads: int
    n_kv_heads: int
    n_channels: int
    n_values: int
    window: int


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
    scores_bytes = 4 * (C + LANES)
    call = WORKSPACE.memory("call", 8 * len(AttentionCall._fields))
    call.write(
        AttentionCall(
            *(q.data_ptr(), 4 * q.stride(0), 4 * q.stride(1)),
            *(k.data_ptr(), 4 * k.stride(1), 4 * k.stride(0)),
            *(v.data_ptr(), 4 * v.stride(1), 4 * v.stride(0)),
            out=out.data_ptr(),
            sinks=0 if sinks is None else sinks.data_ptr(),
            scores=WORKSPACE.memory("scores", scores_bytes).address,
            n_queries=T,
            n_cells=C,
            n_heads=H,
            n_kv_heads=G,
            n_channels=A,
            n_values=B,
            window=C if window is None else window,
        )
    )
    callable_at(attend_address(), 1, 1)(call.address, scale)
    return out


@cache
def attend_address() -> int:
    """(call), scale."""
    digest = SOURCE_DIGEST

    def attend_all(call, scale):
        _ = digest
        c = _read_attention(call)
        n_shared = c.n_heads // c.n_kv_heads
        for t in range(c.n_queries):
            last = c.n_cells - c.n_queries + t + 1
            first = max(0, last - c.window)
            for h in range(c.n_heads):
                q = c.q + t * c.q_stride + h * c.q_head_stride
                k = c.k + h // n_shared * c.k_head_stride + first * c.k_stride
                v = c.v + h // n_shared * c.v_head_stride + first * c.v_stride
                out = c.out + 4 * (t * c.n_heads + h) * c.n_values
                total = _weigh(q, k, c, last - first, h, scale)
                _mix(v, c, last - first, out, ONE / total)

    return direct_address(attend_all, 1, 1)


@inner_sums
def _weigh(q, k, c, n, h, scale):
    """The weights of n cells, not divided by their sum, to c.scores; returns the sum, with the sink's."""
    top = load_f32(c.sinks, h) if c.sinks != 0 else np.float32(-np.inf)
    for i in range(n):
        score = dot(q, k + i * c.k_stride, c.n_channels) * scale
        store_f32(c.scores, i, score)
        top = max(top, score)
    for i in range(n, n + LANES):
        store_f32(c.scores, i, top)
    for i in range(0, n, LANES):
        exp_from(c.scores + 4 * i, top)
    total = np.exp(load_f32(c.sinks, h) - top) if c.sinks != 0 else ZERO
    for i in range(n):
        total += load_f32(c.scores, i)
    return total


@inner_sums
def _mix(v, c, n, out, factor):
    for b in range(c.n_values):
        store_f32(out, b, ZERO)
    for i in range(n):
        weight = load_f32(c.scores, i) * factor
        for b in range(c.n_values):
            store_f32(out, b, load_f32(out, b) + weight * load_f32(v + i * c.v_stride, b))
