"""Weights times activations as exact integers: what differs from CPU to CPU.

by_fours   AVX512-VNNI: one instruction multiplies four bytes a lane and adds.
by_pairs   AVX2: one multiplies bytes in pairs; sums of a few fit in 16 bits, and another adds those in pairs.

What is multiplied are quads: four bytes of sixteen rows, and the same four of every token's digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from llvmlite import ir

from overspill.kernels.numba.digits import DIGIT_BITS, N_DIGITS, PLANE_BYTES
from overspill.kernels.numba.emit import I8, I16, I32, Emitter, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS

_DWORDS = ir.VectorType(I32, N_LANES // 2)
_WORDS = ir.VectorType(I16, N_LANES)
_BYTES = ir.VectorType(I8, 2 * N_LANES)


def by_fours(e: Emitter, quads: Sequence[Vec], digits: Sequence[ir.Value], largest: int) -> list[Vec]:
    """Sums of sixteen rows' quads, `largest` at most, times those of each token at `digits`, as float32."""
    type = ir.VectorType(I32, N_LANES)
    function = e.intrinsic("llvm.x86.avx512.vpdpbusd.512", type, [type] * 3)
    totals: list[list[ir.Value]] = [[const_vec(I32, [0] * N_LANES)] * N_DIGITS for _ in digits]
    for i, quad in enumerate(quads):
        weights = e.builder.bitcast(quad.value, type)
        for i_token, x in enumerate(digits):
            totals[i_token] = [
                e.builder.call(function, [total, weights, _digit_quad(e, x, plane, i, N_LANES)])
                for plane, total in enumerate(totals[i_token])
            ]
    return [_joined(e, (e.vec(high) << DIGIT_BITS) + e.vec(middle), e.vec(low)) for high, middle, low in totals]


def by_pairs(e: Emitter, quads: Sequence[Vec], digits: Sequence[ir.Value], largest: int) -> list[Vec]:
    """The same. Half of the rows is a vector."""
    n_fitting = min(len(quads), 0x7FFF // (2 * largest << DIGIT_BITS - 1))
    if n_fitting < len(quads) and len(digits) > 1:  # the registers hold the totals of one token
        return [by_pairs(e, quads, [x], largest)[0] for x in digits]
    totals: list[Vec] = []
    for first in range(0, len(quads), n_fitting):
        totals, sums = _pinned(e, totals), list[Vec]()
        for i in range(first, min(first + n_fitting, len(quads))):
            sums = _pinned(e, sums) if sums else sums
            sums = _added(sums, _pair_products(e, quads[i], digits, i))
        totals = _added(totals, (_widened(e, sum) for sum in sums))
    wholes = [e.shuffle(totals[i], totals[i + 1], range(N_LANES)) for i in range(0, len(totals), 2)]
    by_token = zip(wholes[::N_DIGITS], wholes[1::N_DIGITS], wholes[2::N_DIGITS], strict=True)
    return [_joined(e, (high << DIGIT_BITS) + middle, low) for high, middle, low in by_token]


def _added(sums: Sequence[Vec], more: Iterable[Vec]) -> list[Vec]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)


def _pair_products(e: Emitter, quad: Vec, digits: Sequence[ir.Value], i_quad: int) -> Iterator[Vec]:
    """For each token, digit and half of the rows: sums of two products as 16-bit numbers."""
    b, whole = e.builder, e.vec(e.builder.bitcast(quad.value, ir.VectorType(I8, 4 * N_LANES)))
    function = e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", _WORDS, [_BYTES] * 2)
    halves = [e.shuffle(whole, whole, range(first, first + 2 * N_LANES)) for first in (0, 2 * N_LANES)]
    for x, plane in product(digits, range(N_DIGITS)):
        activations = b.bitcast(_digit_quad(e, x, plane, i_quad, N_LANES // 2), _BYTES)
        yield from (e.vec(b.call(function, [half.value, activations])) for half in halves)


def _widened(e: Emitter, sums: Vec) -> Vec:
    """Neighbours added up as 32-bit numbers."""
    function = e.intrinsic("llvm.x86.avx2.pmadd.wd", _DWORDS, [_WORDS] * 2)
    return e.vec(e.builder.call(function, [sums.value, const_vec(I16, [1] * N_LANES)]))


def _joined(e: Emitter, upper: Vec, low: Vec) -> Vec:
    """128 upper + low, rounded once."""
    upper = upper.to_float()
    return e.fma(upper, e.like(upper, float(1 << DIGIT_BITS)), low.to_float())


def _digit_quad(e: Emitter, digits: ir.Value, plane: int, i_quad: int, n_lanes: int) -> ir.Value:
    """Four digits of a token, in every lane."""
    return e.splat(e.load(digits, PLANE_BYTES * plane + 4 * i_quad, I32), n_lanes).value


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


integer_products = by_fours if HAS_BYTE_PRODUCTS else by_pairs
