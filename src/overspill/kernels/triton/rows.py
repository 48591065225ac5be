"""Rows of a weight times one vector, inside a kernel: the work of decoding one token.

A product of one vector reads a weight once and does next to nothing with it, so what counts is that loads are wide,
many at a time, and that few instructions stand between a byte and its sum; matrix units would gain nothing. Every
function here takes P vectors and P runs of ROWS rows and returns float32 `[P, ROWS]`: P is 1 for a matrix, and the
experts of a token where each of them has its own input.

x + at: where the vectors begin, at `[P]`. base: first row of each run, counted from `src`, `[P]`; int64 where offsets
of values do not fit 32 bits. r: `[ROWS]`, rows within a run. gain: of an RMS norm of x, then P is 1; None: no norm.
Values of x are rounded to `ROUND` first, weights not at all. Sums are float32, in an order that only constants decide.
IS_CHAINED: to `follow` the kernel before, which may have written x but not the weights, so these are fetched first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from overspill.gguf.types import TensorType
from overspill.kernels.triton.decode import DECODERS, GROUP, k_step_and_floor
from overspill.kernels.triton.launch import follow
from overspill.quant.qtensor import QTensor

_UNROLL = tl.constexpr(4)
_TWO_TO_100 = tl.constexpr(2.0**100)


@triton.jit
def norm_factor(x, eps, K: tl.constexpr, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the vector at x."""
    squares = tl.zeros([WIDTH], tl.float32)
    for first in tl.range(0, K, WIDTH, loop_unroll_factor=_UNROLL):
        cols = first + tl.arange(0, WIDTH)
        values = tl.load(x + cols, mask=cols < K, other=0.0).to(tl.float32)
        squares += values * values
    return 1.0 / tl.sqrt(tl.sum(squares) / K + eps)


@triton.jit
def _inputs(x, gain, factor, cols, is_col, ROUND: tl.constexpr):
    """Values at the columns `cols`, normed if there is a gain, as a norm of its own would leave them."""
    values = tl.load(x + cols, mask=is_col, other=0.0).to(tl.float32)
    if gain is not None:
        values *= factor * tl.load(gain + cols, mask=is_col, other=0.0)
    return values.to(ROUND).to(tl.float32)


