"""The small ops of a few tokens, each in one compiled call on the calling thread.

For one token torch spends more time on finding its kernels, of which each of these ops needs several, than on the
numbers. All tensors are float32 in host memory with contiguous last dimensions; only this module's wrappers, which
check that, may call the compiled parts. A token's result does not depend on the other tokens of a call.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.kernels.numba.jit import inner_sums
from overspill.kernels.numba.memory import load_f32, reader, store_f32
from overspill.kernels.numba.native import callable_at, direct_address
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE

ZERO, ONE = np.float32(0), np.float32(1)


def check_rows(*tensors: Tensor) -> None:
    """Compiled code follows addresses: what does not fit must not get there."""
    for x in tensors:
        if x.dtype != torch.float32 or x.stride(-1) != 1 or not x.is_cpu:
            raise ValueError(f"rows must be contiguous float32 in host memory: {x.dtype}, {x.stride()}, {x.device}")


# --- RMS norm


def norm_rows(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain; x `[..., D]`, gain `[D]`."""
    x = x.contiguous()
    check_rows(x, gain)
    if gain.shape != x.shape[-1:]:
        raise ValueError(f"a gain {tuple(gain.shape)} does not fit {tuple(x.shape)}")
    out, n = torch.empty_like(x), gain.numel()
    callable_at(norm_rows_address(), 5, 1)(x.data_ptr(), out.data_ptr(), gain.data_ptr(), x.numel() // n, n, eps)
    return out


@cache
def norm_rows_address() -> int:
    """(x, out, gain, n_rows, n), eps."""
    digest = SOURCE_DIGEST

    def norm_all_rows(x, out, gain, n_rows, n, eps):
        _ = digest
        for i_row in range(n_rows):
            _norm(x + 4 * n * i_row, out + 4 * n * i_row, gain, n, eps)

    return direct_address(norm_all_rows, 5, 1)


@inner_sums
def _norm(x, out, gain, n, eps):
    factor = ONE / np.sqrt(dot(x, x, n) / np.float32(n) + eps)
    for i in range(n):
        store_f32(out, i, load_f32(x, i) * factor * load_f32(gain, i))


@inner_sums
def dot(a, b, n):
    total = ZERO
    for i in range(n):
        total += load_f32(a, i) * load_f32(b, i)
    return total


# --- Heads: norm, rotation, and their way into the cache


class Heads(NamedTuple):
    """Addresses, and strides in bytes; heads of a token follow each other in x. gain: 0 for none."""

    x: int
    x_stride: int
    out: int
    out_stride: int
    out_head_stride: int
    n_heads: int
    n_channels: int
    gain: int


class Rotation(NamedTuple):
    """cos and sin: `n_half` floats for each token. n_half: 0 for no rotation."""

    cos: int
    sin: int
    n_half: int
    is_interleaved: int


_read_heads = reader(Heads)
_read_rotation = reader(Rotation)
_N_HEADS_FIELDS = len(Heads._fields)
HEADS_BYTES = 8 * _N_HEADS_FIELDS


def prepare_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    gains: tuple[Tensor | None, Tensor | None],
    *,
    eps: float,
    is_interleaved: bool,
) -> Tensor:
    """`kernels.PrepareHeads`."""
    keys, values = cells
    cos, sin = (angle.contiguous() for angle in angles)
    check_rows(q, k, v, keys, values, cos, sin)
    n_tokens, n_channels, n_half = q.shape[0], keys.shape[2], cos.shape[1]
    out = torch.empty(n_tokens, q.shape[1] // n_channels, n_channels)
    if not (
        (n_tokens, k.shape[1], v.shape[1])
        == (keys.shape[1], keys.shape[0] * n_channels, values.shape[0] * values.shape[2])
        and k.shape[0] == v.shape[0] == cos.shape[0] == values.shape[1] == n_tokens
        and cos.shape == sin.shape
        and 2 * n_half <= n_channels
        and q.shape[1] == out.shape[1] * n_channels
    ):
        raise ValueError(f"heads {q.shape}, {k.shape}, {v.shape} do not fit {keys.shape}, {values.shape}, {cos.shape}")
    call = WORKSPACE.memory("call", 3 * HEADS_BYTES + 8 * len(Rotation._fields))
    call.write(
        heads_of(q, out.transpose(0, 1), gains[0])
        + heads_of(k, keys, gains[1])
        + heads_of(v, values, None)
        + Rotation(cos.data_ptr(), sin.data_ptr(), n_half, int(is_interleaved))
    )
    callable_at(prepare_heads_address(), 2, 1)(call.address, n_tokens, eps)
    return out


def heads_of(x: Tensor, out_GTA: Tensor, gain: Tensor | None) -> Heads:
    n_heads, _, n_channels = out_GTA.shape
    head_stride, stride, _ = out_GTA.stride()
    if gain is not None and (gain.dtype != torch.float32 or gain.shape != (n_channels,) or not gain.is_contiguous()):
        raise ValueError(f"a gain {gain.dtype} {tuple(gain.shape)} does not fit heads of {n_channels}")
    address = 0 if gain is None else gain.data_ptr()
    places = (x.data_ptr(), 4 * x.stride(0), out_GTA.data_ptr(), 4 * stride, 4 * head_stride)
    return Heads(*places, n_heads, n_channels, address)


@cache
def prepare_heads_address() -> int:
    """(call, n_tokens), eps. call: queries, keys, values (`Heads`), `Rotation`."""
    digest = SOURCE_DIGEST

    def prepare_all_heads(call, n_tokens, eps):
        _ = digest
        rotation = _read_rotation(call + 3 * HEADS_BYTES)
        for i in range(3):
            heads = _read_heads(call + i * HEADS_BYTES)
            for t in range(n_tokens):
                at = 4 * rotation.n_half * t
                for h in range(heads.n_heads):
                    x = heads.x + t * heads.x_stride + 4 * h * heads.n_channels
                    out = heads.out + t * heads.out_stride + h * heads.out_head_stride
                    _place(x, out, heads, eps)
                    if i < 2:
                        _rotate(out, rotation.cos + at, rotation.sin + at, rotation.n_half, rotation.is_interleaved)

    return direct_address(prepare_all_heads, 2, 1)


@inner_sums
def _place(x, out, heads, eps):
    if heads.gain != 0:
        _norm(x, out, heads.gain, heads.n_channels, eps)
    else:
        for i in range(heads.n_channels):
            store_f32(out, i, load_f32(x, i))


@inner_sums
def _rotate(x, cos, sin, n_half, is_interleaved):
    """In place: channels i and i + n_half, or 2i and 2i + 1."""
    step, apart = (2, 1) if is_interleaved else (1, n_half)
    for i in range(n_half):
        a, b = load_f32(x, i * step), load_f32(x, i * step + apart)
        c, s = load_f32(cos, i), load_f32(sin, i)
        store_f32(x, i * step, a * c - b * s)
        store_f32(x, i * step + apart, b * c + a * s)
