"""Joining attention over two disjoint sets of cells.

Each part comes with the log of its sum of exponentials; the whole is their average, weighted by those sums. Outputs
are averaged in place, since each number is read and written by one thread. A token's logs are read by all warps, so
the sum of both goes elsewhere: one warp would write it before the others have read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.flash import Partial
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two

_TOKENS = 16


@triton.jit(do_not_specialize=["n_tokens"])
def _merge(
    a, b, a_lse, b_lse, lse, n_tokens,
    B: tl.constexpr, BLOCK: tl.constexpr, A_TOKEN: tl.constexpr, A_HEAD: tl.constexpr, B_TOKEN: tl.constexpr,
    B_HEAD: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    is_token = tokens < n_tokens
    mask = is_token[:, None] & (cols < B)[None, :]
    at = head * n_tokens + tokens
    log_a = tl.load(a_lse + at, mask=is_token, other=0.0)
    log_b = tl.load(b_lse + at, mask=is_token, other=0.0)
    top = tl.maximum(log_a, log_b)
    sum_a = tl.exp(log_a - top)
    sum_b = tl.exp(log_b - top)
    share = (sum_b / (sum_a + sum_b))[:, None]
    a += tokens[:, None] * A_TOKEN + head * A_HEAD + cols[None, :]
    b += tokens[:, None] * B_TOKEN + head * B_HEAD + cols[None, :]
    values = tl.load(a, mask=mask, other=0.0).to(tl.float32)
    others = tl.load(b, mask=mask, other=0.0).to(tl.float32)
    tl.store(a, (values + (others - values) * share).to(a.dtype.element_ty), mask=mask)
    tl.store(lse + at, top + tl.log(sum_a + sum_b), mask=is_token)


_kernel = Kernel(_merge)


def merged(whole: Partial, part: Partial) -> Partial:
    """Attention over the cells of both, in the memory of `whole`'s output; outputs `[T, H, B]` of any strides over
    tokens and heads."""
    T, H, B = whole.out.shape
    strides = (*whole.out.stride()[:2], *part.out.stride()[:2])
    lse = torch.empty_like(whole.lse)
    args = (whole.out, part.out, whole.lse, part.lse, lse, T)
    _kernel((cdiv(T, _TOKENS), H), args, (B, power_of_two(B), *strides, _TOKENS), Tuning(n_warps=4))
    return Partial(whole.out, lse)
