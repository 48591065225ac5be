"""The compiled inner loops, one set per tensor type, reached through their addresses.

dot     decodes rows block by block and multiplies with a few tokens at once; nothing is stored in between.
decode  decodes some rows into a scratch that fits in the first-level cache, interleaved for `tile`.
tile    multiplies decoded rows with three tokens at once, in registers. It knows no tensor types.

Every sum over k is made in one order: lane l adds the products k = l, l + LANES, ... one after the other, then the
lanes are added pairwise, halves first. So dot and tile give equal bits, whatever the number of tokens or rows.
Compiled as C functions at first use and cached on disk; all addresses are plain int64 numbers.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from overspill.gguf.types import TensorType
from overspill.kernels.numba.decode import DECODERS
from overspill.kernels.numba.decoder import SCRATCH_FLOATS
from overspill.kernels.numba.emit import F32, I64, Emitter, Variables, Vec, const
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.native import c_function
from overspill.kernels.numba.target import DOT_ROWS, DOT_TOKENS, LANES, SOURCE_DIGEST, TILE_ROWS, UNIT_ELEMENTS

N_DOT_ARGS, N_DECODE_ARGS, N_TILE_ARGS = 7, 7, 7


@cache
def dot_address(type: TensorType, n_tokens: int) -> int:
    """C function (rows, row_bytes, n_rows, n_units, ahead, x_pointers, products), see `_emit_dot`."""
    type_id, digest = int(type), SOURCE_DIGEST

    def dot(rows, row_bytes, n_rows, n_units, ahead, xs, products):
        _dot(type_id, n_tokens, digest, (rows, row_bytes, n_rows, n_units, ahead, xs, products))

    return c_function(dot, N_DOT_ARGS)


@cache
def decode_address(type: TensorType) -> int:
    """C function (rows, row_bytes, n_rows, first_unit, n_units, tail_bytes, out), see `_emit_decode`."""
    type_id, digest = int(type), SOURCE_DIGEST

    def decode(rows, row_bytes, n_rows, first_unit, n_units, tail_bytes, out):
        _decode(type_id, digest, (rows, row_bytes, n_rows, first_unit, n_units, tail_bytes, out))

    return c_function(decode, N_DECODE_ARGS)


@cache
def tile_address(n_tokens: int) -> int:
    """C function (decoded, n_steps, x_pointers, sums, products, is_first, is_last), see `_emit_tile`."""
    digest = SOURCE_DIGEST

    def tile(decoded, n_steps, xs, sums, products, is_first, is_last):
        _tile(n_tokens, digest, (decoded, n_steps, xs, sums, products, is_first, is_last))

    return c_function(tile, N_TILE_ARGS)


@intrinsic(prefer_literal=True)
def _dot(typing_context, type_id, n_tokens, digest, arguments):
    def codegen(context, builder, signature, args):
        decoder = DECODERS[TensorType(type_id.literal_value)]
        _emit_dot(Emitter(builder), decoder, n_tokens.literal_value, *cgutils.unpack_tuple(builder, args[3]))
        return context.get_dummy_value()

    return types.void(type_id, n_tokens, digest, arguments), codegen


@intrinsic(prefer_literal=True)
def _decode(typing_context, type_id, digest, arguments):
    def codegen(context, builder, signature, args):
        decoder = DECODERS[TensorType(type_id.literal_value)]
        _emit_decode(Emitter(builder), decoder, *cgutils.unpack_tuple(builder, args[2]))
        return context.get_dummy_value()

    return types.void(type_id, digest, arguments), codegen


@intrinsic(prefer_literal=True)
def _tile(typing_context, n_tokens, digest, arguments):
    def codegen(context, builder, signature, args):
        _emit_tile(Emitter(builder), n_tokens.literal_value, *cgutils.unpack_tuple(builder, args[2]))
        return context.get_dummy_value()

    return types.void(n_tokens, digest, arguments), codegen


def _emit_dot(e, decoder, n_tokens, rows, row_bytes, n_rows, n_units, ahead, xs, products):
    """A few rows (DOT_ROWS) times `n_tokens` tokens; past `n_rows` the last one is repeated, to no effect.

    The CPU's own prefetcher follows long streams, not several short ones. So, while these rows are read, as many
    bytes at `ahead` are asked for: what will be read soon.
    """
    b = e.builder
    n_dot_rows = DOT_ROWS[DOT_TOKENS.index(n_tokens)]
    starts = _row_pointers(e, rows, row_bytes, n_rows, n_dot_rows)
    tokens = _token_pointers(e, xs, n_tokens)
    scratches = [e.scratch(SCRATCH_FLOATS) for _ in starts]
    sums = Variables(e, [e.zeros()] * (n_tokens * n_dot_rows))
    ahead = e.pointer(ahead)
    with cgutils.for_range(b, n_units) as units:
        for line in range(0, decoder.n_bytes * n_dot_rows, 64):
            e.prefetch(ahead, e.offset(units.index, decoder.n_bytes * n_dot_rows, line))
        blocks = [e.at(start, e.offset(units.index, decoder.n_bytes)) for start in starts]
        for block, scratch in zip(blocks, scratches, strict=True):
            if decoder.prepare:
                decoder.prepare(e, block, scratch)
        with cgutils.for_range(b, const(decoder.n_runs)) as runs:
            x_offset = b.mul(_element(e, decoder, units.index, runs.index), const(4))
            rows_of_steps = zip(
                *(decoder.run(e, block, runs.index, s) for block, s in zip(blocks, scratches, strict=True)),
                strict=True,
            )
            values = sums.load()
            for i_step, weights in enumerate(rows_of_steps):
                at = b.add(x_offset, const(4 * LANES * i_step))
                for i_token, token in enumerate(tokens):
                    x = e.floats(token, at)
                    for i_row, weight in enumerate(weights):
                        i = i_token * n_dot_rows + i_row
                        values[i] = e.fma(weight, x, values[i])
            sums.save(values)
    _store_products(e, sums.load(), n_dot_rows, products)


def _emit_decode(e, decoder, rows, row_bytes, n_rows, first_unit, n_units, tail_bytes, out):
    """Units `first_unit ...` of some rows as float32, step by step: `out[i_step, i_row, lane]`.

    A row of plain floats may end in a part of a unit, `tail_bytes` long: it is padded with zeros.
    """
    b = e.builder
    out = e.pointer(out)
    scratch = e.scratch(SCRATCH_FLOATS)
    with cgutils.for_range(b, n_rows) as row:
        start = e.at(e.pointer(rows), b.mul(row.index, row_bytes))
        first = e.at(start, b.mul(first_unit, const(decoder.n_bytes)))
        lane_offset = b.mul(row.index, const(4 * LANES))
        with cgutils.for_range(b, n_units) as units:
            block = e.at(first, b.mul(units.index, const(decoder.n_bytes)))
            _emit_decode_unit(e, decoder, block, units.index, e.at(out, lane_offset), scratch)
        if decoder.is_plain:
            with b.if_then(b.icmp_signed(">", tail_bytes, const(0))):
                padded = e.scratch(UNIT_ELEMENTS)
                cgutils.memset(b, padded, const(4 * UNIT_ELEMENTS), 0)
                tail = e.at(first, b.mul(n_units, const(decoder.n_bytes)))
                cgutils.raw_memcpy(b, padded, tail, tail_bytes, const(1))
                _emit_decode_unit(e, decoder, padded, n_units, e.at(out, lane_offset), scratch)


def _emit_decode_unit(e, decoder, block, i_unit, out, scratch):
    b = e.builder
    if decoder.prepare:
        decoder.prepare(e, block, scratch)
    with cgutils.for_range(b, const(decoder.n_runs)) as runs:
        offset = b.mul(_element(e, decoder, i_unit, runs.index), const(4 * TILE_ROWS))
        for i_step, weights in enumerate(decoder.run(e, block, runs.index, scratch)):
            e.store(weights, out, b.add(offset, const(4 * LANES * TILE_ROWS * i_step)), 4 * LANES)


def _emit_tile(e, n_tokens, decoded, n_steps, xs, sums, products, is_first, is_last):
    """TILE_ROWS decoded rows times `n_tokens` tokens over `n_steps` vectors.

    Unless `is_first`, the sums go on from those stored at `sums`; unless `is_last` they are stored there again
    instead of being reduced to `products`, `[n_tokens, TILE_ROWS]`.
    """
    b = e.builder
    decoded, sums = e.pointer(decoded), e.pointer(sums)
    tokens = _token_pointers(e, xs, n_tokens)
    n_sums = n_tokens * TILE_ROWS
    totals = Variables(e, [e.zeros()] * n_sums)
    with b.if_then(b.icmp_signed("==", is_first, const(0))):
        totals.save([e.floats(sums, 4 * LANES * i, 4 * LANES) for i in range(n_sums)])
    with cgutils.for_range(b, n_steps) as steps:
        values = totals.load()
        x = [e.floats(token, b.mul(steps.index, const(4 * LANES))) for token in tokens]
        start = b.mul(steps.index, const(4 * LANES * TILE_ROWS))
        for i_row in range(TILE_ROWS):
            weight = e.floats(decoded, b.add(start, const(4 * LANES * i_row)), 4 * LANES)
            for i_token in range(n_tokens):
                i = i_token * TILE_ROWS + i_row
                values[i] = e.fma(weight, x[i_token], values[i])
        totals.save(values)
    with b.if_else(b.icmp_signed("!=", is_last, const(0))) as (last, not_last):
        with last:
            _store_products(e, totals.load(), TILE_ROWS, products)
        with not_last:
            for i, value in enumerate(totals.load()):
                e.store(value, sums, 4 * LANES * i, 4 * LANES)


def _element(e, decoder, i_unit, i_run):
    return e.builder.add(e.offset(i_unit, decoder.n_elements), e.offset(i_run, decoder.run_elements))


def _row_pointers(e, rows, row_bytes, n_rows, n_pointers):
    b = e.builder
    last = b.sub(n_rows, const(1))
    pointers = []
    for i in range(n_pointers):
        i_row = b.select(b.icmp_signed("<", const(i), last), const(i), last)
        pointers.append(e.at(e.pointer(rows), b.mul(i_row, row_bytes)))
    return pointers


def _token_pointers(e, xs, n_tokens):
    return [e.pointer(e.load(e.pointer(xs), 8 * i, I64)) for i in range(n_tokens)]


def _store_products(e, sums, n_rows, products):
    """Add up the lanes of `[n_tokens, n_rows]` sums and store them as `products[n_tokens, TILE_ROWS]`."""
    products = e.pointer(products)
    for i, vector in enumerate(_add_lanes(e, sums)):
        for lane in range(min(LANES, len(sums) - i * LANES)):
            i_token, i_row = divmod(i * LANES + lane, n_rows)
            value = e.builder.extract_element(vector.value, const(lane, ir.IntType(32)))
            store = e.builder.store(value, e.at(products, 4 * (i_token * TILE_ROWS + i_row), F32))
            store.align = 4


def _add_lanes(e: Emitter, sums: list[Vec]) -> list[Vec]:
    """Horizontal sums of many vectors: result vector i holds those of sums `i * LANES ...` in its lanes.

    At each level two vectors merge into one that holds twice as many partial sums of half the width; the order of
    additions within one sum is the same for every position.
    """
    width = LANES
    while width > 1:
        half = width // 2
        low = [v * width + lane for v in range(LANES // width) for lane in range(half)]
        low += [LANES + lane for lane in low]
        high = [lane + half for lane in low]
        pairs = [(sums[i], sums[min(i + 1, len(sums) - 1)]) for i in range(0, len(sums), 2)]
        sums = [e.shuffle(a, b, low) + e.shuffle(a, b, high) for a, b in pairs]
        width = half
    return sums
