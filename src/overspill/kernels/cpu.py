"""The op table of the CPU: Numba kernels on quantised blocks, torch for the rest.

A type without a kernel goes through the reference, with one warning per type, never silently.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from overspill.gguf.types import TensorType
from overspill.kernels import Ops, RouterWeights, TokenEnds, TokenExperts, TokenLayer, TokenLayers, TokenRouter, ref
from overspill.kernels import numba as fast
from overspill.kernels.expert_cache import fill, look_up, place
from overspill.kernels.spread import divide, fetch
from overspill.quant.experts import Activation, ExpertWeights, sliced
from overspill.quant.qtensor import QTensor

_log = logging.getLogger(__name__)

_SCORE_BYTES = 64 << 20
# Up to so many numbers, and products of queries and keys, torch's way of finding its kernels costs more than a thread.
_FEW_NUMBERS = 1 << 15
_FEW_PRODUCTS = 1 << 20


def use_threads(n_threads: int) -> None:
    """CPU threads that ops called from this thread may use."""
    torch.set_num_threads(n_threads)
    fast.use_threads(n_threads)


def use_threads_by_default(n_threads: int) -> None:
    """CPU threads that ops called from threads without a number of their own may use."""
    torch.set_num_threads(n_threads)
    fast.use_threads_by_default(n_threads)


@cache
def _has_kernel(type: TensorType) -> bool:
    found = fast.has_kernel(type)
    if not found:
        _log.warning("no fast CPU kernel for %s: the reference is used, which is slow", type.name)
    return found


def embed(weight: QTensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of a weight."""
    return fast.rows_of(weight.in_rows(), ids) if _has_kernel(weight.type) else ref.embed(weight, ids)


