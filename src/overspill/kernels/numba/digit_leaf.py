"""The compiled inner loops of the integer path: weights as integers times activations as digits (see `products`).

unpack  turns sixteen rows of a type into quads and what scales them, transposed so that a lane is a row.
tile    multiplies them with a few tokens at once; the sums are exact integers.
dot     does both for one token, with no quads stored in between.

The sums of a block become float32, times the steps of both sides, and are added block after block: one order for any
number of tokens or rows. Types for which the CPU lacks the instructions are done by `leaf` in float32.

An unpacked block: of each group its quads, scales and minima as far as there are any; then steps and offsets.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from overspill.gguf.types import TensorType
from overspill.kernels.numba.digits import GROUP_BYTES, HALF_SUMS_AT, STEP_AT, SUM_AT
from overspill.kernels.numba.emit import F32, I8, I16, I64, Emitter, LateVec, Variables, const, const_vec
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.lanes import N_LANES, Layout, PanelLanes, RowLanes
from overspill.kernels.numba.native import c_function
from overspill.kernels.numba.products import Part, integer_products
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.unpack import UNPACKERS

N_UNPACK_ARGS, N_DIGIT_TILE_ARGS, N_DIGIT_DOT_ARGS = 7, 5, 8
# Values of a row that are unpacked at once: with those of sixteen rows, and some tokens, in the first-level cache.
PIECE_ELEMENTS = 512
_VECTOR_BYTES = 64
_N_QUADS = 8  # of four bytes, in a group
# Of activations that share a minimum, by the number of minima.
_SUMS_AT = (), (SUM_AT,), (HALF_SUMS_AT, HALF_SUMS_AT + 4)


def _scale_bytes(n_scales: int) -> int:
    """Bytes of a group's scales and minima."""
    return 2 * _VECTOR_BYTES * n_scales


def _group_bytes(n_scales: int) -> int:
    return _VECTOR_BYTES * _N_QUADS + _scale_bytes(n_scales)


def _block_bytes(n_groups: int, n_scales: int) -> int:
    """Bytes of a block of sixteen rows, unpacked."""
    return n_groups * _group_bytes(n_scales) + 2 * _VECTOR_BYTES


@cache
def unpack_address(type: TensorType, layout: Layout) -> int:
    """C function (rows, row_bytes, n_rows, first_unit, n_units, ahead, out), see `_emit_unpack`."""
    type_id, layout_id, digest = int(type), int(layout), SOURCE_DIGEST

    def unpack(rows, row_bytes, n_rows, first_unit, n_units, ahead, out):
        _unpack(type_id, layout_id, digest, (rows, row_bytes, n_rows, first_unit, n_units, ahead, out))

    return c_function(unpack, N_UNPACK_ARGS)


@cache
def digit_tile_address(n_tokens: int, n_groups: int, n_scales: int, largest: int) -> int:
    """C function (unpacked, n_blocks, x_pointers, x_offset, sums), see `_emit_tile`. n_groups: of a block."""
    digest = SOURCE_DIGEST

    def digit_tile(unpacked, n_blocks, xs, x_offset, sums):
        _tile(n_tokens, n_groups, n_scales, largest, digest, (unpacked, n_blocks, xs, x_offset, sums))

    return c_function(digit_tile, N_DIGIT_TILE_ARGS)


@cache
def digit_dot_address(type: TensorType, layout: Layout) -> int:
    """C function (rows, row_bytes, n_rows, first_unit, n_units, ahead, x, sums), see `_emit_dot`."""
    type_id, layout_id, digest = int(type), int(layout), SOURCE_DIGEST

    def digit_dot(rows, row_bytes, n_rows, first_unit, n_units, ahead, x, sums):
        _dot(type_id, layout_id, digest, (rows, row_bytes, n_rows, first_unit, n_units, ahead, x, sums))

    return c_function(digit_dot, N_DIGIT_DOT_ARGS)


@intrinsic(prefer_literal=True)
def _dot(typing_context, type_id, layout_id, digest, arguments):
    def codegen(context, builder, signature, args):
        type, layout = TensorType(type_id.literal_value), Layout(layout_id.literal_value)
        _emit_dot(Emitter(builder), type, layout, *cgutils.unpack_tuple(builder, args[3]))
        return context.get_dummy_value()

    return types.void(type_id, layout_id, digest, arguments), codegen


