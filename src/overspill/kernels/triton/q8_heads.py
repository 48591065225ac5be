"""`heads.prepare_heads` and `steps.prepare_steps` where cells are of type q8_0: one launch here as there.

Groups of 32 channels share a scale, so keys are rotated in the order of their channels: each channel is loaded with
the one that it is paired with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels import Steps
from overspill.kernels.triton.heads import Angles, HeadGains, move, turn_of
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, follow, power_of_two
from overspill.kernels.triton.q8_rows import cell_offsets, reading_dtype, write_rows

_TOKENS = 16


@triton.jit
def _turned(
    x, gain, cos, sin, tokens, is_there, eps,
    A: tl.constexpr, WIDTH: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Heads at the pointers x `[R]`, normed if there is a gain, and rotated: float32 `[R, WIDTH]`."""
    c = tl.arange(0, WIDTH)
    if PAIRS:
        other = c ^ 1
        i = c // 2
        is_first = c % 2 == 0
    else:
        is_first = c < N_ROT // 2
        other = tl.where(is_first, c + N_ROT // 2, c - N_ROT // 2)
        i = tl.where(is_first, c, c - N_ROT // 2)
    is_turned = c < N_ROT
    mask = is_there[:, None] & (c < A)[None, :]
    pair_mask = is_there[:, None] & is_turned[None, :]
    own = tl.load(x[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    pair = tl.load(x[:, None] + other[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    if gain is not None:
        scale = (1.0 / tl.sqrt(tl.sum(own * own, axis=1) / A + eps))[:, None]
        own *= scale * tl.load(gain + c, mask=c < A, other=0.0)[None, :]
        pair *= scale * tl.load(gain + other, mask=is_turned, other=0.0)[None, :]
    at = tokens[:, None] * (N_ROT // 2) + i[None, :]
    cosine = tl.load(cos + at, mask=pair_mask, other=1.0)
    sine = tl.load(sin + at, mask=pair_mask, other=0.0)
    return own * cosine + tl.where(is_first[None, :], -pair, pair) * sine


@triton.jit(do_not_specialize=["n_tokens"])
def _prepare(
    q, k, v, q_out, k_rows, v_rows, slots, positions, q_gain, k_gain, cos, sin, n_tokens, eps,
    A: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    A1: tl.constexpr, B: tl.constexpr, B1: tl.constexpr, R: tl.constexpr, H: tl.constexpr, G: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    K_CELL: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, V_CELL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. H of q go to q_out, the next G are k and the last G v: they go to their token's cell."""
    follow(IS_CHAINED)
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    is_there = tokens < n_tokens
    if head < H:
        move(q + tokens * Q_STRIDE + head * A, q_out + tokens * (H * A) + head * A, q_gain, cos, sin, tokens, is_there,
              eps, A, N_ROT, PAIRS, HALF, REST, True)  # fmt: skip
    elif head < H + G:
        g = (head - H).to(tl.int64)
        keys = _turned(k + tokens * K_STRIDE + g * A, k_gain, cos, sin, tokens, is_there, eps, A, A1, N_ROT, PAIRS)
        to = cell_offsets(slots, positions, tokens, is_there, K_SLOT, K_HEAD, K_CELL) + g * K_HEAD
        write_rows(k_rows, to, keys, is_there, A, A1)
    else:
        g = (head - H - G).to(tl.int64)
        b = tl.arange(0, B1)
        mask = is_there[:, None] & (b < B)[None, :]
        values = tl.load(v + (tokens * V_STRIDE + g * B)[:, None] + b[None, :], mask=mask, other=0.0)
        to = cell_offsets(slots, positions, tokens, is_there, V_SLOT, V_HEAD, V_CELL) + g * V_HEAD
        write_rows(v_rows, to, values.to(tl.float32), is_there, B, B1)


_kernel = Kernel(_prepare, is_exact=True, may_chain=True)


def prepare_q8_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cells: tuple[torch.Tensor, torch.Tensor],
    angles: Angles,
    gains: HeadGains,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`kernels.PrepareHeads`; cells: rows, views `[G, T, ...]`. Returns the queries as attention reads."""
    strides = [(0, *rows.stride()[:2]) for rows in cells]
    return _launch((q, k, v), cells, (None, None), len(cells[0]), strides, angles, gains, _TOKENS, dtype)


def prepare_q8_steps(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    steps: Steps,
    angles: Angles,
    gains: HeadGains,
    *,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`kernels.PrepareSteps`; caches: rows, `[S, G, C, ...]`."""
    strides = [rows.stride()[:3] for rows in caches]
    return _launch((q, k, v), caches, steps, caches[0].shape[1], strides, angles, gains, 1, dtype)


def _launch(
    products: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor],
    steps: tuple[torch.Tensor | None, torch.Tensor | None],
    G: int,
    strides: list[tuple[int, ...]],
    angles: Angles,
    gains: HeadGains,
    n_rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    q, k, v = products
    T, A, B = len(q), k.shape[1] // G, v.shape[1] // G
    H = q.shape[1] // A
    q_out = torch.empty((T, H, A), dtype=reading_dtype(torch.uint8, dtype), device=q.device)
    targets = q_out, *(x.view(torch.int8) for x in rows)
    args = (*products, *targets, *steps, gains.q, gains.k, angles.cos, angles.sin, T, gains.eps)
    sizes = (power_of_two(A), B, power_of_two(B), n_rows, H, G)
    constants = (*turn_of(A, angles), *sizes, q.stride(0), k.stride(0), v.stride(0), *strides[0], *strides[1])
    _kernel((cdiv(T, n_rows), H + 2 * G), args, constants, Tuning(n_warps=1 if n_rows == 1 else 4))
    return q_out
