"""Reference dequantisation: what every stored block means, in plain torch, on any device.

This is the specification that the fast kernels are tested against, and the fallback for types they do not know.
It is written to be read, not to be fast. Values are bit-equal to those of other readers of the format.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from overspill.errors import UserError
from overspill.gguf.types import TensorType
from overspill.quant import codebooks, kquants, linear
from overspill.quant.qtensor import QTensor

# Intermediates take several times the room of the result: work through big tensors in parts.
_MAX_PART_ELEMENTS = 1 << 22


def dequantize(q: QTensor) -> Tensor:
    """The values of a weight: float32 of `q.shape`, on the device of `q.data`.

    Raises UserError for integer tensors and for the block types that only exist in memory (Q8_1, Q8_K).
    """
    decode = _DECODERS.get(q.type)
    if decode is None:
        raise UserError(f"tensor type {q.type.name} holds no float weights: it cannot be dequantised; check the file")
    block = q.type.block
    blocks = q.in_rows().data.reshape(-1, block.n_bytes)
    part = max(_MAX_PART_ELEMENTS // block.n_elements, 1)
    if len(blocks) <= part:
        return decode(blocks).float().reshape(q.shape)
    out = torch.empty(len(blocks), block.n_elements, dtype=torch.float32, device=blocks.device)
    for raw, values in zip(blocks.split(part), out.split(part), strict=True):
        values.copy_(decode(raw))
    return out.view(q.shape)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.float32)


def _f64(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.float64)


def _f16(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.float16)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.clone().view(torch.bfloat16)


_T = TensorType
_DECODERS: dict[TensorType, Callable[[Tensor], Tensor]] = {
    _T.F32: _f32,
    _T.F64: _f64,
    _T.F16: _f16,
    _T.BF16: _bf16,
    _T.Q4_0: linear.q4_0,
    _T.Q4_1: linear.q4_1,
    _T.Q5_0: linear.q5_0,
    _T.Q5_1: linear.q5_1,
    _T.Q8_0: linear.q8_0,
    _T.Q1_0: linear.q1_0,
    _T.Q2_0: linear.q2_0,
    _T.TQ1_0: linear.tq1_0,
    _T.TQ2_0: linear.tq2_0,
    _T.Q2_K: kquants.q2_k,
    _T.Q3_K: kquants.q3_k,
    _T.Q4_K: kquants.q4_k,
    _T.Q5_K: kquants.q5_k,
    _T.Q6_K: kquants.q6_k,
    _T.IQ4_NL: codebooks.iq4_nl,
    _T.IQ4_XS: codebooks.iq4_xs,
    _T.MXFP4: codebooks.mxfp4,
    _T.NVFP4: codebooks.nvfp4,
    _T.IQ2_XXS: codebooks.iq2_xxs,
    _T.IQ2_XS: codebooks.iq2_xs,
    _T.IQ2_S: codebooks.iq2_s,
    _T.IQ3_XXS: codebooks.iq3_xxs,
    _T.IQ3_S: codebooks.iq3_s,
    _T.IQ1_S: codebooks.iq1_s,
    _T.IQ1_M: codebooks.iq1_m,
}
