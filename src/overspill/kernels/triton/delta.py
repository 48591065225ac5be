"""The delta rule for one token of each of several sequences, in two launches: `kernels.DeltaSteps`.

The convolution has a launch of its own, because its last inputs move on in place: whoever reads a channel's must also
write them. In the second launch a program owns some value channels of a head's state, which it reads and writes once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels import StateSteps
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two

_CHANNELS = 256
_VALUES = 32


@triton.jit
def _convolve(
    x, before_rows, after_rows, kept, taps, out, C: tl.constexpr, X_ROW: tl.constexpr, J: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Program (token, N channels): silu of the sum over the last J inputs, the oldest by the first tap."""
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * N + tl.arange(0, N)
    is_there = c < C
    before = kept + tl.load(before_rows + t).to(tl.int64) * ((J - 1) * C) + c
    after = kept + tl.load(after_rows + t).to(tl.int64) * ((J - 1) * C) + c
    newest = tl.load(x + t * X_ROW + c, mask=is_there, other=0.0).to(tl.float32)
    total = newest * tl.load(taps + c * J + (J - 1), mask=is_there, other=0.0)
    for j in tl.static_range(J - 1):
        old = tl.load(before + j * C, mask=is_there, other=0.0)
        total += old * tl.load(taps + c * J + j, mask=is_there, other=0.0)
        if j > 0:
            tl.store(after + (j - 1) * C, old, mask=is_there)
    tl.store(after + (J - 2) * C, newest, mask=is_there)
    tl.store(out + t * C + c, total / (1.0 + tl.exp(-total)), mask=is_there)


@triton.jit(do_not_specialize=["eps", "scale"])
def _apply(
    mixed, g, beta, before_rows, after_rows, kept, out, eps, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, K1: tl.constexpr, ADJACENT: tl.constexpr,
    HAS_CHANNELS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Program (token, head, N value channels)."""
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    v_at = tl.program_id(2) * N + tl.arange(0, N)
    k_at = tl.arange(0, K1)
    is_key, is_value = k_at < K, v_at < K
    key_head = h // ADJACENT % G
    row = mixed + t * ((2 * G + H) * K)
    q = tl.load(row + key_head * K + k_at, mask=is_key, other=0.0)
    k = tl.load(row + (G + key_head) * K + k_at, mask=is_key, other=0.0)
    v = tl.load(row + (2 * G + h) * K + v_at, mask=is_value, other=0.0)
    q *= tl.rsqrt(tl.sum(q * q) + eps) * scale
    k *= tl.rsqrt(tl.sum(k * k) + eps)
    strength = tl.load(beta + t * H + h)
    if HAS_CHANNELS:
        decay = tl.exp(tl.load(g + (t * H + h) * K + k_at, mask=is_key, other=0.0))
    else:
        decay = tl.exp(tl.load(g + t * H + h)) + tl.zeros([K1], tl.float32)
    cells = h * (K * K) + k_at[:, None] * K + v_at[None, :]
    is_cell = is_key[:, None] & is_value[None, :]
    before = kept + tl.load(before_rows + t).to(tl.int64) * (H * K * K)
    after = kept + tl.load(after_rows + t).to(tl.int64) * (H * K * K)
    state = tl.load(before + cells, mask=is_cell, other=0.0) * decay[:, None]
    change = strength * (v - tl.sum(state * k[:, None], axis=0))
    state += k[:, None] * change[None, :]
    tl.store(after + cells, state, mask=is_cell)
    tl.store(out + (t * H + h) * K + v_at, tl.sum(state * q[:, None], axis=0), mask=is_value)


_convolve_kernel = Kernel(_convolve)
_apply_kernel = Kernel(_apply)


def delta_steps(
    qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    kept: tuple[torch.Tensor, torch.Tensor],
    taps: torch.Tensor,
    rows: StateSteps,
    *,
    n_adjacent: int,
    eps: float,
) -> torch.Tensor:
    """`kernels.DeltaSteps`."""
    inputs, states = kept
    T, C = qkv.shape
    J, (_, H, K, _) = taps.shape[1], states.shape
    G = (C // K - H) // 2
    mixed = torch.empty((T, C), dtype=torch.float32, device=qkv.device)
    n = min(_CHANNELS, power_of_two(C))
    _convolve_kernel((T, cdiv(C, n)), (qkv, *rows, inputs, taps, mixed), (C, qkv.stride(0), J, n))
    out = torch.empty((T, H, K), dtype=torch.float32, device=qkv.device)
    n = min(_VALUES, power_of_two(K))
    constants = (H, G, K, power_of_two(K), n_adjacent, g.shape[-1] > 1, n)
    args = (mixed, g.contiguous(), beta.contiguous(), *rows, states, out, eps, K**-0.5)
    _apply_kernel((T, H, cdiv(K, n)), args, constants, Tuning(n_warps=4))
    return out
