"""Weights times activations as exact integers: what differs from CPU to CPU.

ByFours   AVX512-VNNI: one instruction multiplies four bytes a lane and adds.
ByPairs   AVX2: one multiplies bytes in pairs; sums of a few fit in 16 bits, and another multiplies those with scales
          and adds them in pairs.

What is multiplied are quads: four bytes of sixteen rows, and the same four of every token's digits. Quads that share a
scale are added up; what those of a block amount to is kept as `Totals`, of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Final, NamedTuple

from llvmlite import ir

from overspill.kernels.numba.digits import DIGIT_BITS, N_DIGITS, PLANE_BYTES
from overspill.kernels.numba.emit import F32, I8, I16, I32, Emitter, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS

_DWORDS = ir.VectorType(I32, N_LANES // 2)
_WORDS = ir.VectorType(I16, N_LANES)
_BYTES = ir.VectorType(I8, 2 * N_LANES)


Totals = Sequence[Vec]


class Part(NamedTuple):
    """Quads, `largest` at most, that share a scale, if there are scales."""

    quads: Sequence[Vec]
    scale: Vec | None
    largest: int


class ByFours:
    """Totals are one vector of float32."""

    SCALE: Final = ir.VectorType(F32, N_LANES)

    @staticmethod
    def nothing(e: Emitter, has_scales: bool) -> Totals:
        """What totals are at first."""
        return [e.vec(const_vec(F32, [0.0] * N_LANES))]

    @staticmethod
    def scale(e: Emitter, scale: Vec) -> Vec:
        """Scales as `add` takes them: 64 bytes, `SCALE`."""
        return scale if scale.is_float else scale.to_float()

    @staticmethod
    def add(e: Emitter, totals: Sequence[Totals], part: Part, digits: Sequence[ir.Value]) -> list[Totals]:
        """Totals of some tokens, and the quads times their digits and the scale."""
        type = ir.VectorType(I32, N_LANES)
        function = e.intrinsic("llvm.x86.avx512.vpdpbusd.512", type, [type] * 3)
        sums: list[list[ir.Value]] = [[const_vec(I32, [0] * N_LANES)] * N_DIGITS for _ in digits]
        for i, quad in enumerate(part.quads):
            weights = e.builder.bitcast(quad.value, type)
            for i_token, x in enumerate(digits):
                sums[i_token] = [
                    e.builder.call(function, [sum, weights, _digit_quad(e, x, plane, i, N_LANES)])
                    for plane, sum in enumerate(sums[i_token])
                ]
        found = list[Totals]()
        for total, (high, middle, low) in zip(totals, sums, strict=True):
            upper = (e.vec(high) << DIGIT_BITS) + e.vec(middle)
            sum = _joined(e, upper.to_float(), e.vec(low).to_float())
            found.append([e.fma(sum, part.scale, total[0]) if part.scale else sum + total[0]])
        return found

    @staticmethod
    def whole(e: Emitter, total: Totals) -> Vec:
        """Totals as float32, in units of the digits' step."""
        return total[0]