@intrinsic(prefer_literal=True)
def _unpack(typing_context, type_id, layout_id, digest, arguments):
    def codegen(context, builder, signature, args):
        type, layout = TensorType(type_id.literal_value), Layout(layout_id.literal_value)
        _emit_unpack(Emitter(builder), type, layout, *cgutils.unpack_tuple(builder, args[3]))
        return context.get_dummy_value()

    return types.void(type_id, layout_id, digest, arguments), codegen


@intrinsic(prefer_literal=True)
def _tile(typing_context, n_tokens, n_groups, n_scales, largest, digest, arguments):
    def codegen(context, builder, signature, args):
        kind = (number.literal_value for number in (n_tokens, n_groups, n_scales, largest))
        _emit_tile(Emitter(builder), *kind, *cgutils.unpack_tuple(builder, args[5]))
        return context.get_dummy_value()

    return types.void(n_tokens, n_groups, n_scales, largest, digest, arguments), codegen


def _emit_unpack(e, type, layout, rows, row_bytes, n_rows, first_unit, n_units, ahead, out):
    """Blocks `first_unit ...` of sixteen rows, `PIECE_ELEMENTS` at most, to `out`."""
    out, unpacker = e.pointer(out), UNPACKERS[type]
    n_groups, n_scales = unpacker.n_groups, unpacker.n_scales
    for i_unit, lanes, ahead_of in _UNITS[layout](e, type, rows, row_bytes, n_rows, first_unit, n_units, ahead):
        target, block = e.at(out, e.offset(i_unit, _block_bytes(n_groups, n_scales))), unpacker.read(lanes)
        for i_group, vecs in enumerate(_of_groups(e, block, n_scales)):
            _store_all(e, vecs, target, i_group * _group_bytes(n_scales) + _VECTOR_BYTES * _N_QUADS)
        _store_all(e, [block.step, block.offset], target, n_groups * _group_bytes(n_scales))
        for i_group, quants in _runs(e, unpacker, block, ahead_of):
            _store_all(e, quants, e.at(target, e.offset(i_group, _group_bytes(n_scales))), 0)


def _of_groups(e, block, n_scales):
    """For each group: scales as `products` takes them, minima as float32."""
    for i in range(0, len(block.scales), max(1, n_scales)):
        scales = [integer_products.scale(e, scale) for scale in block.scales[i : i + n_scales]]
        yield [*scales, *(minimum.to_float() for minimum in block.minima[i : i + n_scales])]


def _store_all(e, vecs, target, first_byte):
    for i, vec in enumerate(vecs):
        e.store(vec, target, first_byte + _VECTOR_BYTES * i, _VECTOR_BYTES)


def _runs(e, unpacker, block, ahead):
    """Yields index and quants of some groups, in a loop for all of them; and asks for what lies ahead."""
    n_runs, n_each = unpacker.n_runs, unpacker.n_groups // unpacker.n_runs
    with cgutils.for_range(e.builder, const(n_runs)) as runs:
        for i, quants in enumerate(block.quants(runs.index)):
            _ask_for(e, ahead, runs.index, n_runs, i, n_each)
            yield e.offset(runs.index, n_each, i), quants


