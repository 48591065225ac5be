"""Products of a few tokens with weights as they are stored: bytes are read once and decoded on the way.

The weight's bytes are nearly all the work, so a program takes few rows of it and there are many programs. One launch
serves several weights of one type and one input (queries, keys and values), next to each other in the result. One
token is multiplied and added up row by row (`rows`); more of them, padded to the 16 rows that the smallest matrix
instruction has, go to the tensor cores. Norm and residual ride along where there is one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.decode import DECODERS, table_of
from overspill.kernels.triton.dequant import PLAIN
from overspill.kernels.triton.launch import Kernel, cdiv, follow, power_of_two
from overspill.kernels.triton.rows import READERS, can_read
from overspill.kernels.triton.tuning import MAX_TOKENS, MIN_ROWS, SEVERAL, RowTile, tile_of, token_tile
from overspill.quant.qtensor import QTensor

_N_WEIGHTS = 3
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _pick(i, a, b, c, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr):
    """Of program i: its weight, its first row there, how many rows the weight has, where they begin in the result."""
    src = a
    n_rows = A
    first = 0
    if B > 0:  # noqa: SIM102  (Triton compiles both sides of an `and`)
        if i >= tl.cdiv(A, ROWS):
            i -= tl.cdiv(A, ROWS)
            src = b
            n_rows = B
            first = A
            if C > 0:  # noqa: SIM102
                if i >= tl.cdiv(B, ROWS):
                    i -= tl.cdiv(B, ROWS)
                    src = c
                    n_rows = C
                    first = A + B
    return src, i * ROWS, n_rows, first


@triton.jit
def _token(
    x, gain, a, b, c, a_bias, b_bias, c_bias, table, y, out, eps,
    READ: tl.constexpr, DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr, K: tl.constexpr,
    ROW_BYTES: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROUND: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One token."""
    src, first_row, n_rows, first = _pick(tl.program_id(0), a, b, c, A, B, C, ROWS)
    r = tl.arange(0, ROWS)
    zero = tl.zeros([1], tl.int32)
    src += first_row.to(tl.int64) * ROW_BYTES
    there = tl.minimum(r, n_rows - first_row - 1)
    sums = READ(
        x, zero, gain, eps, src, table, zero, there, K, 1, ROWS, WIDTH, ROUND, DECODE, N_PARTS, BLOCK_BYTES, IS_CHAINED
    )
    sums = tl.reshape(sums, [ROWS])
    rows = first_row + r
    mask = rows < n_rows
    if a_bias is not None:
        bias, _, _, _ = _pick(tl.program_id(0), a_bias, b_bias, c_bias, A, B, C, ROWS)
        sums += tl.load(bias + rows, mask=mask, other=0.0)
    if y is not None:
        sums += tl.load(y + first + rows, mask=mask, other=0.0)
    tl.store(out + first + rows, sums, mask=mask)


@triton.jit
def _plain_tile(src, table, row, first, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DECODE: tl.constexpr,
                N_PARTS: tl.constexpr):  # fmt: skip
    """Columns first ... of rows `row [ROWS]` of numbers that need no decoding; DECODE: their dtype."""
    cols = first + tl.arange(0, WIDTH)
    at = src.to(tl.pointer_type(DECODE)) + (row * K)[:, None] + cols[None, :]
    return tl.load(at, mask=(cols < K)[None, :], other=0.0)


