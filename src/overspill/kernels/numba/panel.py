"""Rows of a weight times rows of activations, and what becomes of the products: the loop around the inner loops.

`multiply` does a run of rows for a list of tokens on one thread. Weights of types that take digits meet activations as
digits (`digit_leaf`). For the others few tokens go through `dot`, which decodes every
block in registers; for more, tiles of rows are decoded once per block of tokens. Both give the same bits, so the
choice is one of speed only. Everything is addressed by int64 numbers; nothing here knows a tensor type.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from overspill.gguf.types import TensorType
from overspill.kernels.numba.decode import DECODERS
from overspill.kernels.numba.digit_leaf import (
    N_DIGIT_DOT_ARGS,
    N_DIGIT_TILE_ARGS,
    N_UNPACK_ARGS,
    PIECE_ELEMENTS,
    digit_dot_address,
    digit_tile_address,
    unpack_address,
)
from overspill.kernels.numba.digits import GROUP_BYTES, GROUP_ELEMENTS
from overspill.kernels.numba.finish import add_products, gate_silu, gate_swiglu_oai, store_products
from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.lanes import N_LANES, Layout
from overspill.kernels.numba.leaf import (
    N_DECODE_ARGS,
    N_DOT_ARGS,
    N_TILE_ARGS,
    decode_address,
    dot_address,
    tile_address,
)
from overspill.kernels.numba.memory import load_f32, load_i64, reader, store_f32, store_i64
from overspill.kernels.numba.native import c_function, caller
from overspill.kernels.numba.target import (
    DIGIT_BLOCK_TOKENS,
    DIGIT_TOKENS,
    DOT_ROWS,
    DOT_TOKENS,
    HAS_BYTE_PRODUCTS,
    HAS_PAIR_PRODUCTS,
    LANES,
    MAX_DOT_TOKENS,
    SOURCE_DIGEST,
    TILE_ROWS,
    TILE_TOKENS,
    UNIT_ELEMENTS,
)
from overspill.kernels.numba.unpack import UNPACKERS
from overspill.quant.panels import Panels
from overspill.quant.qtensor import QTensor

# What to do with a product v: `out = v`, `out += weight * v`, or an activation of `out` (the gate) and v (up).
STORE, ADD, SILU, SWIGLU_OAI = 0, 1, 2, 3

# A piece of a decoded tile must fit in the first-level cache next to the activations it meets.
_PIECE_ELEMENTS = 2048
# How far ahead of its use a weight is asked for: enough for the memory's latency, little in the first-level cache.
AHEAD_BYTES = 8192
# The same for the sixteen rows that are unpacked together: they are asked for while the last but one are read (with 1
# two threads read 4 % less).
_PANELS_AHEAD = 2
# Tokens that share one decoded tile; their sums wait in the scratch between two pieces.
BLOCK_TOKENS = 96

_SUMS = (_PIECE_ELEMENTS + UNIT_ELEMENTS) * TILE_ROWS * 4  # a tail follows the last piece
_POINTERS = _SUMS + BLOCK_TOKENS * TILE_ROWS * LANES * 4
_PRODUCTS = _POINTERS + 64
_EDGE = _PRODUCTS + 8 * TILE_ROWS * 4
# Bytes of scratch that each thread needs, a multiple of 64; the scratch must be aligned to 64.
SCRATCH_BYTES = (_EDGE + TILE_ROWS * 4 + 63) // 64 * 64


class Rows(NamedTuple):
    """One stored matrix (of a stack, the first) and the inner loops of its type. Addresses and sizes in bytes.

    n_units: whole decoder units in a row, of `unit_elements` values; `tail_bytes` of plain floats may follow.
    dot1 to dot8, decode, tile1 to tile3: addresses of C functions, see `leaf`. unpack, digit_tile1 to
    digit_tile8, digit_dot: see `digit_leaf`; Those of the way that is not taken are 0.
    """

    address: int
    row_bytes: int
    n_units: int
    unit_elements: int
    tail_bytes: int
    dot1: int
    dot2: int
    dot4: int
    dot8: int
    decode: int
    tile1: int
    tile2: int
    tile3: int
    unpack: int
    digit_tile1: int
    digit_tile2: int
    digit_tile4: int
    digit_tile8: int
    digit_dot: int


class Part(NamedTuple):
    """The rows of a matrix to multiply: their address, the first, how many; their end, and what is read after it.

    scale: address of a float that multiplies the products. biases: of floats, one for each row of the matrix, that
    are added then. Either may be 0.
    """

    address: int
    first_row: int
    n_rows: int
    end: int
    next_read: int
    scale: int
    biases: int


class Tokens(NamedTuple):
    """Addresses of arrays with one entry per token: input rows, output rows (int64), weights (float32).

    Input rows are float32, or digits for a matrix that `takes_digits`. The weights are limits where the products are
    gated by SILU.
    """

    n: int
    inputs: int
    outputs: int
    weights: int


N_MULTIPLY_ARGS = 13
_read_rows = reader(Rows)
_call_dot = caller(N_DOT_ARGS)
_call_decode = caller(N_DECODE_ARGS)
_call_tile = caller(N_TILE_ARGS)
_call_unpack = caller(N_UNPACK_ARGS)
_call_digit_tile = caller(N_DIGIT_TILE_ARGS)
_call_digit_dot = caller(N_DIGIT_DOT_ARGS)


def describe(weight: QTensor) -> Rows:
    """The description of a matrix or a stack of them; compiles the inner loops of its type at first use."""
    layout = Layout.PANELS if isinstance(weight, Panels) else Layout.ROWS
    return Rows(weight.data.data_ptr(), *_describe_row(weight.type, layout, weight.shape[-1]))


def takes_digits(type: TensorType) -> bool:
    """Whether products with weights of this type want their inputs as digits."""
    return type in UNPACKERS and (HAS_BYTE_PRODUCTS or (HAS_PAIR_PRODUCTS and type != TensorType.Q8_0))


@cache
def _describe_row(type: TensorType, layout: Layout, n_elements: int) -> tuple[int, ...]:
    decoder = DECODERS[type]
    n_units, n_left = divmod(n_elements, decoder.n_elements)
    tail_bytes = n_left * decoder.n_bytes // decoder.n_elements
    row = (type.row_bytes(n_elements), n_units, decoder.n_elements, tail_bytes)
    if takes_digits(type):
        unpacker, none = UNPACKERS[type], (0,) * (len(DOT_TOKENS) + 1 + TILE_TOKENS)
        tiles = (digit_tile_address(n, unpacker.n_groups, unpacker.n_scales, unpacker.largest) for n in DIGIT_TOKENS)
        return (*row, *none, unpack_address(type, layout), *tiles, digit_dot_address(type, layout))
    assert layout == Layout.ROWS, "only products of integers read panels"
    dots = (dot_address(type, n) for n in DOT_TOKENS)
    tiles = (tile_address(n) for n in range(1, TILE_TOKENS + 1))
    return (*row, *dots, decode_address(type), *tiles, *(0,) * (2 + len(DIGIT_TOKENS)))


@cache
def multiply_address() -> int:
    """C function: (rows, offset, first_row, n_rows, next_read, scale, biases), (n_tokens, inputs, outputs, weights),
    then, scratch.

    Multiplies `n_rows` rows of the matrix `offset` bytes after the one described at `rows` with every token; product
    (t, r), scaled and with its bias, see `Part`, goes to float r of `outputs[t]`, as `then` says. next_read: address
    of what this thread will read next, or 0. scratch: SCRATCH_BYTES of the thread, aligned to 64.
    """
    digest = SOURCE_DIGEST

    def multiply(
        rows, offset, first_row, n_rows, next_read, scale, biases, n_tokens, inputs, outputs, weights, then, scratch
    ):
        _ = digest
        matrix = _read_rows(rows)
        start = matrix.address + offset + first_row * matrix.row_bytes
        part = Part(start, first_row, n_rows, start + n_rows * matrix.row_bytes, next_read, scale, biases)
        block = DIGIT_BLOCK_TOKENS if matrix.unpack != 0 else BLOCK_TOKENS
        for first in range(0, n_tokens, block):
            n = min(block, n_tokens - first)
            tokens = Tokens(n, inputs + 8 * first, outputs + 8 * first, weights + 4 * first)
            if matrix.unpack != 0:
                _by_digits(matrix, part, tokens, then, scratch)
            elif n <= MAX_DOT_TOKENS and matrix.tail_bytes == 0:
                _by_dots(matrix, part, tokens, then, scratch)
            else:
                _by_tiles(matrix, part, tokens, then, scratch)

    return c_function(multiply, N_MULTIPLY_ARGS)


@inner
def _by_dots(matrix, part, tokens, then, scratch):
    """Rows outside, tokens inside: the few rows of a step stay in the first-level cache."""
    for row in range(0, part.n_rows, TILE_ROWS):
        first = 0
        while first < tokens.n:
            n_left = tokens.n - first
            kind = 3 if n_left >= 7 else 2 if n_left >= 3 else n_left - 1
            _dot_rows(matrix, part, row, tokens, first, kind, then, scratch)
            first += DOT_TOKENS[kind]


@inner
def _dot_rows(matrix, part, first_row, tokens, first, kind, then, scratch):
    """TILE_ROWS rows, or what is left, with DOT_TOKENS[kind] tokens; the last is repeated, to no effect, if need be."""
    pointers, products = scratch + _POINTERS, scratch + _PRODUCTS
    n_rows = min(TILE_ROWS, part.n_rows - first_row)
    n_tokens, rows_per_call = DOT_TOKENS[kind], DOT_ROWS[kind]
    dot = (matrix.dot1, matrix.dot2, matrix.dot4, matrix.dot8)[kind]
    for i in range(n_tokens):
        store_i64(pointers, i, load_i64(tokens.inputs, min(first + i, tokens.n - 1)))
    for row in range(0, n_rows, rows_per_call):
        n, at = min(rows_per_call, n_rows - row), part.address + (first_row + row) * matrix.row_bytes
        ahead = at + AHEAD_BYTES
        if ahead >= part.end:
            ahead = part.next_read + (ahead - part.end) if part.next_read != 0 else at
        _call_dot(dot, (at, matrix.row_bytes, n, matrix.n_units, ahead, pointers, products + 4 * row))
    for i in range(min(n_tokens, tokens.n - first)):
        _finish(part, first_row, n_rows, tokens, first + i, products + i * TILE_ROWS * 4, then, scratch)


@inner
def _by_digits(matrix, part, tokens, then, scratch):
    """Sixteen rows are unpacked piece by piece; the sums of all tokens wait in the scratch.

    For one token nothing is unpacked, so whole rows are a piece; fewer than sixteen are copied, piece by piece.
    """
    sums = scratch + _SUMS
    for row in range(0, part.n_rows, N_LANES):
        n, at = min(N_LANES, part.n_rows - row), part.address + row * matrix.row_bytes
        for i in range(tokens.n * N_LANES):
            store_f32(sums, i, np.float32(0))
        is_whole = tokens.n == 1 and n == N_LANES
        units_per_piece = matrix.n_units if is_whole else PIECE_ELEMENTS // matrix.unit_elements
        for first_unit in range(0, matrix.n_units, units_per_piece):
            n_units = min(units_per_piece, matrix.n_units - first_unit)
            ahead = at + N_LANES * (_PANELS_AHEAD * matrix.row_bytes + first_unit * matrix.row_bytes // matrix.n_units)
            if ahead >= part.end:
                ahead = part.next_read + (ahead - part.end) if part.next_read != 0 else at
            piece = (at, matrix.row_bytes, n, first_unit, n_units, ahead)
            first_group = first_unit * matrix.unit_elements // GROUP_ELEMENTS
            if tokens.n == 1:
                x = load_i64(tokens.inputs, 0) + first_group * GROUP_BYTES
                _call_digit_dot(matrix.digit_dot, (*piece, x, sums))
                continue
            _call_unpack(matrix.unpack, (*piece, scratch))
            _multiply_digits(matrix, first_group, n_units, tokens, scratch)
        for i in range(tokens.n):
            _finish(part, row, n, tokens, i, sums + 4 * N_LANES * i, then, scratch)


@inner
def _multiply_digits(matrix, first_group, n_units, tokens, scratch):
    """Add the products of an unpacked piece to the sums of all tokens."""
    pointers, first = scratch + _POINTERS, 0
    while first < tokens.n:
        n_left = tokens.n - first
        kind = 3 if n_left >= 8 else 2 if n_left >= 4 else 1 if n_left >= 2 else 0
        n_tokens = DIGIT_TOKENS[kind]
        for i in range(n_tokens):
            store_i64(pointers, i, load_i64(tokens.inputs, first + i))
        tile = (matrix.digit_tile1, matrix.digit_tile2, matrix.digit_tile4, matrix.digit_tile8)[kind]
        sums = scratch + _SUMS + 4 * N_LANES * first
        _call_digit_tile(tile, (scratch, n_units, pointers, first_group * GROUP_BYTES, sums))
        first += n_tokens


@inner
def _by_tiles(matrix, part, tokens, then, scratch):
    units_per_piece = _PIECE_ELEMENTS // matrix.unit_elements
    n_pieces = max((matrix.n_units + units_per_piece - 1) // units_per_piece, 1)
    for row in range(0, part.n_rows, TILE_ROWS):
        n = min(TILE_ROWS, part.n_rows - row)
        at = part.address + row * matrix.row_bytes
        for piece in range(n_pieces):
            first_unit = piece * units_per_piece
            n_units = min(units_per_piece, matrix.n_units - first_unit)
            is_last = piece == n_pieces - 1
            tail_bytes = matrix.tail_bytes if is_last else 0
            _call_decode(matrix.decode, (at, matrix.row_bytes, n, first_unit, n_units, tail_bytes, scratch))
            n_elements = n_units * matrix.unit_elements + (UNIT_ELEMENTS if tail_bytes else 0)
            span = (first_unit * matrix.unit_elements, n_elements, np.int64(piece == 0), np.int64(is_last))
            _multiply_piece(matrix, span, part, row, n, tokens, then, scratch)


@inner
def _multiply_piece(matrix, span, part, first_row, n_rows, tokens, then, scratch):
    """A decoded piece times all tokens of a block; span: first element, number of them, is first, is last."""
    first_element, n_elements, is_first, is_last = span
    pointers, products = scratch + _POINTERS, scratch + _PRODUCTS
    for first in range(0, tokens.n, TILE_TOKENS):
        n = min(TILE_TOKENS, tokens.n - first)
        for i in range(n):
            store_i64(pointers, i, load_i64(tokens.inputs, first + i) + 4 * first_element)
        tile = (matrix.tile1, matrix.tile2, matrix.tile3)[n - 1]
        sums = scratch + _SUMS + first * TILE_ROWS * LANES * 4
        _call_tile(tile, (scratch, n_elements // LANES, pointers, sums, products, is_first, is_last))
        if is_last:
            for i in range(n):
                _finish(part, first_row, n_rows, tokens, first + i, products + i * TILE_ROWS * 4, then, scratch)


@inner
def _finish(part, first_row, n_rows, tokens, i_token, products, then, scratch):
    """Finish one token's products, TILE_ROWS at a time; fewer of them take a way round through the scratch."""
    row = part.first_row + first_row
    if part.scale != 0:
        for i in range(n_rows):
            store_f32(products, i, load_f32(products, i) * load_f32(part.scale, 0))
    if part.biases != 0:
        for i in range(n_rows):
            store_f32(products, i, load_f32(products, i) + load_f32(part.biases, row + i))
    out = load_i64(tokens.outputs, i_token) + 4 * row
    n_whole = n_rows // TILE_ROWS * TILE_ROWS
    for i in range(0, n_whole, TILE_ROWS):
        _finish_row(out + 4 * i, products + 4 * i, tokens, i_token, then)
    if n_whole == n_rows:
        return
    edge = scratch + _EDGE
    for i in range(n_whole, n_rows):
        store_f32(edge, i - n_whole, load_f32(out, i))
    _finish_row(edge, products + 4 * n_whole, tokens, i_token, then)
    for i in range(n_whole, n_rows):
        store_f32(out, i, load_f32(edge, i - n_whole))


@inner
def _finish_row(out, products, tokens, i_token, then):
    if then == STORE:
        store_products(out, products)
    elif then == ADD:
        add_products(out, products, load_f32(tokens.weights, i_token))
    elif then == SILU:
        gate_silu(out, products, load_f32(tokens.weights, i_token))
    else:
        gate_swiglu_oai(out, products)