@triton.jit
def plain_rows(
    x, at, gain, eps, src, table, base, r,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Numbers that need no decoding; DECODE: their dtype. The next tile is on its way while one is multiplied."""
    cols = tl.arange(0, WIDTH)[None, None, :]
    src = src.to(tl.pointer_type(DECODE)) + ((base * K)[:, None] + (r * K)[None, :])[:, :, None]
    tile = tl.load(src + cols, mask=cols < K, other=0.0)
    follow(IS_CHAINED)
    factor = 1.0
    if gain is not None:
        factor = norm_factor(x, eps, K, WIDTH)
    total = tl.zeros([P, ROWS, WIDTH], tl.float32)
    for first in tl.range(0, K, WIDTH, loop_unroll_factor=_UNROLL):
        ahead = tl.load(src + first + WIDTH + cols, mask=first + WIDTH + cols < K, other=0.0)
        values = _inputs(x + at[:, None, None], gain, factor, first + cols, first + cols < K, ROUND)
        total += tile.to(tl.float32) * values
        tile = ahead
    return tl.sum(total, axis=2)


@triton.jit
def _q8_0_rows(
    x, at, gain, eps, src, table, base, r,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Blocks of 34 bytes, as words that 8 neighbouring threads share; a thread scales the sum of its 4 values.

    Tiles are [words, blocks, rows, runs]: where the compiler sees no neighbours, it deals out the first dimensions to
    threads, so a warp reads neighbouring blocks and a value of x serves all rows of a thread.
    """
    n_blocks: tl.constexpr = K // 32
    N: tl.constexpr = WIDTH // 32
    follow(IS_CHAINED)
    factor = 1.0
    if gain is not None:
        factor = norm_factor(x, eps, K, WIDTH)
    run = (base * (17 * n_blocks))[None, :] + (r * (17 * n_blocks))[:, None]
    src = src.to(tl.pointer_type(tl.uint16)) + run[None, None, :, :]
    x += at[None, None, None, :]
    i = tl.arange(0, 8)[:, None, None, None]
    total = tl.zeros([8, N, ROWS, P], tl.float32)
    for first in tl.range(0, n_blocks, N, loop_unroll_factor=_UNROLL):
        block = (first + tl.arange(0, N))[None, :, None, None]
        is_block = block < n_blocks
        there = src + block * 17
        step = tl.load(there.to(tl.pointer_type(tl.float16)), mask=is_block, other=0.0)
        # Two loads: halves that the compiler knows to be neighbours would go to two threads.
        low = tl.load(there + (1 + 2 * i), mask=is_block, other=0)
        high = tl.load(there + (2 + 2 * i), mask=is_block, other=0)
        word = low.to(tl.int32) | (high.to(tl.int32) << 16)
        sums = tl.zeros([8, N, ROWS, P], tl.float32)
        for p in tl.static_range(4):
            values = _inputs(x, gain, factor, block * 32 + 4 * i + p, is_block, ROUND)
            sums += ((word << (24 - 8 * p)) >> 24).to(tl.float32) * values
        total += step.to(tl.float32) * sums
    return tl.trans(tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _mxfp4_rows(
    x, at, gain, eps, src, table, base, r,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Blocks of 17 bytes in tiles as above, a byte to a thread.

    The bits of a value, put where a float has its sign, its lowest bits of exponent and its highest of mantissa, are a
    float that is 2^127 times too small, perhaps a subnormal one; x makes up for 2^100 of that, and the scale for the
    rest.
    """
    n_blocks: tl.constexpr = K // 32
    N: tl.constexpr = WIDTH // 32
    follow(IS_CHAINED)
    factor = 1.0
    if gain is not None:
        factor = norm_factor(x, eps, K, WIDTH)
    src += ((base * (17 * n_blocks))[None, :] + (r * (17 * n_blocks))[:, None])[None, None, :, :]
    x += at[None, None, None, :]
    i = tl.arange(0, 16)[:, None, None, None]
    total = tl.zeros([16, N, ROWS, P], tl.float32)
    for first in tl.range(0, n_blocks, N, loop_unroll_factor=_UNROLL):
        block = (first + tl.arange(0, N))[None, :, None, None]
        is_block = block < n_blocks
        there = src + block * 17
        e = tl.load(there, mask=is_block, other=0).to(tl.int32)
        q = tl.load(there + 1 + i, mask=is_block, other=0).to(tl.int32)
        low = ((q << 28) & -2147483648) | ((q << 22) & 0x01C00000)
        high = ((q << 24) & -2147483648) | ((q << 18) & 0x01C00000)
        values = _inputs(x, gain, factor, block * 32 + i, is_block, ROUND) * _TWO_TO_100
        sums = low.to(tl.float32, bitcast=True) * values
        values = _inputs(x, gain, factor, block * 32 + 16 + i, is_block, ROUND) * _TWO_TO_100
        sums += high.to(tl.float32, bitcast=True) * values
        # 2^(e - 128) from its bits; the two smallest are subnormal.
        bits = tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23)
        total += bits.to(tl.float32, bitcast=True) * 134217728.0 * sums
    return tl.trans(tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def _q4_k_rows(
    x, at, gain, eps, src, table, base, r,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Blocks of 144 bytes by quarters: 32 bytes, whose low and whose high halves are 32 values each, as 8 words.

    What is subtracted from every value is multiplied by the sum of x, once for the 4 values of a thread.
    """
    n_quarters: tl.constexpr = K // 64
    N: tl.constexpr = WIDTH // 64
    follow(IS_CHAINED)
    factor = 1.0
    if gain is not None:
        factor = norm_factor(x, eps, K, WIDTH)
    src += ((base * (36 * n_quarters))[None, :] + (r * (36 * n_quarters))[:, None])[None, None, :, :]
    x += at[None, None, None, :]
    i = tl.arange(0, 8)[:, None, None, None]
    total = tl.zeros([8, N, ROWS, P], tl.float32)
    for first in tl.range(0, n_quarters, N, loop_unroll_factor=_UNROLL):
        quarter = tl.minimum(first + tl.arange(0, N), n_quarters - 1)[None, :, None, None]
        is_quarter = (first + tl.arange(0, N))[None, :, None, None] < n_quarters
        block = quarter // 4 * 144
        part = quarter % 4 * 4
        words = tl.load((src + block + 16 + part * 8).to(tl.pointer_type(tl.int32)) + i)
        low_step, low_floor = k_step_and_floor(src, block, part)
        high_step, high_floor = k_step_and_floor(src, block, part + 2)
        low = words & 0x0F0F0F0F
        high = (words >> 4) & 0x0F0F0F0F
        low_sums = tl.zeros([8, N, ROWS, P], tl.float32)
        high_sums = tl.zeros([8, N, ROWS, P], tl.float32)
        low_x = tl.zeros([8, N, 1, P], tl.float32)
        high_x = tl.zeros([8, N, 1, P], tl.float32)
        for p in tl.static_range(4):
            cols = quarter * 64 + 4 * i + p
            values = _inputs(x, gain, factor, cols, is_quarter, ROUND)
            low_sums += ((low >> (8 * p)) & 255).to(tl.float32) * values
            low_x += values
            values = _inputs(x, gain, factor, cols + 32, is_quarter, ROUND)
            high_sums += ((high >> (8 * p)) & 255).to(tl.float32) * values
            high_x += values
        total += low_step * low_sums - low_floor * low_x + high_step * high_sums - high_floor * high_x
    return tl.trans(tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def decoded_rows(
    x, at, gain, eps, src, table, base, r,
    K: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Any type that `decode` knows."""
    n_groups: tl.constexpr = K // 16
    N: tl.constexpr = WIDTH // 16
    follow(IS_CHAINED)
    factor = 1.0
    if gain is not None:
        factor = norm_factor(x, eps, K, WIDTH)
    first_block = ((base * (n_groups // N_PARTS))[:, None] + (r * (n_groups // N_PARTS))[None, :])[:, :, None]
    j = tl.arange(0, 16)
    total = tl.zeros([P, ROWS, WIDTH], tl.float32)
    for first in tl.range(0, n_groups, N, loop_unroll_factor=_UNROLL):
        group = tl.minimum(first + tl.arange(0, N), n_groups - 1)[None, None, :]
        block = tl.reshape(first_block + group // N_PARTS, [P * ROWS * N])
        part = tl.reshape(tl.broadcast_to(group % N_PARTS, [P, ROWS, N]), [P * ROWS * N])
        weights = tl.reshape(DECODE(src, table, block, part, j), [P, ROWS, WIDTH])
        cols = (first * 16 + tl.arange(0, WIDTH))[None, None, :]
        total += weights * _inputs(x + at[:, None, None], gain, factor, cols, cols < K, ROUND)
    return tl.sum(total, axis=2)


class Reader(NamedTuple):
    """How a type is read: one of the functions above, and what it must know of the type."""

    rows: Callable[..., Any]
    decode: Any
    n_parts: int
    block_bytes: int


_ROWS = {TensorType.Q8_0: _q8_0_rows, TensorType.MXFP4: _mxfp4_rows, TensorType.Q4_K: _q4_k_rows}
_PLAIN = {TensorType.F32: tl.float32, TensorType.F16: tl.float16, TensorType.BF16: tl.bfloat16}


def _reader(type: TensorType) -> Reader:
    decoder = DECODERS[type]
    if type in _PLAIN:
        return Reader(plain_rows, _PLAIN[type], 1, decoder.block_bytes)
    return Reader(_ROWS.get(type, decoded_rows), decoder.decode, decoder.n_parts, decoder.block_bytes)


READERS = {type: _reader(type) for type in DECODERS}


def can_read(weight: QTensor) -> bool:
    """Whether rows of the weight can be multiplied here."""
    return weight.type in READERS and weight.shape[-1] % GROUP == 0
