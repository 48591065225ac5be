"""The compiled inner loops of the integer path: weights as integers times activations as digits (see `products`).

unpack  turns sixteen rows of a type into quads, steps and offsets, transposed so that a lane is a row.
tile    multiplies them with a few tokens at once; the sums are exact integers.
dot     does both for one token, with nothing stored in between.

The sums of a group become float32, times the steps of both sides, and are added group after group: one order for any
number of tokens or rows. Types for which the CPU lacks the instructions are done by `leaf` in float32.

An unpacked group: its quads, then a step and an offset per row for all 32 values, or for each 16.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from overspill.gguf.types import TensorType
from overspill.kernels.numba.digits import GROUP_BYTES, HALF_SUMS_AT, STEP_AT, SUM_AT
from overspill.kernels.numba.emit import I8, I16, I64, Emitter, LateVec, const
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.lanes import N_LANES, Layout, PanelLanes, RowLanes
from overspill.kernels.numba.native import c_function
from overspill.kernels.numba.products import integer_products
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.unpack import UNPACKERS

N_UNPACK_ARGS, N_DIGIT_TILE_ARGS, N_DIGIT_DOT_ARGS = 7, 5, 8
# Values of a row that are unpacked at once: with those of sixteen rows, and some tokens, in the first-level cache.
PIECE_ELEMENTS = 512
_VECTOR_BYTES = 64
_N_QUADS = 8  # of four bytes, in a group


def group_bytes(n_steps: int) -> int:
    """Bytes of a group of sixteen rows, unpacked."""
    return _VECTOR_BYTES * (_N_QUADS + 2 * n_steps)


@cache
def unpack_address(type: TensorType, layout: Layout) -> int:
    """C function (rows, row_bytes, n_rows, first_unit, n_units, ahead, out), see `_emit_unpack`."""
    type_id, layout_id, digest = int(type), int(layout), SOURCE_DIGEST

    def unpack(rows, row_bytes, n_rows, first_unit, n_units, ahead, out):
        _unpack(type_id, layout_id, digest, (rows, row_bytes, n_rows, first_unit, n_units, ahead, out))

    return c_function(unpack, N_UNPACK_ARGS)


@cache
def digit_tile_address(n_tokens: int, n_steps: int, largest: int) -> int:
    """C function (unpacked, n_groups, x_pointers, x_offset, sums), see `_emit_tile`."""
    digest = SOURCE_DIGEST

    def digit_tile(unpacked, n_groups, xs, x_offset, sums):
        _tile(n_tokens, n_steps, largest, digest, (unpacked, n_groups, xs, x_offset, sums))

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
def _tile(typing_context, n_tokens, n_steps, largest, digest, arguments):
    def codegen(context, builder, signature, args):
        kind = n_tokens.literal_value, n_steps.literal_value, largest.literal_value
        _emit_tile(Emitter(builder), *kind, *cgutils.unpack_tuple(builder, args[4]))
        return context.get_dummy_value()

    return types.void(n_tokens, n_steps, largest, digest, arguments), codegen


def _emit_unpack(e, type, layout, rows, row_bytes, n_rows, first_unit, n_units, ahead, out):
    """Units `first_unit ...` of sixteen rows, `PIECE_ELEMENTS` at most, to `out`."""
    out, unpacker = e.pointer(out), UNPACKERS[type]
    out_bytes = group_bytes(unpacker.n_steps) * unpacker.n_groups
    for i_unit, lanes, ahead_of in _UNITS[layout](e, type, rows, row_bytes, n_rows, first_unit, n_units, ahead):
        target = e.at(out, e.offset(i_unit, out_bytes))
        for i_group, group in enumerate(unpacker.run(lanes)):
            _ask_for(e, ahead_of, i_group, unpacker.n_groups)
            at = i_group * group_bytes(unpacker.n_steps)
            for i, vec in enumerate((*group.quants, *group.steps, *group.offsets)):
                e.store(vec, target, at + _VECTOR_BYTES * i, _VECTOR_BYTES)


def _emit_dot(e, type, layout, rows, row_bytes, n_rows, first_unit, n_units, ahead, x, sums):
    """The same units times the digits of one token at `x`, added to `sums`, `[16]`."""
    x, sums, unpacker = e.pointer(x), e.pointer(sums), UNPACKERS[type]
    for i_unit, lanes, ahead_of in _UNITS[layout](e, type, rows, row_bytes, n_rows, first_unit, n_units, ahead):
        digits = e.at(x, e.offset(i_unit, GROUP_BYTES * unpacker.n_groups))
        total = e.floats(sums, 0, _VECTOR_BYTES, N_LANES)
        for i_group, group in enumerate(unpacker.run(lanes)):
            _ask_for(e, ahead_of, i_group, unpacker.n_groups)
            n_quads = _N_QUADS // len(group.steps)
            parts = [group.quants[n_quads * i :][:n_quads] for i in range(len(group.steps))]
            x_group = e.at(digits, GROUP_BYTES * i_group)
            (total,) = _add_group(e, parts, unpacker.largest, group.steps, group.offsets, [x_group], [total])
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


def _ask_for(e, ahead, i_group, n_groups):
    """A group's share: more lines at once than the CPU can wait for would hold up what is read meanwhile.

    They go to the second-level cache, as sixteen long rows would not last in the first.
    """
    lines = range(0, ahead.n_bytes, _VECTOR_BYTES)
    for line in lines[len(lines) * i_group // n_groups : len(lines) * (i_group + 1) // n_groups]:
        e.prefetch(ahead.pointer, e.offset(ahead.i_unit, ahead.n_bytes, line), cache=2)


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


def _emit_tile(e, n_tokens, n_steps, largest, unpacked, n_groups, xs, x_offset, sums):
    """Add the products of sixteen unpacked rows and some groups of `n_tokens` tokens to `sums`, `[n_tokens, 16]`."""
    b = e.builder
    unpacked, sums = e.pointer(unpacked), e.pointer(sums)
    tokens = [e.at(e.pointer(e.load(e.pointer(xs), 8 * i, I64)), x_offset) for i in range(n_tokens)]
    with cgutils.for_range(b, n_groups) as groups:
        parts, steps, offsets = _stored_group(e, e.at(unpacked, e.offset(groups.index, group_bytes(n_steps))), n_steps)
        digits = [e.at(token, e.offset(groups.index, GROUP_BYTES)) for token in tokens]
        totals = [e.floats(sums, _VECTOR_BYTES * i, _VECTOR_BYTES, N_LANES) for i in range(n_tokens)]
        for i, total in enumerate(_add_group(e, parts, largest, steps, offsets, digits, totals)):
            e.store(total, sums, _VECTOR_BYTES * i, _VECTOR_BYTES)


def _stored_group(e, pointer, n_steps):
    """The quads that share a step, for each step; steps; offsets."""
    late = [_late_quad(e, pointer, _VECTOR_BYTES * i) for i in range(_N_QUADS)]
    floats = [e.floats(pointer, _VECTOR_BYTES * (_N_QUADS + i), _VECTOR_BYTES, N_LANES) for i in range(2 * n_steps)]
    n_each = _N_QUADS // n_steps
    return [late[n_each * i :][:n_each] for i in range(n_steps)], floats[:n_steps], floats[n_steps:]


def _late_quad(e, pointer, offset):
    return LateVec(e.builder, lambda: e.load(pointer, offset, ir.VectorType(I16, 2 * N_LANES)))


def _add_group(e, parts, largest, steps, offsets, digits, totals):
    """Totals of some tokens, and the products of a group with their digits. parts: quads, for each step."""
    n_steps = len(steps)
    for i_step, (part, step, offset) in enumerate(zip(parts, steps, offsets, strict=True)):
        sum_at = SUM_AT if n_steps == 1 else HALF_SUMS_AT + 4 * i_step
        products = integer_products(e, part, [e.at(x, 4 * (_N_QUADS // n_steps) * i_step) for x in digits], largest)
        totals = [e.fma(offset, e.splat_float(x, sum_at, N_LANES), t) for x, t in zip(digits, totals, strict=True)]
        totals = [
            e.fma(product, step * e.splat_float(x, STEP_AT, N_LANES), t)
            for x, t, product in zip(digits, totals, products, strict=True)
        ]
    return totals
