"""What becomes of a tile of products: stored, added with a weight, or gated by an activation.

One row of a tile, TILE_ROWS products of one token, goes to TILE_ROWS neighbouring floats. All work on whole
vectors in strict float32, so a value does not depend on its position in a tile.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from overspill.kernels.numba.emit import I32, Emitter, Vec
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.target import TILE_ROWS

_N64 = types.int64
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has few enough bits for an exact product with the exponent.
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln 2 / 2 (Cephes, expf).
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_OAI_LIMIT, _OAI_SLOPE = 7.0, 1.702
# Adding and subtracting 1.5 * 2^23 rounds a small float to the nearest integer.
_ROUND = 12582912.0


@intrinsic
def store_products(typing_context, out, products):
    """out[:] = products, TILE_ROWS floats each."""

    def codegen(context, builder, signature, args):
        e, out, products = _open(builder, args)
        e.store(products, out, 0)
        return context.get_dummy_value()

    return types.void(_N64, _N64), codegen


@intrinsic
def add_products(typing_context, out, products, weight):
    """out[:] += weight * products."""

    def codegen(context, builder, signature, args):
        e, out, products = _open(builder, args)
        weight = e.splat(args[2], TILE_ROWS)
        e.store(e.fma(weight, products, e.floats(out, 0, n=TILE_ROWS)), out, 0)
        return context.get_dummy_value()

    return types.void(_N64, _N64, types.float32), codegen


@intrinsic
def gate_silu(typing_context, out, products, limit):
    """out[:] = silu(g) * u: g = min(out, limit), where out holds the gate, u = products within [-limit, limit].

    silu(g) = g / (1 + exp(-g)).
    """

    def codegen(context, builder, signature, args):
        e, out, products = _open(builder, args)
        limit = e.splat(args[2], TILE_ROWS)
        gate = _at_most(e, e.floats(out, 0, n=TILE_ROWS), limit)
        up = _at_most(e, _at_most(e, products, limit) * -1.0, limit) * -1.0
        e.store(_swish(e, gate, 1.0) * up, out, 0)
        return context.get_dummy_value()

    return types.void(_N64, _N64, types.float32), codegen


@intrinsic
def gate_swiglu_oai(typing_context, out, products):
    """out[:] = g sigmoid(1.702 g) (u + 1), g = min(out, 7), u = products within [-7, 7] (gpt-oss)."""

    def codegen(context, builder, signature, args):
        e, out, products = _open(builder, args)
        gate = e.at_most(e.floats(out, 0, n=TILE_ROWS), _OAI_LIMIT)
        up = e.at_most(e.at_most(products, _OAI_LIMIT) * -1.0, _OAI_LIMIT) * -1.0
        e.store(_swish(e, gate, _OAI_SLOPE) * (up + 1.0), out, 0)
        return context.get_dummy_value()

    return types.void(_N64, _N64), codegen


@intrinsic
def exp_from(typing_context, address, top):
    """LANES floats x at `address` become exp(x - top)."""

    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        pointer = e.pointer(args[0])
        e.store(_exp(e, e.floats(pointer, 0) - e.splat(args[1])), pointer, 0)
        return context.get_dummy_value()

    return types.void(_N64, types.float32), codegen


def _at_most(e: Emitter, x: Vec, limit: Vec) -> Vec:
    """min(x, limit); NaN stays NaN."""
    return e.select(e.builder.fcmp_ordered(">", x.value, limit.value), limit, x)


def _swish(e: Emitter, x: Vec, slope: float) -> Vec:
    """x sigmoid(slope x)."""
    return x / (_exp(e, x * -slope) + 1.0)


def _open(builder: ir.IRBuilder, args: list[ir.Value]) -> tuple[Emitter, ir.Value, Vec]:
    e = Emitter(builder)
    return e, e.pointer(args[0]), e.floats(e.pointer(args[1]), 0, n=TILE_ROWS)


def _exp(e: Emitter, x: Vec) -> Vec:
    """exp to about 1 ulp; arguments past the range of float32 give its ends, 1e-38 and 2e38."""
    x = e.at_most(e.at_least(x, -87.0), 88.0)
    n = (x * _LOG2_E + _ROUND) - _ROUND
    r = e.fma(n, e.like(n, -_LN2_LOW), e.fma(n, e.like(n, -_LN2_HIGH), x))
    p = e.like(r, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        p = e.fma(p, r, e.like(r, term))
    power = e.vec(e.builder.fptosi(n.value, ir.VectorType(I32, x.value.type.count)))
    return (e.fma(p * r, r, r) + 1.0) * ((power + 127) << 23).as_float()