def _emit_dot(e, type, layout, rows, row_bytes, n_rows, first_unit, n_units, ahead, x, sums):
    """The same blocks times the digits of one token at `x`, added to `sums`, `[16]`."""
    x, sums, unpacker = e.pointer(x), e.pointer(sums), UNPACKERS[type]
    e.align_stack()
    n_groups, n_scales = unpacker.n_groups, unpacker.n_scales
    kept = Variables(e, _nothing(e, n_scales))
    n_bytes = _scale_bytes(n_scales)
    table = e.scratch(n_groups * n_bytes // 4)
    for i_unit, lanes, ahead_of in _UNITS[layout](e, type, rows, row_bytes, n_rows, first_unit, n_units, ahead):
        digits, block = e.at(x, e.offset(i_unit, GROUP_BYTES * n_groups)), unpacker.read(lanes)
        for i_group, vecs in enumerate(_of_groups(e, block, n_scales)):
            _store_all(e, vecs, table, i_group * n_bytes)
        kept.save(_nothing(e, n_scales))
        for i_group, quants in _runs(e, unpacker, block, ahead_of):
            scales, minima = _stored_scales(e, e.at(table, e.offset(i_group, n_bytes)), n_scales)
            x_group = [e.at(digits, e.offset(i_group, GROUP_BYTES))]
            (amounts,) = _add_group(e, [kept.load()], quants, scales, minima, x_group, unpacker.largest)
            kept.save(amounts)
        total = e.floats(sums, 0, _VECTOR_BYTES, N_LANES)
        total = _add_block(e, total, kept.load(), n_scales, block.step, block.offset, digits)
        e.store(total, sums, 0, _VECTOR_BYTES)


def _units_of_rows(e, type, rows, row_bytes, n_rows, first_unit, n_units, ahead):
    """Yields, once, the index of a unit, sixteen rows there and what to ask for: what is emitted then is done for each.

    Of fewer rows the last one is repeated. The CPU's own prefetcher follows long streams, not sixteen short ones. So,
    while these rows are read, as many bytes at `ahead` are asked for: what will be read soon.
    """
    b, n_bytes = e.builder, type.block.n_bytes
    rows = b.add(rows, b.mul(first_unit, const(n_bytes)))
    rows, row_bytes = _sixteen_rows(e, rows, row_bytes, n_rows, b.mul(n_units, const(n_bytes)))
    ahead = e.pointer(ahead)
    with cgutils.for_range(b, n_units) as units:
        offset = e.offset(units.index, n_bytes)
        fours = [e.at(e.pointer(rows), b.add(offset, b.mul(row_bytes, const(i)))) for i in range(0, N_LANES, 4)]
        lanes = RowLanes(e, [e.at(four, b.mul(row_bytes, const(i))) for four in fours for i in range(4)])
        yield units.index, lanes, _Ahead(ahead, units.index, n_bytes * N_LANES)


def _units_of_panels(e, type, panel, row_bytes, n_rows, first_unit, n_units, ahead):
    """The same where the sixteen rows are a panel."""
    n_bytes = type.block.n_bytes * N_LANES
    start, ahead = e.at(e.pointer(panel), e.offset(first_unit, n_bytes)), e.pointer(ahead)
    with cgutils.for_range(e.builder, n_units) as units:
        lanes = PanelLanes(e, e.at(start, e.offset(units.index, n_bytes)), type)
        yield units.index, lanes, _Ahead(ahead, units.index, n_bytes)


class _Ahead(NamedTuple):
    """The bytes to ask for during a unit: the `i_unit`th `n_bytes` at `pointer`."""

    pointer: Any
    i_unit: Any
    n_bytes: int


def _ask_for(e, ahead, i_run, n_runs, i_group, n_groups):
    """A group's share: more lines at once than the CPU can wait for would hold up what is read meanwhile.

    They go to the second-level cache, as sixteen long rows would not last in the first.
    """
    lines = range(0, -(-ahead.n_bytes // n_runs), _VECTOR_BYTES)
    start = e.at(
        ahead.pointer, e.builder.add(e.offset(ahead.i_unit, ahead.n_bytes), e.offset(i_run, len(lines) * _VECTOR_BYTES))
    )
    for line in lines[len(lines) * i_group // n_groups : len(lines) * (i_group + 1) // n_groups]:
        e.prefetch(start, line, cache=2)


_UNITS = {Layout.ROWS: _units_of_rows, Layout.PANELS: _units_of_panels}


def _sixteen_rows(e, rows, row_bytes, n_rows, n_bytes):
    """Address and stride of sixteen rows: the rows themselves, or copies of `n_bytes` of each, the last repeated."""
    b = e.builder
    start = cgutils.alloca_once_value(b, rows)
    stride = cgutils.alloca_once_value(b, row_bytes)
    with b.if_then(b.icmp_signed("<", n_rows, const(N_LANES)), likely=False):
        copies = cgutils.alloca_once(b, I64, PIECE_ELEMENTS * 2 * N_LANES // 8)
        last = b.sub(n_rows, const(1))
        with cgutils.for_range(b, const(N_LANES)) as lane:
            i_row = b.select(b.icmp_signed("<", lane.index, last), lane.index, last)
            copy = e.at(b.bitcast(copies, I8.as_pointer()), b.mul(lane.index, n_bytes))
            cgutils.raw_memcpy(b, copy, e.at(e.pointer(rows), b.mul(i_row, row_bytes)), n_bytes, const(1))
        b.store(b.ptrtoint(copies, I64), start)
        b.store(n_bytes, stride)
    return b.load(start), b.load(stride)


def _nothing(e, n_scales):
    """Of a block so far, for one token: totals, then what minima and sums of activations give, if there are minima."""
    minima = [e.vec(const_vec(F32, [0.0] * N_LANES))] if n_scales else []
    return [*integer_products.nothing(e, n_scales > 0), *minima]


def _emit_tile(e, n_tokens, n_groups, n_scales, largest, unpacked, n_blocks, xs, x_offset, sums):
    """Add the products of sixteen unpacked rows and some blocks of `n_tokens` tokens to `sums`, `[n_tokens, 16]`.

    Groups are a loop: the code of eight would not stay decoded in the CPU.
    """
    b = e.builder
    e.align_stack()
    unpacked, sums = e.pointer(unpacked), e.pointer(sums)
    tokens = [e.at(e.pointer(e.load(e.pointer(xs), 8 * i, I64)), x_offset) for i in range(n_tokens)]
    kept = [Variables(e, _nothing(e, n_scales)) for _ in tokens]
    with cgutils.for_range(b, n_blocks) as blocks:
        start = e.at(unpacked, e.offset(blocks.index, _block_bytes(n_groups, n_scales)))
        digits = [e.at(token, e.offset(blocks.index, GROUP_BYTES * n_groups)) for token in tokens]
        for variables in kept:
            variables.save(_nothing(e, n_scales))
        with cgutils.for_range(b, const(n_groups)) as groups:
            quads, scales, minima = _stored_group(
                e, e.at(start, e.offset(groups.index, _group_bytes(n_scales))), n_scales
            )
            x_groups = [e.at(x, e.offset(groups.index, GROUP_BYTES)) for x in digits]
            amounts = _add_group(e, [variables.load() for variables in kept], quads, scales, minima, x_groups, largest)
            for variables, amount in zip(kept, amounts, strict=True):
                variables.save(amount)
        ends = n_groups * _group_bytes(n_scales)
        step, offset = (e.floats(start, ends + at, _VECTOR_BYTES, N_LANES) for at in (0, _VECTOR_BYTES))
        for i, (variables, x) in enumerate(zip(kept, digits, strict=True)):
            total = e.floats(sums, _VECTOR_BYTES * i, _VECTOR_BYTES, N_LANES)
            total = _add_block(e, total, variables.load(), n_scales, step, offset, x)
            e.store(total, sums, _VECTOR_BYTES * i, _VECTOR_BYTES)


def _stored_group(e, pointer, n_scales):
    """Quads, scales, minima."""
    type = ir.VectorType(I16, 2 * N_LANES)
    quads = [_late(e, pointer, _VECTOR_BYTES * i, type) for i in range(_N_QUADS)]
    return quads, *_stored_scales(e, e.at(pointer, _VECTOR_BYTES * _N_QUADS), n_scales)


def _stored_scales(e, pointer, n_scales):
    scales = [_late(e, pointer, _VECTOR_BYTES * i, integer_products.SCALE) for i in range(n_scales)]
    floats = ir.VectorType(F32, N_LANES)
    return scales, [_late(e, pointer, _VECTOR_BYTES * i, floats) for i in range(n_scales, 2 * n_scales)]


def _late(e, pointer, offset, type):
    return LateVec(e.builder, lambda: e.load(pointer, offset, type))


def _add_group(e, amounts, quads, scales, minima, digits, largest):
    """Amounts of some tokens, and those of a group. Scales are as `products` takes them."""
    n_totals, n_parts = len(amounts[0]) - bool(minima), max(1, len(scales))
    totals, n_quads = [amount[:n_totals] for amount in amounts], _N_QUADS // n_parts
    for i in range(n_parts):
        part = Part(quads[n_quads * i :][:n_quads], scales[i] if scales else None, largest)
        totals = integer_products.add(e, totals, part, [e.at(x, 4 * n_quads * i) for x in digits])
    rests = [amount[n_totals:] for amount in amounts]
    for minimum, at in zip(minima, _SUMS_AT[len(minima)], strict=True):
        rests = [[e.fma(minimum, e.splat_float(x, at, N_LANES), sum)] for (sum,), x in zip(rests, digits, strict=True)]
    return [[*total, *rest] for total, rest in zip(totals, rests, strict=True)]


def _add_block(e, total, amounts, n_scales, step, offset, digits):
    """Total of a token, and what a block amounts to."""
    totals, minima = (amounts[:-1], amounts[-1]) if n_scales else (amounts, e.splat_float(digits, SUM_AT, N_LANES))
    product = integer_products.whole(e, totals) * e.splat_float(digits, STEP_AT, N_LANES)
    return e.fma(product, step, e.fma(minima, offset, total))
