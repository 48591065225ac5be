"""Weights times activations as exact integers: what differs from CPU to CPU.

by_fours   AVX512-VNNI: one instruction multiplies four bytes a lane and adds. Three digits an activation.
by_words   AVX2: one multiplies two words a lane and adds the products. Bytes of weights are widened; two digits.

An operand is what meets the same four bytes of every token's digits: integers of sixteen rows. Sums of 32 fit in 32
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from llvmlite import ir

from overspill.kernels.numba.digits import N_DIGITS, PLANE_BYTES
from overspill.kernels.numba.emit import I16, I32, Emitter, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS

_HALF_LANES = N_LANES // 2
_DWORDS = ir.VectorType(I32, _HALF_LANES)
_WORDS = ir.VectorType(I16, N_LANES)


def quads(e: Emitter, quants: Sequence[Vec]) -> Iterator[Vec]:
    """The operands of `by_fours`: four unsigned bytes a row."""
    yield from quants


def words(e: Emitter, quants: Sequence[Vec]) -> Iterator[Vec]:
    """The operands of `by_words`: of four bytes the first and third, then the others."""
    for quant in quants:
        whole = e.vec(quant.value)
        yield whole & 0x00FF
        yield whole >> 8


def by_fours(e: Emitter, operands: Iterable[Vec], digits: Sequence[ir.Value]) -> list[Vec]:
    """Sums of sixteen rows' operands times those of each token at `digits`, as float32."""
    type = ir.VectorType(I32, N_LANES)
    function = e.intrinsic("llvm.x86.avx512.vpdpbusd.512", type, [type] * 3)
    totals: list[list[ir.Value]] = [[const_vec(I32, [0] * N_LANES)] * N_DIGITS for _ in digits]
    for i, operand in enumerate(operands):
        weights = e.builder.bitcast(operand.value, type)
        for i_token, x in enumerate(digits):
            totals[i_token] = [
                e.builder.call(function, [total, weights, _dword(e, x, PLANE_BYTES * plane + 4 * i, N_LANES)])
                for plane, total in enumerate(totals[i_token])
            ]
    return [_joined(e, (e.vec(high) << 8) + e.vec(middle), e.vec(low)) for high, middle, low in totals]


def by_words(e: Emitter, operands: Iterable[Vec], digits: Sequence[ir.Value]) -> list[Vec]:
    """The same. Half of the rows is a vector."""
    b = e.builder
    function = e.intrinsic("llvm.x86.avx2.pmadd.wd", _DWORDS, [_WORDS] * 2)
    sums: list[Vec] = []
    for i, operand in enumerate(operands):
        sums = _pinned(e, sums)
        whole, products = e.vec(operand.value), []
        halves = [e.shuffle(whole, whole, range(first, first + N_LANES)) for first in (0, N_LANES)]
        for x, plane in product(digits, range(N_DIGITS)):
            activations = b.bitcast(_dword(e, x, PLANE_BYTES * plane + 4 * i, _HALF_LANES), _WORDS)
            products += [e.vec(b.call(function, [half.value, activations])) for half in halves]
        sums = [a + b for a, b in zip(sums, products, strict=True)] if sums else products
    whole_sums = [e.shuffle(sums[i], sums[i + 1], range(N_LANES)) for i in range(0, len(sums), 2)]
    return [_joined(e, upper, low) for upper, low in zip(whole_sums[::2], whole_sums[1::2], strict=True)]


def _joined(e: Emitter, upper: Vec, low: Vec) -> Vec:
    """256 upper + low, rounded once."""
    upper = upper.to_float()
    return e.fma(upper, e.like(upper, 256.0), low.to_float())


def _dword(e: Emitter, digits: ir.Value, offset: int, n_lanes: int) -> ir.Value:
    """Four bytes of a token, in every lane."""
    return e.splat(e.load(digits, offset, I32), n_lanes).value


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


# What unpacked weights become, how many of them 32 weights are, and the products.
operands, N_OPERANDS, integer_products = (quads, 8, by_fours) if HAS_BYTE_PRODUCTS else (words, 16, by_words)
