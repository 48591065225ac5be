"""The specification of every op, in plain torch and float32. Slow and readable; the other tables agree with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from overspill.kernels import Ops
from overspill.kernels.expert_cache import fill, look_up, place
from overspill.kernels.spread import divide, fetch
from overspill.quant.dequant import dequantize
from overspill.quant.experts import DOWN, GATE, UP, Activation, ExpertWeights, sliced
from overspill.quant.q8_rows import TORCH_ROWS
from overspill.quant.qtensor import QTensor


def embed(weight: QTensor, ids: torch.Tensor) -> torch.Tensor:
    """Dequantised rows of `weight [V, D]`."""
    rows = weight.in_rows().data[ids.long()]
    return dequantize(QTensor(rows, weight.type, (len(ids), weight.shape[1])))


def linear(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T."""
    return x @ dequantize(weight).T


def linear_heads(x_THK: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T with a matrix for each head."""
    return torch.einsum("thk,hnk->thn", x_THK, dequantize(weight))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_halves(x_THA: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel i with channel i + n_rot / 2 (NEOX); channels from n_rot on pass through."""
    half = cos.shape[-1]
    a, b, rest = x_THA.split([half, half, x_THA.shape[-1] - 2 * half], -1)
    c, s = cos[:, None], sin[:, None]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)


def rope_pairs(x_THA: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel 2i with channel 2i + 1 (interleaved); channels from n_rot on pass through."""
    n_rot = 2 * cos.shape[-1]
    a, b = x_THA[..., 0:n_rot:2], x_THA[..., 1:n_rot:2]
    c, s = cos[:, None], sin[:, None]
    turned = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
    return torch.cat([turned, x_THA[..., n_rot:]], -1)


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
    """Norm, rotation, and the cache's new cells, see `kernels.PrepareHeads`."""
    rope = rope_pairs if is_interleaved else rope_halves
    n_kv = len(cells[0])
    heads = [x.reshape(len(x), -1, k.shape[1] // n_kv) for x in (q, k)]
    normed = [x if gain is None else rms_norm(x, gain, eps) for x, gain in zip(heads, gains, strict=True)]
    queries, keys = (rope(x, *angles) for x in normed)
    for x, stored in zip((keys, v.reshape(len(v), n_kv, -1)), cells, strict=True):
        if stored.dtype == torch.uint8:
            TORCH_ROWS.put(x, stored)
        else:
            stored.copy_(x.transpose(0, 1))
    return queries


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T + mask) v, see `kernels.Attention`."""
    T, H, A = q.shape
    G, C, _ = k.shape
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = torch.einsum("tgra,gca->grtc", q.reshape(T, G, H // G, A), k) * scale
    scores = scores.masked_fill(~visible(T, C, window, q.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(G, H // G, 1, 1).expand(-1, -1, T, 1)], -1)
    weights = scores.softmax(-1)[..., :C]
    return torch.einsum("grtc,gca->tgra", weights, v).reshape(T, H * v.shape[-1])


def visible(n_queries: int, n_cells: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Which cells each of the last `n_queries` positions attends to, bool `[T, C]`."""
    ones = torch.ones(n_queries, n_cells, dtype=torch.bool, device=device)
    causal = ones.tril(n_cells - n_queries)
    return causal if window is None else causal.triu(n_cells - n_queries - window + 1)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = up clamped to 7 either way (gpt-oss)."""
    g, u = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return g * torch.sigmoid(1.702 * g) * (u + 1.0)


def _activated(gate: torch.Tensor, up: torch.Tensor, activation: Activation, limit: float) -> torch.Tensor:
    if activation is Activation.SWIGLU_OAI:
        return swiglu_oai(gate, up)
    return swiglu(gate.clamp(max=limit), up.clamp(-limit, limit))


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """One expert after the other, see `kernels.Experts`."""
    ids, mix = sliced(ids, mix, weights.n_slices)
    for i_expert in ids.unique().tolist():
        slot = i_expert if weights.slot_of is None else int(weights.slot_of[i_expert])
        if slot < 0:
            continue
        rows, ranks = (ids == i_expert).nonzero(as_tuple=True)
        gate, up = (_product(x[rows], weights, part, i_expert, slot) for part in (GATE, UP))
        y = _product(_activated(gate, up, activation, weights.vectors.limit), weights, DOWN, i_expert, slot)
        out.index_add_(0, rows, y * mix[rows, ranks, None])


def widen(source: ExpertWeights, target: ExpertWeights) -> None:
    """Dequantise every part into bfloat16 stacks of the same shapes."""
    for blocks, wide in zip(source.parts, target.parts, strict=True):
        wide.data.view(torch.bfloat16).copy_(dequantize(blocks))


def _product(x: torch.Tensor, weights: ExpertWeights, i_part: int, i_expert: int, slot: int) -> torch.Tensor:
    """x W^T of one expert's gate, up or down, times its scale, plus its bias."""
    y = linear(x, weights.parts[i_part][slot])
    scales, biases = weights.vectors.scales[i_part], weights.vectors.biases[i_part]
    y = y if scales is None else y * scales[i_expert]
    return y if biases is None else y + biases[i_expert]


OPS = Ops(
    embed=embed,
    linear=linear,
    linear_heads=linear_heads,
    rms_norm=rms_norm,
    rope_halves=rope_halves,
    rope_pairs=rope_pairs,
    attention=attention,
    swiglu=swiglu,
    divide=divide,
    fetch=fetch,
    look_up=look_up,
    fill=fill,
    place=place,
    experts=experts,
)
