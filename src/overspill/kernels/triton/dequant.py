"""Weights from stored blocks to plain values, at the speed of the memory.

One kernel serves all types that `decode` knows; the others go through the reference on the device, with one warning
per type. Floor of a call: (bytes read + bytes written) / memory bandwidth.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl

from overspill.gguf.types import TensorType
from overspill.kernels.triton.decode import DECODERS, GROUP, table_of
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor

_log = logging.getLogger(__name__)

_GROUPS_A_PROGRAM = 256
_TUNING = Tuning(n_warps=4)
PLAIN = {torch.float32: TensorType.F32, torch.bfloat16: TensorType.BF16, torch.float16: TensorType.F16}


@triton.jit(do_not_specialize=["n_groups", "first"])
def _dequantize(
    src,
    dst,
    table,
    offsets,
    n_groups,
    first,
    DECODE: tl.constexpr,
    N_PARTS: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    SRC_STRIDE: tl.constexpr,
    DST_STRIDE: tl.constexpr,
    R: tl.constexpr,
):
    """Program (i, e): groups i R ... of matrix e. offsets: where the matrices' rows of work begin, None: do all."""
    e = tl.program_id(1)
    if offsets is not None:  # noqa: SIM102  (Triton compiles both sides of an `and`)
        if tl.load(offsets + e) == tl.load(offsets + e + 1):
            return
    i = tl.program_id(0).to(tl.int64)
    src += (first + e).to(tl.int64) * SRC_STRIDE + i * (R // N_PARTS * BLOCK_BYTES)
    dst += e.to(tl.int64) * DST_STRIDE + i * (R * 16)
    row = tl.arange(0, R)
    n_left = n_groups - i * R
    j = tl.arange(0, 16)
    there = tl.minimum(row, (n_left - 1).to(tl.int32))
    values = DECODE(src, table, there // N_PARTS, there % N_PARTS, j)
    at = row[:, None] * 16 + j[None, :]
    tl.store(dst + at, values.to(dst.dtype.element_ty), mask=(row < n_left)[:, None])


_kernel = Kernel(_dequantize, is_exact=True)


def dequantize_into(
    q: QTensor,
    out: torch.Tensor,
    *,
    first: int = 0,
    offsets: torch.Tensor | None = None,
) -> None:
    """Write the values of `q` (from matrix `first` on, as many as `out` holds) into `out`.

    q: `[N, K]` or a stack `[E, N, K]`. out: `[N, K]` or `[n, N, K]`, float32, bfloat16 or float16; each matrix
    contiguous, the stack's first dimension may have any stride. offsets: int32 `[n + 1]`; matrix e is skipped where
    offsets[e] == offsets[e + 1] (an expert that has no tokens).
    """
    source, target = (q, out) if q.data.dim() == 3 else (_stack_of_one(q), out[None])
    n, rows, cols = target.shape
    if q.type not in DECODERS or rows * cols % GROUP:
        _reference(source.rows(first, first + n), target)
        return
    decoder = DECODERS[q.type]
    n_groups = rows * cols // GROUP
    constants = (decoder.decode, decoder.n_parts, decoder.block_bytes, rows * source.type.row_bytes(cols))
    _kernel(
        (cdiv(n_groups, _GROUPS_A_PROGRAM), n),
        (source.data, target, table_of(decoder, out.device), offsets, n_groups, first),
        (*constants, target.stride(0), _GROUPS_A_PROGRAM),
        _TUNING,
    )


def dequantize_bf16(q: QTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of `q` rounded to bfloat16 (or to the dtype of `out`), `q.shape`, on its device."""
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.data.device)
    dequantize_into(q, out)
    return out


def dequantize_f32(q: QTensor) -> torch.Tensor:
    """The values of `q` as float32, bit-equal to `quant.dequant.dequantize`."""
    return dequantize_bf16(q, torch.empty(q.shape, dtype=torch.float32, device=q.data.device))


def plain_view(q: QTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The values of `q` in place, where it is stored as `dtype`; None where it has to be dequantised."""
    return q.plain if q.type is PLAIN.get(dtype) else None


def _stack_of_one(q: QTensor) -> QTensor:
    return QTensor(q.data[None], q.type, (1, *q.shape))


@cache
def _warn(type: TensorType) -> None:
    _log.warning("no GPU kernel for %s weights: the reference is used, which is slow", type.name)


def _reference(q: QTensor, out: torch.Tensor) -> None:
    _warn(q.type)
    for i in range(len(out)):
        out[i].copy_(dequantize(q[i]))
