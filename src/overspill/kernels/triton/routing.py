"""Routing: from hidden states to expert ids and mixing weights.

`route` is one launch for norm, router and choice; for few tokens two, a wide one for norm and router and a small one
for the choice. It multiplies the float32 hidden states with the float32 router: what decides between experts is never
rounded to bfloat16. `pick_experts` is the choice alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, follow, power_of_two
from overspill.kernels.triton.rows import norm_factor, plain_rows
from overspill.kernels.triton.tuning import MAX_TOKENS, ROUTER, RowTile

_SMALLEST_SUM = tl.constexpr(6.103515625e-5)
_CHOICE_TILE = 2048
_BLOCK_D = 32
_ROUTE_TUNING = Tuning(n_warps=8)
_CHOICE_OF_FEW = Tuning(n_warps=1)


@triton.jit
def _scores(logits, experts, E: tl.constexpr, GATING: tl.constexpr):
    """What makes a weight of a logit, `[R, BLOCK_E]`; columns from E on are not experts."""
    if GATING == 1:
        shifted = tl.exp(tl.where(experts < E, logits, float("-inf")) - tl.max(logits, axis=1)[:, None])
        return shifted / tl.sum(shifted, axis=1)[:, None]
    if GATING == 2:
        small = tl.exp(-tl.abs(logits))
        return tl.where(logits >= 0.0, 1.0, small) / (1.0 + small)
    if GATING == 3:
        return logits
    return tl.sqrt(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))


@triton.jit
def _choose(
    logits, logit_bias, bias, ids, mix, rows, n_rows, scale,
    E: tl.constexpr, K: tl.constexpr, GATING: tl.constexpr, IS_NORMALISED: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The K best of logits `[R, BLOCK_E]`, best first, of equals the lower id first, and what they weigh.

    Whatever the logits are, ids are of K different experts: others would be read, and written, outside of memory.
    """
    experts = tl.arange(0, BLOCK_E)[None, :]
    if logit_bias is not None:
        logits += tl.load(logit_bias + experts, mask=experts < E, other=0.0)
    ranks = tl.arange(0, K_PAD)[None, :]
    logits = tl.where(experts < E, logits, -3.0e38)
    scores = _scores(logits, experts, E, GATING)
    key = logits
    if bias is not None:
        key = scores + tl.load(bias + experts, mask=experts < E, other=0.0)
    key = tl.where(key == key, key, float("-inf"))
    is_free = (experts < E) & (key == key)
    best = tl.zeros([logits.shape[0], K_PAD], tl.float32)
    chosen = tl.zeros([logits.shape[0], K_PAD], tl.int32)
    for k in tl.static_range(K):
        top = tl.max(tl.where(is_free, key, float("-inf")), axis=1)[:, None]
        expert = tl.min(tl.where(is_free & (key == top), experts, BLOCK_E), axis=1)[:, None]
        score = tl.sum(tl.where(experts == expert, scores, 0.0), axis=1)[:, None]
        best = tl.where(ranks == k, score, best)
        chosen = tl.where(ranks == k, expert, chosen)
        is_free &= experts != expert
    if GATING == 3:
        best = tl.exp(
            tl.where(ranks < K, best, float("-inf")) - tl.max(tl.where(ranks < K, best, -3.0e38), axis=1)[:, None]
        )
        best = best / tl.sum(best, axis=1)[:, None]
    if IS_NORMALISED:
        best = best / tl.maximum(tl.sum(best, axis=1), _SMALLEST_SUM)[:, None]
    at = rows.to(tl.int64)[:, None] * K + ranks
    mask = (rows < n_rows)[:, None] & (ranks < K)
    tl.store(ids + at, chosen, mask=mask)
    tl.store(mix + at, best * scale, mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def _pick(
    logits, logit_bias, bias, ids, mix, n_rows, scale,
    E: tl.constexpr, K: tl.constexpr, GATING: tl.constexpr, IS_NORMALISED: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_E: tl.constexpr, R: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    follow(IS_CHAINED)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.arange(0, BLOCK_E)
    mask = (rows < n_rows)[:, None] & (cols < E)[None, :]
    values = tl.load(logits + rows.to(tl.int64)[:, None] * E + cols[None, :], mask=mask, other=0.0)
    _choose(
        values.to(tl.float32),
        logit_bias,
        bias,
        ids,
        mix,
        rows,
        n_rows,
        scale,
        E,
        K,
        GATING,
        IS_NORMALISED,
        K_PAD,
        BLOCK_E,
    )


@triton.jit(do_not_specialize=["n_rows"])
def _route(
    x, gain, router, logit_bias, bias, normed, ids, mix, n_rows, scale, eps,
    E: tl.constexpr, K: tl.constexpr, GATING: tl.constexpr, IS_NORMALISED: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK_E: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The norm's factor is one number a row, so it is applied to the finished logits: one pass over x serves both."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    experts = tl.arange(0, BLOCK_E)
    cols = tl.arange(0, BLOCK_D)
    x += rows.to(tl.int64)[:, None] * D
    logits = tl.zeros([R, BLOCK_E], tl.float32)
    squares = tl.zeros([R], tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + cols
        mask = (rows < n_rows)[:, None] & (d < D)[None, :]
        values = tl.load(x + d[None, :], mask=mask, other=0.0)
        squares += tl.sum(values * values, axis=1)
        values *= tl.load(gain + d, mask=d < D, other=0.0)[None, :]
        weight_mask = (experts < E)[None, :] & (d < D)[:, None]
        weights = tl.load(router + experts[None, :] * D + d[:, None], mask=weight_mask, other=0.0)
        logits = tl.dot(values, weights, logits, input_precision="tf32x3")
    factor = (1.0 / tl.sqrt(squares / D + eps))[:, None]
    _choose(
        logits * factor, logit_bias, bias, ids, mix, rows, n_rows, scale, E, K, GATING, IS_NORMALISED, K_PAD, BLOCK_E
    )
    normed += rows.to(tl.int64)[:, None] * D
    for first in range(0, D, BLOCK_D):
        d = first + cols
        mask = (rows < n_rows)[:, None] & (d < D)[None, :]
        values = tl.load(x + d[None, :], mask=mask, other=0.0)
        values *= factor * tl.load(gain + d, mask=d < D, other=0.0)[None, :]
        tl.store(normed + d[None, :], values.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def _logits(
    x, gain, router, normed, logits, eps,
    E: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, t): logits of experts i ROWS ... for token t; the first of a token writes its normed values too."""
    first = tl.program_id(0) * ROWS
    t = tl.program_id(1).to(tl.int64)
    x += t * D
    r = tl.arange(0, ROWS)
    zero = tl.zeros([1], tl.int32)
    experts = first + r
    there = tl.minimum(experts, E - 1)
    sums = plain_rows(x, zero, gain, eps, router, None, zero, there, D, 1, ROWS, WIDTH, tl.float32, tl.float32, 1, 64,
                      IS_CHAINED)  # fmt: skip
    tl.store(logits + t * E + experts, tl.reshape(sums, [ROWS]), mask=experts < E)
    if first == 0:
        factor = norm_factor(x, eps, D, WIDTH)
        for start in range(0, D, WIDTH):
            d = start + tl.arange(0, WIDTH)
            values = tl.load(x + d, mask=d < D, other=0.0) * factor * tl.load(gain + d, mask=d < D, other=0.0)
            tl.store(normed + t * D + d, values.to(normed.dtype.element_ty), mask=d < D)


_logits_kernel = Kernel(_logits, may_chain=True)
_pick_kernel = Kernel(_pick, may_chain=True)
_route_kernel = Kernel(_route)


class Choice(NamedTuple):
    """How experts are chosen and weighed.

    n_used: experts of a token. gating: number of the rule as in GGUF's `expert_gating_func`: 1 softmax, 2 sigmoid,
    3 softmax of the chosen, 4 sqrt(softplus). is_normalised: weights are divided by their sum. scale: of the weights,
    last. bias: float32 `[E]`, added to the scores for the choice alone. logit_bias: the same, added to the logits.
    """

    n_used: int
    gating: int = 1
    is_normalised: bool = True
    scale: float = 1.0
    bias: torch.Tensor | None = None
    logit_bias: torch.Tensor | None = None


class Routed(NamedTuple):
    """normed: `[T, D]`; ids: int32 `[T, K]`; mix: float32 `[T, K]`, best first."""

    normed: torch.Tensor
    ids: torch.Tensor
    mix: torch.Tensor


def pick_experts(logits_TE: torch.Tensor, choice: Choice) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int32 `[T, K]` and weights float32 `[T, K]` of router logits."""
    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    ids, mix = _outputs(T, choice, logits_TE.device)
    rows, tuning = max(1, _CHOICE_TILE // power_of_two(E)), Tuning()
    if T <= MAX_TOKENS:
        rows, tuning = 1, _CHOICE_OF_FEW
    args = (logits_TE, choice.logit_bias, choice.bias, ids, mix, T, choice.scale)
    _pick_kernel((cdiv(T, rows),), args, (*_constants(E, choice), rows), tuning)
    return ids, mix


def route(
    x: torch.Tensor, gain: torch.Tensor, eps: float, router: torch.Tensor, choice: Choice, *, dtype: torch.dtype
) -> Routed:
    """RMS norm of x (float32 `[T, D]`), its product with the router (float32 `[E, D]`), and the choice.

    The normed hidden states are returned as `dtype`; logits are products of the float32 ones.
    """
    T, D = x.shape
    E = len(router)
    if T <= MAX_TOKENS:
        return _route_few(x, gain, eps, router, choice, dtype)
    ids, mix = _outputs(T, choice, x.device)
    normed = torch.empty((T, D), dtype=dtype, device=x.device)
    rows = 32 if T > 1024 and E <= 256 else 16
    args = (x, gain, router, choice.logit_bias, choice.bias, normed, ids, mix, T, choice.scale, eps)
    _route_kernel((cdiv(T, rows),), args, (*_constants(E, choice), rows, D, _BLOCK_D), _ROUTE_TUNING)
    return Routed(normed, ids, mix)


def _route_few(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    choice: Choice,
    dtype: torch.dtype,
    tile: RowTile | None = None,
) -> Routed:
    T, D = x.shape
    E = len(router)
    tile = tile or ROUTER
    normed = torch.empty((T, D), dtype=dtype, device=x.device)
    logits = torch.empty((T, E), dtype=torch.float32, device=x.device)
    args = (x.contiguous(), gain, router, normed, logits, eps)
    _logits_kernel((cdiv(E, tile.n_rows), T), args, (E, D, tile.n_rows, tile.width_for(D)), tile.tuning)
    return Routed(normed, *pick_experts(logits, choice))


def _outputs(n_tokens: int, choice: Choice, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.empty((n_tokens, choice.n_used), dtype=torch.int32, device=device)
    return ids, torch.empty((n_tokens, choice.n_used), dtype=torch.float32, device=device)


def _constants(n_experts: int, choice: Choice) -> tuple[int | bool, ...]:
    padded = max(16, power_of_two(n_experts))
    return n_experts, choice.n_used, choice.gating, choice.is_normalised, power_of_two(choice.n_used), padded
