"""Activations as integers: 256 of them share a power of two, each is a few digits, as `products` multiplies them.

x = step * integer, step = 2^(exponent of the largest - 19): an error of at most 2^-20 of the largest, a tenth of what
the kernels are held to, and a quarter of that where digits have 8 bits. Products of digits with the integers of weights
are integers, so their sums are exact, whatever the order of the additions; and a step that is a power of two rounds
nothing.

integer = 2^14 high + 2^7 middle + low, signed bytes of -64 to 64, so that sums fit in 16 bits; or 2^16 high + 2^8
middle + low, whole bytes. A group of 32 is GROUP_BYTES long: all digits of one kind after the other, then as float32
the step and the sums of all, of the first 16 and of the last 16 activations, as far as the digits have them. The groups
of a block of 256, as long as the longest of weights, have one step: NaN if one is no number. The last may be shorter.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from overspill.kernels.numba.emit import F32, I8, I32, I64, Emitter, Vec, const, const_vec
from overspill.kernels.numba.jit import inner, intrinsic
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS

GROUP_ELEMENTS = 32
_BLOCK_GROUPS = 8
N_DIGITS, PLANE_BYTES = 3, 32
DIGIT_BITS, STEP_BITS = (8, 21) if HAS_BYTE_PRODUCTS else (7, 19)
STEP_AT = N_DIGITS * PLANE_BYTES
SUM_AT, HALF_SUMS_AT, GROUP_BYTES = STEP_AT + 4, STEP_AT + 8, STEP_AT + 16
_HALF = 16
# Adding 1.5 * 2^23 rounds to an integer of up to 23 bits, which then is what the bits are more than those of the term.
_ROUND, _ROUND_BITS = 12582912.0, 0x4B400000
_SMALLEST_EXPONENT = 40
_NAN_BITS = 0x7FC00000
_N64 = types.int64


def digit_bytes(n_elements: int) -> int:
    """Bytes of a row of activations as digits."""
    return n_elements // GROUP_ELEMENTS * GROUP_BYTES


@inner
def digitise(x, n_elements, out):
    """A row of float32, a whole number of groups long, to digits."""
    n_groups = n_elements // GROUP_ELEMENTS
    for first in range(0, n_groups, _BLOCK_GROUPS):
        top, last = np.int64(0), min(first + _BLOCK_GROUPS, n_groups)
        for i in range(first, last):
            top = max(top, _top_exponent(x + 4 * GROUP_ELEMENTS * i))
        for i in range(first, last):
            _digitise_group(x + 4 * GROUP_ELEMENTS * i, top, out + GROUP_BYTES * i)


@intrinsic
def _top_exponent(typing_context, x):
    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        return builder.zext(_exponent(e, _halves(e, args[0])), I64)

    return _N64(_N64), codegen


@intrinsic
def _digitise_group(typing_context, x, exponent, out):
    def codegen(context, builder, signature, args):
        _emit_group(Emitter(builder), *args)
        return context.get_dummy_value()

    return types.void(_N64, _N64, _N64), codegen


def _halves(e: Emitter, x: ir.Value) -> list[Vec]:
    return [e.floats(e.pointer(x), 4 * _HALF * i, n=_HALF) for i in range(2)]


def _emit_group(e: Emitter, x: ir.Value, exponent: ir.Value, out: ir.Value) -> None:
    """exponent: the bits of the block's largest."""
    b, target = e.builder, e.pointer(out)
    exponent = b.trunc(exponent, I32)
    is_finite = b.icmp_unsigned("<", exponent, const(255, I32))
    at_least = b.icmp_unsigned(">", exponent, const(_SMALLEST_EXPONENT, I32))
    exponent = b.select(at_least, exponent, const(_SMALLEST_EXPONENT, I32))
    step_bits = b.shl(b.sub(exponent, const(STEP_BITS, I32)), const(23, I32))
    step = e.splat(b.bitcast(b.select(is_finite, step_bits, const(_NAN_BITS, I32)), F32), 4)
    inverse_bits = b.shl(b.sub(const(254 + STEP_BITS, I32), exponent), const(23, I32))
    inverse = e.splat(b.bitcast(inverse_bits, F32), _HALF)
    sums = []
    for i, values in enumerate(_halves(e, x)):
        rounded = _as_int(e, values * inverse + _ROUND) - _ROUND_BITS
        _store_digits(e, rounded, target, i)
        sums.append(b.call(e.intrinsic("llvm.vector.reduce.add.v16i32", I32, [rounded.value.type]), [rounded.value]))
    numbers = e.vec(ir.Constant(ir.VectorType(I32, 4), [1, 0, 0, 0]))
    for lane, total in enumerate((b.add(*sums), *sums), 1):
        numbers = e.vec(b.insert_element(numbers.value, total, const(lane, I32)))
    e.store(numbers.to_float() * step, target, STEP_AT)


def _exponent(e: Emitter, halves: list[Vec]) -> ir.Value:
    """The exponent bits of the largest; 255 if any is no number."""
    b = e.builder
    first, second = ((_as_int(e, half) & 0x7FFFFFFF).value for half in halves)
    larger = b.select(b.icmp_unsigned(">", first, second), first, second)
    top = b.call(e.intrinsic("llvm.vector.reduce.umax.v16i32", I32, [larger.type]), [larger])
    return b.lshr(top, const(23, I32))


def _store_digits(e: Emitter, integers: Vec, group: ir.Value, i_half: int) -> None:
    for plane in reversed(range(N_DIGITS)):
        low = _shift_signed(e, integers << 32 - DIGIT_BITS, 32 - DIGIT_BITS) if plane else integers
        low_bytes = e.vec(e.builder.trunc(low.value, ir.VectorType(I8, _HALF)))
        e.store(low_bytes, group, PLANE_BYTES * plane + _HALF * i_half, 1)
        integers = _shift_signed(e, integers - low, DIGIT_BITS)


def _as_int(e: Emitter, vec: Vec) -> Vec:
    return e.vec(e.builder.bitcast(vec.value, ir.VectorType(I32, _HALF)))


def _shift_signed(e: Emitter, vec: Vec, n_bits: int) -> Vec:
    return e.vec(e.builder.ashr(vec.value, const_vec(I32, [n_bits] * _HALF)))
