"""The choice of experts, in one compiled call on the calling thread; see `rows`."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from overspill.kernels.numba.jit import inner_sums
from overspill.kernels.numba.memory import load_f32, load_i32, store_f32, store_i32
from overspill.kernels.numba.native import callable_at, direct_address
from overspill.kernels.numba.rows import ONE, ZERO, check_rows
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE

_SMALLEST_SUM = np.float32(6.103515625e-5)
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN, _SQRT_SOFTPLUS = 1, 2, 3, 4


def pick_experts(
    logits: Tensor, bias: Tensor | None, *, n_used: int, gating: int, is_normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The experts of each token, best first: ids int32 `[T, K]`, weights float32 `[T, K]`. See `kernels.Route`."""
    logits = logits.contiguous()
    check_rows(logits)
    n_tokens, n_experts = logits.shape
    if bias is not None and (bias.shape != (n_experts,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"a bias {bias.dtype} {tuple(bias.shape)} does not fit {n_experts} experts")
    if not 0 < n_used <= n_experts or gating not in (_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN, _SQRT_SOFTPLUS):
        raise ValueError(f"no such rule: {n_used} of {n_experts} experts, gating {gating}")
    ids, mix = torch.empty(n_tokens, n_used, dtype=torch.int32), torch.empty(n_tokens, n_used)
    scratch = WORKSPACE.memory("scores", 8 * n_experts).address
    bias_address = 0 if bias is None else bias.data_ptr()
    places = (logits.data_ptr(), bias_address, ids.data_ptr(), mix.data_ptr(), scratch)
    callable_at(pick_address(), 10, 1)(*places, n_tokens, n_experts, n_used, gating, is_normalised, scale)
    return ids, mix


@cache
def pick_address() -> int:
    """(logits, bias, ids, mix, scratch, n_tokens, n_experts, n_used, gating, is_normalised), scale."""
    digest = SOURCE_DIGEST

    def pick_all(logits, bias, ids, mix, scratch, n_tokens, n_experts, n_used, gating, is_normalised, scale):
        _ = digest
        for t in range(n_tokens):
            row = logits + 4 * t * n_experts
            at = 4 * t * n_used
            worth = scratch + 4 * n_experts
            _score(row, scratch, n_experts, gating)
            for e in range(n_experts):
                store_f32(worth, e, load_f32(row, e) if bias == 0 else load_f32(scratch, e) + load_f32(bias, e))
            _take_best(scratch, worth, ids + at, mix + at, n_experts, n_used)
            if gating == _SOFTMAX_OF_CHOSEN:
                _softmax(mix + at, mix + at, n_used)
            _scale(mix + at, n_used, is_normalised, scale)

    return direct_address(pick_all, 10, 1)


@inner_sums
def _score(logits, scores, n, gating):
    if gating == _SOFTMAX:
        _softmax(logits, scores, n)
        return
    for e in range(n):
        x = load_f32(logits, e)
        if gating == _SIGMOID:
            x = ONE / (ONE + np.exp(-x))
        elif gating == _SQRT_SOFTPLUS:
            x = np.sqrt(max(x, ZERO) + np.log1p(np.exp(-abs(x))))
        store_f32(scores, e, x)


@inner_sums
def _softmax(x, out, n):
    top = load_f32(x, 0)
    for i in range(1, n):
        top = max(top, load_f32(x, i))
    total = ZERO
    for i in range(n):
        value = np.exp(load_f32(x, i) - top)
        store_f32(out, i, value)
        total += value
    for i in range(n):
        store_f32(out, i, load_f32(out, i) / total)


@inner_sums
def _take_best(scores, worth, ids, mix, n_experts, n_used):
    """By insertion, the first of equals first; ids exist and differ, even where numbers are none."""
    n = 0
    for e in range(n_experts):
        value = load_f32(worth, e)
        if n == n_used and not value > load_f32(mix, n - 1):
            continue
        n = min(n + 1, n_used)
        place = n - 1
        while place > 0 and value > load_f32(mix, place - 1):
            store_f32(mix, place, load_f32(mix, place - 1))
            store_i32(ids, place, np.int32(load_i32(ids, place - 1)))
            place -= 1
        store_f32(mix, place, value)
        store_i32(ids, place, np.int32(e))
    for i in range(n_used):
        store_f32(mix, i, load_f32(scores, load_i32(ids, i)))


@inner_sums
def _scale(mix, n, is_normalised, scale):
    total = ZERO
    for i in range(n):
        total += load_f32(mix, i)
    factor = scale / max(total, _SMALLEST_SUM) if is_normalised else scale
    for i in range(n):
        store_f32(mix, i, load_f32(mix, i) * factor)
