"""Rows of a weight to panels, when a model is loaded; see `quant.panels`."""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from overspill.gguf.types import TensorType
from overspill.kernels.numba.emit import Emitter, const
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.lanes import N_LANES, RowLanes
from overspill.kernels.numba.native import c_function, callable_at
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.quant.panels import Panels, fields_of
from overspill.quant.qtensor import QTensor

_N_ARGS = 5


def interleave(source: QTensor, target: Panels) -> None:
    """Fill `target` with the same weight, on the calling thread."""
    if (source.type, source.shape) != (target.type, target.shape):
        raise ValueError(f"{source.type.name} {source.shape} does not become {target.type.name} {target.shape}")
    if not all(x.is_cpu and x.is_contiguous() for x in (source.data, target.data)):
        raise ValueError("rows and panels must be contiguous in host memory")
    row_bytes = source.type.row_bytes(source.shape[-1])
    n_panels, n_units = source.n_bytes // (N_LANES * row_bytes), row_bytes // source.type.block.n_bytes
    addresses = source.data.data_ptr(), target.data.data_ptr()
    callable_at(_address(source.type), _N_ARGS)(*addresses, row_bytes, n_panels, n_units)


@cache
def _address(type: TensorType) -> int:
    """C function (rows, out, row_bytes, n_panels, n_units)."""
    type_id, digest = int(type), SOURCE_DIGEST

    def interleave_rows(rows, out, row_bytes, n_panels, n_units):
        _interleave(type_id, digest, (rows, out, row_bytes, n_panels, n_units))

    return c_function(interleave_rows, _N_ARGS)


@intrinsic(prefer_literal=True)
def _interleave(typing_context, type_id, digest, arguments):
    def codegen(context, builder, signature, args):
        _emit(Emitter(builder), TensorType(type_id.literal_value), *cgutils.unpack_tuple(builder, args[2]))
        return context.get_dummy_value()

    return types.void(type_id, digest, arguments), codegen


def _emit(e, type, rows, out, row_bytes, n_panels, n_units):
    b, n_bytes = e.builder, type.block.n_bytes
    with cgutils.for_range(b, n_panels) as panels, cgutils.for_range(b, n_units) as units:
        panel = b.mul(panels.index, b.mul(row_bytes, const(N_LANES)))
        start = b.add(b.add(rows, panel), e.offset(units.index, n_bytes))
        unit = e.at(e.pointer(out), b.add(panel, e.offset(units.index, N_LANES * n_bytes)))
        lanes = RowLanes(e, [e.at(e.pointer(start), b.mul(row_bytes, const(i))) for i in range(N_LANES)])
        for field in fields_of(type):
            _emit_field(e, lanes, field, unit)


def _emit_field(e, lanes, field, unit):
    n_quads = (field.last - field.first) // 16
    for i, vec in enumerate(lanes.quads(field.first, 16 * n_quads)):
        e.store(vec, unit, N_LANES * (field.first + 4 * i), 1)
    read = {1: lanes.bytes, 2: lanes.shorts, 4: lanes.words}[field.width]
    for at in range(field.first + 16 * n_quads, field.last, field.width):
        numbers = read(at).value
        if field.width < 4:
            numbers = e.builder.trunc(numbers, ir.VectorType(ir.IntType(8 * field.width), N_LANES))
        e.store(e.vec(numbers), unit, N_LANES * at, 1)
