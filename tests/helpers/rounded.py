"""The reference with everything rounded to bfloat16 that GPUs keep in it: what that costs a model, error or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from overspill.kernels import Ops, ref
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor

_N_ROUTER_ROWS = 16
_attention, _linear = ref.attention, ref.linear


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _product(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    return _bf16(x) @ _bf16(dequantize(weight)).T


def _dense(x: torch.Tensor, weight: QTensor) -> torch.Tensor:
    """Routers are multiplied in float32; in the fixtures no other matrix of their height matters."""
    return _linear(x, weight) if weight.shape[0] <= _N_ROUTER_ROWS else _product(x, weight)


def _heads(x_THK: torch.Tensor, weight: QTensor) -> torch.Tensor:
    return torch.einsum("thk,hnk->thn", _bf16(x_THK), _bf16(dequantize(weight)))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    return _bf16(_attention(_bf16(q), _bf16(k), _bf16(v), scale=scale, window=window, sinks=sinks))


BF16_OPS: Ops = replace(
    ref.OPS,
    linear=_dense,
    linear_heads=_heads,
    attention=_attend,
    rms_norm=lambda x, gain, eps: _bf16(ref.rms_norm(x, gain, eps)),
    swiglu=lambda gate, up: _bf16(ref.swiglu(gate, up)),
)


@contextmanager
def rounded_experts() -> Iterator[None]:
    """While it lasts, experts of the reference are rounded too."""
    with patch.object(ref, "linear", _product):
        yield