class ByPairs:
    """Totals are exact: sums of each digit's products, for each half of the rows. Without scales there is room for the
    two higher digits in one number."""

    SCALE: Final = ir.VectorType(I16, 2 * N_LANES)

    @staticmethod
    def nothing(e: Emitter, has_scales: bool) -> Totals:
        """The same."""
        return [e.vec(const_vec(I32, [0] * (N_LANES // 2)))] * 2 * (N_DIGITS if has_scales else N_DIGITS - 1)

    @staticmethod
    def scale(e: Emitter, scale: Vec) -> Vec:
        """In both words of a lane."""
        words = scale.as_shorts()
        return e.shuffle(words, words, [lane - lane % 2 for lane in range(2 * N_LANES)])

    @staticmethod
    def add(e: Emitter, totals: Sequence[Totals], part: Part, digits: Sequence[ir.Value]) -> list[Totals]:
        """The same."""
        quads, scale, largest = part
        n_fitting = min(len(quads), 0x7FFF // (2 * largest << DIGIT_BITS - 1))
        found = list[Totals]()
        for total, x in zip(totals, digits, strict=True):
            for first in range(0, len(quads), n_fitting):
                total = _pinned(e, total) if scale or first else total
                sums = list[Vec]()
                for i in range(first, min(first + n_fitting, len(quads))):
                    sums = _pinned(e, sums) if sums else sums
                    sums = _added(sums, _pair_products(e, quads[i], x, i))
                total = _added(total, _widened(e, sums, scale))
            found.append(total)
        return found

    @staticmethod
    def whole(e: Emitter, total: Totals) -> Vec:
        """The same."""
        wholes = [e.shuffle(total[i], total[i + 1], range(N_LANES)).to_float() for i in range(0, len(total), 2)]
        return reduce(lambda upper, low: _joined(e, upper, low), wholes)


def _added(sums: Sequence[Vec], more: Iterable[Vec]) -> list[Vec]:
    return [a + b for a, b in zip(sums, more, strict=True)] if sums else list(more)


def _pair_products(e: Emitter, quad: Vec, digits: ir.Value, i_quad: int) -> Iterator[Vec]:
    """For each digit and half of the rows: sums of two products as 16-bit numbers."""
    b, whole = e.builder, e.vec(e.builder.bitcast(quad.value, ir.VectorType(I8, 4 * N_LANES)))
    function, halves = e.intrinsic("llvm.x86.avx2.pmadd.ub.sw", _WORDS, [_BYTES] * 2), _halves(e, whole)
    for plane in range(N_DIGITS):
        activations = b.bitcast(_digit_quad(e, digits, plane, i_quad, N_LANES // 2), _BYTES)
        yield from (e.vec(b.call(function, [half.value, activations])) for half in halves)


def _halves(e: Emitter, vec: Vec) -> list[Vec]:
    n = vec.value.type.count // 2
    return [e.shuffle(vec, vec, range(first, first + n)) for first in (0, n)]


def _widened(e: Emitter, sums: Sequence[Vec], scale: Vec | None) -> Iterator[Vec]:
    """Sums of each digit and half of the rows, times scales, as 32-bit numbers; neighbours are added up."""
    function = e.intrinsic("llvm.x86.avx2.pmadd.wd", _DWORDS, [_WORDS] * 2)

    def widened(sum: Vec, factors: Vec) -> Vec:
        return e.vec(e.builder.call(function, [sum.value, factors.value]))

    if scale:
        halves = _halves(e, scale)
        yield from (widened(sum, halves[i % 2]) for i, sum in enumerate(sums))
        return
    one, upper = (e.vec(const_vec(I16, [factor] * N_LANES)) for factor in (1, 1 << DIGIT_BITS))
    high, middle, low = sums[:2], sums[2:4], sums[4:]
    yield from (widened(h, upper) + widened(m, one) for h, m in zip(high, middle, strict=True))
    yield from (widened(sum, one) for sum in low)


def _joined(e: Emitter, upper: Vec, low: Vec) -> Vec:
    """A digit below others, as float32."""
    return e.fma(upper, e.like(upper, float(1 << DIGIT_BITS)), low)


def _digit_quad(e: Emitter, digits: ir.Value, plane: int, i_quad: int, n_lanes: int) -> ir.Value:
    """Four digits of a token, in every lane."""
    return e.splat(e.load(digits, PLANE_BYTES * plane + 4 * i_quad, I32), n_lanes).value


def _pinned(e: Emitter, values: Sequence[Vec]) -> list[Vec]:
    """The same, computed by now; and what is loaded after this is loaded after this.

    Left alone, LLVM loads all digits of a group before it multiplies, and has registers for few of them.
    """
    types = [value.value.type for value in values]
    result = ir.LiteralStructType(types) if types else ir.VoidType()
    constraints = ",".join(["=x"] * len(values) + [str(i) for i in range(len(values))] + ["~{memory}"])
    b = e.builder
    pinned = b.asm(ir.FunctionType(result, types), "", constraints, [value.value for value in values], True)
    return [e.vec(b.extract_value(pinned, i)) for i in range(len(values))]


integer_products = ByFours if HAS_BYTE_PRODUCTS else ByPairs
