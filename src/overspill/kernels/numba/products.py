"""Bytes of weights times digits of activations, as exact integers: what differs from CPU to CPU.

by_fours   AVX512-VNNI: one instruction multiplies four bytes a lane and adds.
by_pairs   AVX2: one multiplies pairs of bytes, one adds what they give in 16 bits, where 32 weights below 16 fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from llvmlite import ir

from overspill.kernels.numba.emit import I8, I16, I32, Emitter, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS

_N_DIGITS, _PLANE_BYTES = 3, 32
_HALF_LANES = N_LANES // 2
_WORDS = ir.VectorType(I32, _HALF_LANES)
_SHORTS = ir.VectorType(I16, 2 * _HALF_LANES)
_BYTES = ir.VectorType(I8, 4 * _HALF_LANES)


def by_fours(e: Emitter, quants: Sequence[Vec], digits: Sequence[ir.Value]) -> list[Vec]:
    """Sums of quads of sixteen rows times those of each token at `digits`, as float32."""
    type = ir.VectorType(I32, N_LANES)
    function = e.intrinsic("llvm.x86.avx512.vpdpbusd.512", type, [type] * 3)
    totals: list[list[ir.Value]] = [[const_vec(I32, [0] * N_LANES)] * _N_DIGITS for _ in digits]
    for i_quad, quant in enumerate(quants):
        weights = quant.value
        for i_token, x in enumerate(digits):
            totals[i_token] = [
                e.builder.call(function, [total, weights, _digit_quad(e, x, digit, i_quad, N_LANES)])
                for digit, total in enumerate(totals[i_token])
            ]
    return [_joined(e, (e.vec(high) << 8) + e.vec(middle), e.vec(low)) for high, middle, low in totals]


def by_pairs(e: Emitter, quants: Sequence[Vec], digits: Sequence[ir.Value]) -> list[Vec]:
    """The same for up to 8 quads of weights below 16. Half of the rows is a vector."""
    sums: list[Vec] = []
    for i_quad, quant in enumerate(quants):
        sums = _pinned(e, sums)
        products = _pair_products(e, quant.value, digits, i_quad)
        sums = [a + b for a, b in zip(sums, products, strict=True)] if sums else products
    return [_joined_halves(e, sums[i : i + 2 * _N_DIGITS]) for i in range(0, len(sums), 2 * _N_DIGITS)]


integer_products = by_fours if HAS_BYTE_PRODUCTS else by_pairs


def _digit_quad(e: Emitter, x: ir.Value, digit: int, i_quad: int, n_lanes: int) -> ir.Value:
    """Four digits of a token, in every lane."""
    return e.splat(e.load(x, _PLANE_BYTES * digit + 4 * i_quad, I32), n_lanes).value


def _joined(e: Emitter, upper: Vec, low: Vec) -> Vec:
    """256 upper + low, rounded once."""
    upper = upper.to_float()
    return e.fma(upper, e.like(upper, 256.0), low.to_float())


def _pair_products(e: Emitter, weights: ir.Value, digits: Sequence[ir.Value], i_quad: int) -> list[Vec]:
    """For each token, digit and half: sums of two products as 16-bit numbers, 3840 at most."""
    b, whole = e.builder, e.vec(weights)
    function = e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", _SHORTS, [_BYTES] * 2)
    halves = [e.shuffle(whole, whole, range(first, first + _HALF_LANES)) for first in (0, _HALF_LANES)]
    products: list[Vec] = []
    for x, digit in product(digits, range(_N_DIGITS)):
        quad = b.bitcast(_digit_quad(e, x, digit, i_quad, _HALF_LANES), _BYTES)
        products += [e.vec(b.call(function, [b.bitcast(half.value, _BYTES), quad])) for half in halves]
    return products


def _joined_halves(e: Emitter, sums: Sequence[Vec]) -> Vec:
    """Sums of a token, both halves of each digit, as float32."""
    high, middle, low = (
        [_widened(e, half, factor) for half in sums[2 * digit : 2 * digit + 2]]
        for digit, factor in enumerate((256, 1, 1))
    )
    upper = [a + b for a, b in zip(high, middle, strict=True)]
    return _joined(e, *(e.shuffle(first, second, range(N_LANES)) for first, second in (upper, low)))


def _widened(e: Emitter, sums: Vec, factor: int) -> Vec:
    """Neighbours added up, times `factor`, as 32-bit numbers."""
    function = e.intrinsic("llvm.x86.avx2.pmadd.wd", _WORDS, [_SHORTS] * 2)
    return e.vec(e.builder.call(function, [sums.value, const_vec(I16, [factor] * 2 * _HALF_LANES)]))


def _pinned(e: Emitter, values: list[Vec]) -> list[Vec]:
    """The same, computed by now; and what is loaded after this is loaded after this.

    Left alone, LLVM loads all digits of a group before it multiplies, and has registers for few of them.
    """
    types = [value.value.type for value in values]
    result = ir.LiteralStructType(types) if types else ir.VoidType()
    constraints = ",".join(["=x"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"])
    b = e.builder
    pinned = b.asm(ir.FunctionType(result, types), "", constraints, [value.value for value in values], True)
    return [e.vec(b.extract_value(pinned, i)) for i in range(len(values))]
