"""The specification of every op, in plain torch and float32. Slow and readable; the other tables agree with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from overspill.kernels import Ops
from overspill.quant.dequant import dequantize
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.qtensor import QTensor


def embed(weight: QTensor, ids: torch.Tensor) -> torch.Tensor:
    """Dequantised rows of `weight [V, D]`."""
    rows = weight.data[ids.long()]
    return dequantize(QTensor(rows, weight.type, (len(ids), weight.shape[1])))


def linear(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """x W^T."""
    return x @ dequantize(weight).T


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


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """softmax(scale q k^T + causal mask) v, see `kernels.Attention`."""
    T, H, A = q.shape
    G, C, _ = k.shape
    visible = torch.ones(T, C, dtype=torch.bool, device=q.device).tril(C - T)
    scores = torch.einsum("tgra,gca->grtc", q.view(T, G, H // G, A), k) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("grtc,gca->tgra", weights, v).reshape(T, H * v.shape[-1])


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


ACTIVATIONS = {Activation.SILU: swiglu}


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    mix: torch.Tensor,
    weights: ExpertWeights,
    activation: Activation,
    out: torch.Tensor,
) -> None:
    """One expert after the other, see `kernels.Experts`."""
    for i_expert in ids.unique().tolist():
        slot = i_expert if weights.slot_of is None else int(weights.slot_of[i_expert])
        if slot < 0:
            continue
        rows, ranks = (ids == i_expert).nonzero(as_tuple=True)
        n = x[rows]
        hidden = ACTIVATIONS[activation](linear(n, weights.gate[slot]), linear(n, weights.up[slot]))
        out.index_add_(0, rows, linear(hidden, weights.down[slot]) * mix[rows, ranks, None])


OPS = Ops(
    embed=embed,
    linear=linear,
    rms_norm=rms_norm,
    rope_halves=rope_halves,
    rope_pairs=rope_pairs,
    attention=attention,
    swiglu=swiglu,
    experts=experts,
)