def linear(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T."""
    return fast.matmul(x, weight) if _has_kernel(weight.type) else ref.linear(x, weight)


def linears(x: torch.Tensor, weights: Sequence[QTensor]) -> list[torch.Tensor]:
    """x W^T with each weight."""
    if all(_has_kernel(weight.type) for weight in weights):
        return fast.matmuls(x, weights)
    return [linear(x, weight) for weight in weights]


def add_linear(y: torch.Tensor, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """y + x W^T."""
    if not _has_kernel(weight.type):
        return y + ref.linear(x, weight)
    out = y.clone()
    fast.add_matmul(out, x, weight)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return fast.norm_rows(x, weight, eps) if x.numel() <= _FEW_NUMBERS else ref.rms_norm(x, weight, eps)


def prepare_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cells: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    gains: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    eps: float,
    is_interleaved: bool,
) -> torch.Tensor:
    """`kernels.PrepareHeads`."""
    is_few = q.numel() <= _FEW_NUMBERS and cells[0].dtype == torch.float32
    prepare = fast.prepare_heads if is_few else ref.prepare_heads
    return prepare(q, k, v, cells, angles, gains, eps=eps, is_interleaved=is_interleaved)


def route(
    x: torch.Tensor,
    gain: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    logit_bias: torch.Tensor | None,
    *,
    eps: float,
    n_used: int,
    gating: int,
    is_normalised: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kernels.Route`."""
    normed = rms_norm(x, gain, eps)
    logits = fast.matmul(normed, QTensor(router.view(torch.uint8), TensorType.F32, tuple(router.shape)))
    logits = logits if logit_bias is None else logits + logit_bias
    picked = fast.pick_experts(logits, bias, n_used=n_used, gating=gating, is_normalised=is_normalised, scale=scale)
    return normed, *picked


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`kernels.Attention` on torch's fused CPU kernel; what that does not know goes through the reference."""
    n_queries, n_cells = len(q), k.shape[1]
    if q.numel() * n_cells <= _FEW_PRODUCTS and q.dtype == k.dtype == torch.float32:
        return fast.attend_few(q, k, v, scale=scale, window=window, sinks=sinks)
    k, v = k.to(q.dtype), v.to(q.dtype)
    if sinks is not None or q.shape[-1] != v.shape[-1]:
        return _attention_in_rows(q, k, v, scale, window, sinks)
    mask = None if n_queries == 1 and window is None else _mask(n_queries, n_cells, window)
    heads = q.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(heads, k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def _attention_in_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The reference, so many queries at a time that their scores take `_SCORE_BYTES`."""
    n_unasked = k.shape[1] - len(q)
    n_rows = max(1, _SCORE_BYTES // (4 * q.shape[1] * k.shape[1]))
    outputs = []
    for first in range(0, len(q), n_rows):
        rows = q[first : first + n_rows]
        cells = slice(0, n_unasked + first + len(rows))
        outputs.append(ref.attention(rows, k[:, cells], v[:, cells], scale=scale, window=window, sinks=sinks))
    return torch.cat(outputs)


def _mask(n_queries: int, n_cells: int, window: int | None) -> torch.Tensor:
    """0 where a key is visible, -inf elsewhere."""
    hidden = ~ref.visible(n_queries, n_cells, window, torch.device("cpu"))
    return torch.zeros(n_queries, n_cells).masked_fill_(hidden, float("-inf"))


def token_layers(layers: Sequence[TokenLayer], ends: TokenEnds | None) -> TokenLayers | None:
    """`kernels.TokenLayers`."""
    is_served = ends is None or (_has_kernel(ends.embedding.type) and _has_kernel(ends.output.type))
    return fast.TokenLayers(layers, ends) if is_served and all(map(_has_kernels, layers)) else None


def _has_kernels(layer: TokenLayer) -> bool:
    w = layer.attention
    is_whole = w.gain.numel() % fast.UNIT_ELEMENTS == 0
    if not is_whole or not all(_has_kernel(matrix.type) for matrix in (w.q, w.k, w.v, w.output)):
        return False
    return layer.experts is None or _is_for_token(layer.experts.weights)


def _is_for_token(weights: ExpertWeights) -> bool:
    is_whole = weights.gate.shape[2] % fast.UNIT_ELEMENTS == 0
    return is_whole and weights.n_slices == 1 and all(_has_kernel(part.type) for part in weights.parts)


def token_router(weights: RouterWeights) -> TokenRouter | None:
    """`kernels.TokenRouter`."""
    return None if weights.gain.numel() % fast.UNIT_ELEMENTS else fast.TokenRouter(weights)


def token_experts(weights: ExpertWeights, activation: Activation) -> TokenExperts | None:
    """`kernels.TokenExperts`."""
    return fast.TokenExperts(weights, activation) if _is_for_token(weights) else None


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """`kernels.Experts`."""
    if all(_has_kernel(part.type) for part in weights.parts):
        stacks = weights.gate, weights.up, weights.down
        assert not isinstance(weights.slot_of, torch.Tensor)
        ids, mix = sliced(ids, mix, weights.n_slices)
        fast.experts(x.float(), *stacks, ids, mix, weights.slot_of, out, activation, vectors=weights.vectors)
    else:
        ref.experts(x.float(), ids, mix, weights, activation, out)


def prepare_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> fast.PreparedExperts | None:
    """`Ops.experts` to be run again and again on the same memory; None for types or widths that need more than that."""
    if not all(_has_kernel(part.type) for part in weights.parts) or x.shape[1] % fast.UNIT_ELEMENTS:
        return None
    assert isinstance(weights.slot_of, np.ndarray)
    return fast.PreparedExperts(x, ids, mix, weights, weights.slot_of, out, activation, fast.Pieces())


OPS = Ops(
    embed=embed,
    linear=linear,
    linear_heads=ref.linear_heads,
    rms_norm=rms_norm,
    rope_halves=ref.rope_halves,
    rope_pairs=ref.rope_pairs,
    attention=attention,
    swiglu=ref.swiglu,
    divide=divide,
    fetch=fetch,
    look_up=look_up,
    fill=fill,
    place=place,
    experts=experts,
    interleave=fast.interleave,
    panel_types=frozenset(t for t in TensorType if fast.takes_digits(t)),
    prepare_heads=prepare_heads,
    route=route,
    add_linear=add_linear,
    linears=linears,
    token_layers=token_layers,
    token_router=token_router,
    token_experts=token_experts,
)