@triton.jit
def _decoded_tile(src, table, row, first, K: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
                  DECODE: tl.constexpr, N_PARTS: tl.constexpr):  # fmt: skip
    """The same of blocks; what is beyond the last column is some value of the row."""
    GROUPS: tl.constexpr = WIDTH // 16
    lane = tl.arange(0, ROWS * GROUPS)
    group = tl.minimum(first // 16 + lane % GROUPS, K // 16 - 1)
    row = tl.reshape(tl.broadcast_to(row[:, None], [ROWS, GROUPS]), [ROWS * GROUPS])
    values = DECODE(src, table, row * (K // 16 // N_PARTS) + group // N_PARTS, group % N_PARTS, tl.arange(0, 16))
    return tl.reshape(values, [ROWS, WIDTH])


@triton.jit(do_not_specialize=["n_tokens"])
def _several(
    x, a, b, c, a_bias, b_bias, c_bias, table, y, out, n_tokens,
    TILE: tl.constexpr, DECODE: tl.constexpr, N_PARTS: tl.constexpr, K: tl.constexpr, ROW_BYTES: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    M: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Up to M tokens."""
    follow(IS_CHAINED)
    src, first_row, n_rows, first_col = _pick(tl.program_id(0), a, b, c, A, B, C, ROWS)
    src += first_row.to(tl.int64) * ROW_BYTES
    r = tl.arange(0, ROWS)
    there = tl.minimum(r, n_rows - first_row - 1)
    tokens = tl.arange(0, M)
    cols = tl.arange(0, WIDTH)
    x += tokens[:, None] * K + cols[None, :]
    total = tl.zeros([M, ROWS], tl.float32)
    for first in range(0, K, WIDTH):
        weights = TILE(src, table, there, first, K, ROWS, WIDTH, DECODE, N_PARTS).to(ROUND)
        mask = (tokens < n_tokens)[:, None] & (first + cols < K)[None, :]
        values = tl.load(x + first, mask=mask, other=0.0).to(ROUND)
        total = tl.dot(values, tl.trans(weights), total, input_precision="ieee")
    rows = first_row + r
    mask = (tokens < n_tokens)[:, None] & (rows < n_rows)[None, :]
    at = tokens.to(tl.int64)[:, None] * (A + B + C) + (first_col + rows)[None, :]
    if a_bias is not None:
        bias, _, _, _ = _pick(tl.program_id(0), a_bias, b_bias, c_bias, A, B, C, ROWS)
        total += tl.load(bias + rows, mask=rows < n_rows, other=0.0)[None, :]
    if y is not None:
        total += tl.load(y + at, mask=mask, other=0.0)
    tl.store(out + at, total, mask=mask)


_token_kernel = Kernel(_token, may_chain=True)
_several_kernel = Kernel(_several, may_chain=True)


class Norm(NamedTuple):
    """An RMS norm of the input: gain float32 `[K]`."""

    gain: torch.Tensor
    eps: float


def can_multiply(x: torch.Tensor, weights: Sequence[QTensor]) -> bool:
    """Whether `multiply` takes and suits these."""
    n_tokens, first = x.shape[0], weights[0]
    if not 0 < n_tokens <= MAX_TOKENS or len(weights) > _N_WEIGHTS:
        return False
    if n_tokens > 1 and len(weights) == 1 and first.type in PLAIN.values() and len(first.data) < MIN_ROWS:
        return False
    return all(w.type is first.type and w.shape[1] == first.shape[1] for w in weights) and can_read(first)


def multiply(
    x: torch.Tensor,
    weights: Sequence[QTensor],
    *,
    dtype: torch.dtype,
    norm: Norm | None = None,
    biases: Sequence[torch.Tensor] = (),
    y: torch.Tensor | None = None,
    tile: RowTile | None = None,
) -> torch.Tensor:
    """x W^T of one to three weights side by side, plus biases and y: float32 `[T, N + ...]`.

    x: `[T, K]` of any float, at most `MAX_TOKENS` rows, rounded to `dtype`. norm: of x, for one token only. biases:
    float32 `[N]`, of each weight or of none. y: float32, shaped like the result.
    """
    T, K = x.shape
    x = x.contiguous()
    sizes = [len(w.data) for w in weights]
    out = torch.empty((T, sum(sizes)), dtype=torch.float32, device=x.device)
    if T == 1:
        _multiply_token(x, weights, norm, biases, y, out, dtype, tile)
        return out
    assert norm is None, "a norm rides along with one token only"
    tile = tile or tile_of(SEVERAL, weights[0].type)
    decoder, reader = DECODERS[weights[0].type], READERS[weights[0].type]
    is_plain = reader.decode is not decoder.decode
    constants = (
        _plain_tile if is_plain else _decoded_tile,
        *(reader.decode, reader.n_parts, K, weights[0].data.shape[1], *_three(sizes, 0)),
        *(tile.n_rows, tile.width, _TL[dtype], max(16, power_of_two(T))),
    )
    parts = (*_three([w.data for w in weights], None), *_three(biases, None))
    args = (x, *parts, table_of(decoder, x.device), _like(y), out, T)
    _several_kernel((sum(cdiv(n, tile.n_rows) for n in sizes),), args, constants, tile.tuning)
    return out


def _multiply_token(
    x: torch.Tensor,
    weights: Sequence[QTensor],
    norm: Norm | None,
    biases: Sequence[torch.Tensor],
    y: torch.Tensor | None,
    out: torch.Tensor,
    dtype: torch.dtype,
    tile: RowTile | None,
) -> None:
    type, K = weights[0].type, x.shape[1]
    sizes = [len(w.data) for w in weights]
    tile = tile or token_tile(type, sum(sizes))
    gain, eps = norm or (None, 0.0)
    parts = (*_three([w.data for w in weights], None), *_three(biases, None))
    args = (x, gain, *parts, table_of(DECODERS[type], x.device), _like(y), out, eps)
    sums = (K, weights[0].data.shape[1], *_three(sizes, 0), tile.n_rows, tile.width_for(K), _TL[dtype])
    _token_kernel((sum(cdiv(n, tile.n_rows) for n in sizes),), args, (*READERS[weights[0].type], *sums), tile.tuning)


def _three(items: Sequence[Any], rest: Any) -> tuple[Any, ...]:
    return (*items, *(rest,) * (_N_WEIGHTS - len(items)))


def _like(y: torch.Tensor | None) -> torch.Tensor | None:
    return None if y is None else y.contiguous()
