"""The op table of the CPU: Numba kernels on quantised blocks, torch for the rest.

A type without a kernel goes through the reference, with one warning per type, never silently.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import torch.nn.functional as F

from overspill.gguf.types import TensorType
from overspill.kernels import Ops, ref
from overspill.kernels import numba as fast
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.qtensor import QTensor

_log = logging.getLogger(__name__)

_SCORE_BYTES = 64 << 20


def use_threads(n_threads: int) -> None:
    """CPU threads that ops called from this thread may use."""
    torch.set_num_threads(n_threads)
    fast.use_threads(n_threads)


@cache
def _has_kernel(type: TensorType) -> bool:
    found = fast.has_kernel(type)
    if not found:
        _log.warning("no fast CPU kernel for %s: the reference is used, which is slow", type.name)
    return found


@cache
def _is_known(activation: Activation, has_no_vectors: bool) -> bool:
    known = activation is Activation.SILU and has_no_vectors
    if not known:
        _log.warning("no fast CPU kernel for experts with biases, scales or %s: the reference is used", activation)
    return known


def linear(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T."""
    return fast.matmul(x, weight) if _has_kernel(weight.type) else ref.linear(x, weight)


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


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """`kernels.Experts`."""
    x = x.float()
    if _is_known(activation, weights.vectors.is_empty) and all(_has_kernel(part.type) for part in weights.parts):
        fast.experts(x, weights.gate, weights.up, weights.down, ids, mix, weights.slot_of, out, activation)
    else:
        ref.experts(x, ids, mix, weights, activation, out)


OPS = Ops(
    embed=ref.embed,
    linear=linear,
    linear_heads=ref.linear_heads,
    rms_norm=ref.rms_norm,
    rope_halves=ref.rope_halves,
    rope_pairs=ref.rope_pairs,
    attention=attention,
    swiglu=ref.swiglu,
    experts=experts,
)
