"""Query, key and value heads on their way to attention: norm, rotation, the write into the cache.

A program handles one head of a few tokens. Rotation pairs channel i with i + n_rot / 2 (NEOX) or 2i with 2i + 1
(interleaved); channels from n_rot on pass through. All arithmetic is float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two

_TOKENS = 16
_TUNING = Tuning(n_warps=4)


@triton.jit
def _normed(a, b, c, gain, first, second, rest, eps, A: tl.constexpr, N_ROT: tl.constexpr):
    """RMS norm of heads whose channels are cut into three parts `[R, ...]`."""
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    scale = (1.0 / tl.sqrt(squares / A + eps))[:, None]
    a *= scale * tl.load(gain + first, mask=first < N_ROT, other=0.0)[None, :]
    b *= scale * tl.load(gain + second, mask=second < N_ROT, other=0.0)[None, :]
    c *= scale * tl.load(gain + rest, mask=rest < A, other=0.0)[None, :]
    return a, b, c


@triton.jit
def move(
    x, out, gain, cos, sin, tokens, is_there, eps,
    A: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    IS_ROTATED: tl.constexpr,
):  # fmt: skip
    """Heads at the pointers x `[R]` to those at out `[R]`: normed if there is a gain, then rotated."""
    i = tl.arange(0, HALF)
    first = i
    second = i + N_ROT // 2
    if PAIRS:
        first = 2 * i
        second = 2 * i + 1
    rest = N_ROT + tl.arange(0, REST)
    pair_mask = is_there[:, None] & (i < N_ROT // 2)[None, :]
    rest_mask = is_there[:, None] & (rest < A)[None, :]
    a = tl.load(x[:, None] + first[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    b = tl.load(x[:, None] + second[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    c = tl.load(x[:, None] + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if gain is not None:
        a, b, c = _normed(a, b, c, gain, first, second, rest, eps, A, N_ROT)
    if IS_ROTATED:
        at = tokens[:, None] * (N_ROT // 2) + i[None, :]
        cosine = tl.load(cos + at, mask=pair_mask, other=0.0)
        sine = tl.load(sin + at, mask=pair_mask, other=0.0)
        turned = a * cosine - b * sine
        b = b * cosine + a * sine
        a = turned
    tl.store(out[:, None] + first[None, :], a.to(out.dtype.element_ty), mask=pair_mask)
    tl.store(out[:, None] + second[None, :], b.to(out.dtype.element_ty), mask=pair_mask)
    tl.store(out[:, None] + rest[None, :], c.to(out.dtype.element_ty), mask=rest_mask)


@triton.jit(do_not_specialize=["n_tokens"])
def _rope(
    x, out, cos, sin, n_tokens,
    A: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    at = tokens * (H * A) + tl.program_id(1) * A
    move(x + at, out + at, None, cos, sin, tokens, tokens < n_tokens, 0.0, A, N_ROT, PAIRS, HALF, REST, True)


@triton.jit(do_not_specialize=["n_tokens"])
def _prepare(
    q, k, v, q_out, k_out, v_out, q_gain, k_gain, cos, sin, n_tokens, eps,
    A: tl.constexpr, N_ROT: tl.constexpr, PAIRS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr, G: tl.constexpr, B: tl.constexpr, V_REST: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, K_HEAD: tl.constexpr,
    V_HEAD: tl.constexpr,
):  # fmt: skip
    """Heads 0 .. H of q go to q_out, the next G are k and the last G v: they go into the cache."""
    head = tl.program_id(1)
    tokens = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    is_there = tokens < n_tokens
    if head < H:
        move(q + tokens * Q_STRIDE + head * A, q_out + tokens * (H * A) + head * A, q_gain, cos, sin, tokens, is_there,
              eps, A, N_ROT, PAIRS, HALF, REST, True)  # fmt: skip
    elif head < H + G:
        g = (head - H).to(tl.int64)
        move(k + tokens * K_STRIDE + g * A, k_out + tokens * A + g * K_HEAD, k_gain, cos, sin, tokens, is_there,
              eps, A, N_ROT, PAIRS, HALF, REST, True)  # fmt: skip
    else:
        g = (head - H - G).to(tl.int64)
        move(v + tokens * V_STRIDE + g * B, v_out + tokens * B + g * V_HEAD, None, cos, sin, tokens, is_there,
              eps, B, 0, False, 1, V_REST, False)  # fmt: skip


_rope_kernel = Kernel(_rope)
_prepare_kernel = Kernel(_prepare)


class Angles(NamedTuple):
    """cos and sin, float32 `[T, n_rot / 2]`, and how channels are paired."""

    cos: torch.Tensor
    sin: torch.Tensor
    is_interleaved: bool


class HeadGains(NamedTuple):
    """Weights `[A]` of the RMS norms of query and key heads before rotation; None where there are none."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    eps: float


def rope(x_THA: torch.Tensor, angles: Angles, *, dtype: torch.dtype) -> torch.Tensor:
    """Rotate heads; returns `[T, H, A]` of `dtype`."""
    x_THA = x_THA.contiguous()
    T, H, A = x_THA.shape
    out = torch.empty(x_THA.shape, dtype=dtype, device=x_THA.device)
    _rope_kernel(
        (cdiv(T, _TOKENS), H), (x_THA, out, angles.cos, angles.sin, T), (*turn_of(A, angles), _TOKENS, H), _TUNING
    )
    return out


def prepare_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cells: tuple[torch.Tensor, torch.Tensor],
    angles: Angles,
    gains: HeadGains,
) -> torch.Tensor:
    """Norm and rotate q and k, and write k and v to their cells, in one launch.

    q: `[T, H * A]`; k: `[T, G * A]`; v: `[T, G * B]`, rows of any stride (views of one merged product will do).
    cells: where the tokens' keys and values go, views `[G, T, A]` and `[G, T, B]` of caches that are contiguous over
    cells. Returns the queries, `[T, H, A]`, in the dtype of the cells.
    """
    k_out, v_out = cells
    G, T, A = k_out.shape
    B = v_out.shape[2]
    H = q.shape[1] // A
    q_out = torch.empty((T, H, A), dtype=k_out.dtype, device=q.device)
    args = (q, k, v, q_out, k_out, v_out, gains.q, gains.k, angles.cos, angles.sin, T, gains.eps)
    strides = (q.stride(0), k.stride(0), v.stride(0), k_out.stride(0), v_out.stride(0))
    constants = (*turn_of(A, angles), _TOKENS, H, G, B, power_of_two(B), *strides)
    _prepare_kernel((cdiv(T, _TOKENS), H + 2 * G), args, constants, _TUNING)
    return q_out


def turn_of(A: int, angles: Angles) -> tuple[int, int, bool, int, int]:
    """The constants that `move` takes for heads of A channels."""
    half = angles.cos.shape[1]
    return A, 2 * half, angles.is_interleaved, power_of_two(half), power_of_two(max(1, A - 2 * half))
