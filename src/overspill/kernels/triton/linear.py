"""Dense products: weights as they are stored, results in float32.

What a file stores in float32 (routers, as a rule) is multiplied in float32. For a few tokens, other weights are read
in place and decoded inside the product. For more, they are rounded to bfloat16 and multiplied on the tensor cores with
float32 sums: in place if they are bfloat16 already, and otherwise dequantised into scratch memory, in parts where that
is small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.gguf.types import TensorType
from overspill.gpu_memory import DENSE_PART_BYTES
from overspill.kernels.triton import skinny
from overspill.kernels.triton.dequant import dequantize_f32, dequantize_into, plain_view
from overspill.kernels.triton.norm import rms_norm
from overspill.kernels.triton.tuning import MAX_TOKENS
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.qtensor import QTensor


class LinearOp:
    """`Ops.linear` and `Ops.linear_heads` on one device; dtype: what weights are rounded to."""

    def __init__(self, workspace: Workspace, dtype: torch.dtype) -> None:
        self._workspace = workspace
        self._dtype = dtype

    def linear(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """x W^T, float32 `[T, N]`."""
        if self._is_few(x, [weight]):
            return skinny.multiply(x, [weight], dtype=self._rounding(weight))
        return self._of_many(x, weight)

    def _of_many(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        if weight.type is TensorType.F32:
            return x.float() @ weight.data.view(torch.float32).T
        x = x.to(self._dtype).contiguous()
        plain = plain_view(weight, self._dtype)
        return self._dequantized(x, weight) if plain is None else _product(x, plain)

    def linears(self, x: torch.Tensor, weights: Sequence[QTensor]) -> list[torch.Tensor]:
        """`linear` with each of the weights; rows of the results need not be contiguous with each other."""
        if not self._is_few(x, weights):
            multiply = self._of_many if x.shape[0] > MAX_TOKENS else self.linear
            return [multiply(x, weight) for weight in weights]
        return _cut(skinny.multiply(x, weights, dtype=self._rounding(weights[0])), weights)

    def norm_linears(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        weights: Sequence[QTensor],
        biases: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """`linears` of the RMS norm of x, plus a bias each or none at all."""
        if not self._is_few(x, weights):
            products = self.linears(rms_norm(x, gain, eps, dtype=self._dtype), weights)
            return [y + bias for y, bias in zip(products, biases, strict=True)] if biases else products
        norm = skinny.Norm(gain, eps) if len(x) == 1 else None
        x = x if norm else rms_norm(x, gain, eps, dtype=self._dtype)
        merged = skinny.multiply(x, weights, dtype=self._rounding(weights[0]), norm=norm, biases=biases)
        return _cut(merged, weights)

    def add_linear(self, y: torch.Tensor, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """y + x W^T, float32 `[T, N]`."""
        if self._is_few(x, [weight]):
            return skinny.multiply(x, [weight], dtype=self._rounding(weight), y=y)
        plain = plain_view(weight, self._dtype)
        if plain is None or self._dtype == torch.float32:
            return y + self.linear(x, weight)
        return torch.addmm(y, x.to(self._dtype), plain.T, out_dtype=torch.float32)

    def _is_few(self, x: torch.Tensor, weights: Sequence[QTensor]) -> bool:
        is_f32 = weights[0].type is TensorType.F32
        return skinny.can_multiply(x, weights) and (x.shape[0] == 1 or not is_f32)

    def _rounding(self, weight: QTensor) -> torch.dtype:
        return torch.float32 if weight.type is TensorType.F32 else self._dtype

    def linear_heads(self, x_THK: torch.Tensor, weight: QTensor) -> torch.Tensor:
        """x W^T with a matrix for each head, float32 `[T, H, N]`."""
        plain = plain_view(weight, self._dtype)
        if plain is None:
            plain = self._workspace.take("weights", weight.shape, self._dtype)
            dequantize_into(weight, plain)
        return _batched(x_THK.to(self._dtype).transpose(0, 1), plain.transpose(1, 2)).transpose(0, 1)

    def _dequantized(self, x: torch.Tensor, weight: QTensor) -> torch.Tensor:
        N, K = weight.shape
        n_rows = max(1, min(self._workspace.weight_bytes, DENSE_PART_BYTES) // (K * self._dtype.itemsize))
        pieces = []
        for first in range(0, N, n_rows):
            rows = weight.rows(first, min(N, first + n_rows))
            plain = self._workspace.take("weights", rows.shape, self._dtype)
            dequantize_into(rows, plain)
            pieces.append(_product(x, plain))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _cut(merged: torch.Tensor, weights: Sequence[QTensor]) -> list[torch.Tensor]:
    return list(merged.split([weight.shape[0] for weight in weights], 1))


def embed(weight: QTensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows of `weight [V, D]`, float32."""
    rows = weight.data[ids.long()]
    return dequantize_f32(QTensor(rows, weight.type, (len(ids), weight.shape[1])))


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with float32 sums and a float32 result."""
    if x.dtype == torch.float32:
        return x @ weight.T
    return torch.mm(x, weight.T, out_dtype=torch.float32)


def _batched(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return torch.bmm(x, weight)
    return torch.bmm(x, weight, out_dtype=torch.float32)
