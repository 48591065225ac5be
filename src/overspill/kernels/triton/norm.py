"""RMS norm and the gated activations: one read, one write, float32 in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two
from overspill.quant.experts import NO_LIMIT, Activation

_TILE = 2048


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm(x, weight, out, n_rows, eps, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    is_there = (rows < n_rows)[:, None] & (cols < D)[None, :]
    at = rows.to(tl.int64)[:, None] * D + cols[None, :]
    values = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1) / D + eps)
    gain = tl.load(weight + cols, mask=cols < D, other=0.0)
    tl.store(out + at, (values * scale[:, None] * gain[None, :]).to(out.dtype.element_ty), mask=is_there)


_rms_norm_kernel = Kernel(_rms_norm)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: `[..., D]` of any float; returns `dtype`."""
    x = x.contiguous()
    D = x.shape[-1]
    n_rows = x.numel() // D
    block = power_of_two(D)
    rows = max(1, _TILE // block)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    tuning = Tuning(n_warps=min(16, max(4, block // 1024)))
    _rms_norm_kernel((cdiv(n_rows, rows),), (x, weight, out, n_rows, eps), (D, block, rows), tuning)
    return out


@triton.jit
def gated_silu(gate, up, LIMIT: tl.constexpr):
    """silu(g) * u with g = min(gate, LIMIT) and u = up clamped to LIMIT either way, float32."""
    g = tl.minimum(gate, LIMIT)
    return g / (1.0 + tl.exp(-g)) * tl.minimum(tl.maximum(up, -LIMIT), LIMIT)


@triton.jit
def gated_oai(gate, up, LIMIT: tl.constexpr):
    """g sigmoid(1.702 g) (u + 1) with g = min(gate, 7) and u = up clamped to 7 either way (gpt-oss), float32."""
    g = tl.minimum(gate, 7.0)
    u = tl.minimum(tl.maximum(up, -7.0), 7.0)
    return g / (1.0 + tl.exp(-1.702 * g)) * (u + 1.0)


class Gated(NamedTuple):
    """A function (gate, up, limit), and the limit that it gets."""

    function: Callable[..., Any]
    limit: float


_ACTIVATIONS = {Activation.SILU: gated_silu, Activation.SWIGLU_OAI: gated_oai}


def gated(activation: Activation, limit: float) -> Gated:
    """The activation of experts; limit: see `ExpertVectors`."""
    return Gated(_ACTIVATIONS[activation], limit)


@triton.jit(do_not_specialize=["n_rows"])
def _gate(gate, up, out, n_rows, WIDTH: tl.constexpr, ACTIVATE: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < n_rows.to(tl.int64) * WIDTH
    g = tl.load(gate + at, mask=is_there, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, ACTIVATE(g, u, LIMIT).to(out.dtype.element_ty), mask=is_there)


_gate_kernel = Kernel(_gate)


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """silu(gate) * up, elementwise; computed in float32, returned as `dtype`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=dtype, device=gate.device)
    width = gate.shape[-1]
    args = (gate, up, out, gate.numel() // width)
    _gate_kernel((cdiv(gate.numel(), _TILE),), args, (width, gated_silu, NO_LIMIT, _TILE))
    return out
