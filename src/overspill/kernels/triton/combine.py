"""The last step of a layer's experts: every token adds up what its experts said.

Contributions are added to the token's float32 hidden state one after the other in ascending expert id, starting from
what is there, so the sum is bit for bit the same however the experts are cut into slabs, as long as slabs come in
ascending order. No atomics: a token is summed by one program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two

_MAX_BLOCK = 2048


@triton.jit
def _combine(
    out, y, ids, mix, inverse,
    K: tl.constexpr, K_PAD: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_col = cols < D
    ranks = tl.arange(0, K_PAD)
    experts = tl.load(ids + t * K + ranks, mask=ranks < K, other=0x7FFFFFFF)
    weights = tl.load(mix + t * K + ranks, mask=ranks < K, other=0.0)
    rows = tl.load(inverse + t * K + ranks, mask=ranks < K, other=-1)
    total = tl.load(out + t * STRIDE + cols, mask=is_col, other=0.0)
    previous = -1
    for _ in tl.static_range(K):
        expert = tl.min(tl.where(experts > previous, experts, 0x7FFFFFFF))
        row = tl.max(tl.where(experts == expert, rows, -1))
        weight = tl.sum(tl.where(experts == expert, weights, 0.0))
        said = tl.load(y + row.to(tl.int64) * D + cols, mask=is_col & (row >= 0), other=0.0).to(tl.float32)
        total = tl.where(row >= 0, total + weight * said, total)
        previous = expert
    tl.store(out + t * STRIDE + cols, total, mask=is_col)


_kernel = Kernel(_combine)


def combine(out: torch.Tensor, y: torch.Tensor, ids: torch.Tensor, mix: torch.Tensor, inverse: torch.Tensor) -> None:
    """out[t] += mix[t, k] * y[inverse[t, k]], in ascending order of ids[t, k], where inverse is not -1.

    out: float32 `[T, D]`, each row contiguous. y: `[rows, D]`. ids: int32 `[T, K]`, distinct in a row. mix: float32
    `[T, K]`. inverse: int32 `[T K]`.
    """
    T, K = ids.shape
    D = out.shape[1]
    block = min(_MAX_BLOCK, power_of_two(D))
    constants = (K, power_of_two(K), D, out.stride(0), block)
    _kernel((T, cdiv(D, block)), (out, y, ids, mix, inverse), constants, Tuning(n_warps=max(1, block // 512)))
