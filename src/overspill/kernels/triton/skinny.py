"""Products of a few tokens with a quantised weight: blocks are read once and decoded on the way to the tensor cores.

The weight's bytes are nearly all the work, so a program takes few rows of it and there are many programs; the tokens
are padded to the 16 rows that the smallest matrix instruction has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.decode import DECODERS, GROUP, table_of
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv
from overspill.quant.qtensor import QTensor

MAX_TOKENS = 16
_ROWS = 16
_GROUPS = 16


@triton.jit(do_not_specialize=["n_tokens", "n_rows"])
def _skinny(
    x, src, out, table, n_tokens, n_rows,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Program i: rows i ROWS ... of the weight."""
    n_groups: tl.constexpr = K // 16
    blocks_a_row: tl.constexpr = n_groups // N_PARTS
    first_row = tl.program_id(0) * ROWS
    src += first_row.to(tl.int64) * (blocks_a_row * BLOCK_BYTES)
    r = tl.arange(0, ROWS * GROUPS)
    row = tl.minimum(r // GROUPS, n_rows - first_row - 1)
    j = tl.arange(0, 16)
    tokens = tl.arange(0, M)
    cols = tl.arange(0, GROUPS * 16)
    x += tokens[:, None] * K + cols[None, :]
    total = tl.zeros([M, ROWS], tl.float32)
    for first in range(0, n_groups, GROUPS):
        group = tl.minimum(first + r % GROUPS, n_groups - 1)
        weights = DECODE(src, table, row * blocks_a_row + group // N_PARTS, group % N_PARTS, j)
        weights = tl.reshape(weights.to(x.dtype.element_ty), [ROWS, GROUPS * 16])
        mask = (tokens < n_tokens)[:, None] & (first * 16 + cols < K)[None, :]
        total = tl.dot(tl.load(x + first * 16, mask=mask, other=0.0), tl.trans(weights), total, input_precision="ieee")
    rows = first_row + tl.arange(0, ROWS)
    at = tokens.to(tl.int64)[:, None] * n_rows + rows[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(tokens < n_tokens)[:, None] & (rows < n_rows)[None, :])


_kernel = Kernel(_skinny)


def can_multiply(x: torch.Tensor, weight: QTensor) -> bool:
    """Whether `multiply` takes these."""
    return len(x) <= MAX_TOKENS and weight.type in DECODERS and weight.shape[1] % GROUP == 0


def multiply(x: torch.Tensor, weight: QTensor, *, dtype: torch.dtype) -> torch.Tensor:
    """x W^T as `dtype`. x: `[T, K]`, at most `MAX_TOKENS` rows; weights are rounded to the dtype of x."""
    T, K = x.shape
    N = weight.shape[0]
    decoder = DECODERS[weight.type]
    out = torch.empty((T, N), dtype=dtype, device=x.device)
    args = (x, weight.data, out, table_of(decoder, x.device), T, N)
    constants = (decoder.decode, decoder.n_parts, decoder.block_bytes, K, _ROWS, _GROUPS, MAX_TOKENS)
    _kernel((cdiv(N, _ROWS),), args, constants, Tuning(n_warps=4, n_stages=2))
    return out
