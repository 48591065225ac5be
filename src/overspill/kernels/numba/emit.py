"""Vectors in LLVM IR, written like arithmetic: the language of the block decoders and the kernels.

`Vec` wraps an LLVM vector value of `LANES` lanes (float32 or int32) and gives it operators; `Emitter` loads, stores
and combines them. Floating point is strict: no reassociation, so that a value does not depend on where a loop was
cut. The one freedom is `fma`, which is fused exactly where the CPU has the instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir
from numba.core import cgutils

from overspill.kernels.numba.target import FEATURES, HAS_AVX2, HAS_AVX512, LANES

F32 = ir.FloatType()
F16 = ir.HalfType()
I1, I8, I16, I32, I64 = (ir.IntType(n_bits) for n_bits in (1, 8, 16, 32, 64))
_HAS_HALF = "f16c" in FEATURES or "neon" in FEATURES or "fullfp16" in FEATURES


def const(value: int, type: ir.Type = I64) -> ir.Constant:
    return ir.Constant(type, value)


def const_vec(type: ir.Type, values: Sequence[float]) -> ir.Constant:
    return ir.Constant(ir.VectorType(type, len(values)), [ir.Constant(type, value) for value in values])


def _operand(other: Vec | float, type: ir.VectorType) -> ir.Value:
    return other.value if isinstance(other, Vec) else const_vec(type.element, [other] * type.count)


class Vec:
    """A vector of float32 or integer lanes. Integer operators wrap; `>>` shifts zeros in."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value

    @property
    def is_float(self) -> bool:
        return self.value.type.element == F32

    def _then(self, make: Callable[[ir.Value], ir.Value]) -> Vec:
        return Vec(self.builder, make(self.value))

    def _apply(self, name: str, other: Vec | float) -> Vec:
        return self._then(lambda value: getattr(self.builder, name)(value, _operand(other, value.type)))

    def __add__(self, other: Vec | float) -> Vec:
        return self._apply("fadd" if self.is_float else "add", other)

    def __sub__(self, other: Vec | float) -> Vec:
        return self._apply("fsub" if self.is_float else "sub", other)

    def __mul__(self, other: Vec | float) -> Vec:
        return self._apply("fmul" if self.is_float else "mul", other)

    def __truediv__(self, other: Vec | float) -> Vec:
        return self._apply("fdiv", other)

    def __and__(self, other: Vec | int) -> Vec:
        return self._apply("and_", other)

    def __xor__(self, other: Vec | int) -> Vec:
        return self._apply("xor", other)

    def __or__(self, other: Vec | int) -> Vec:
        return self._apply("or_", other)

    def __lshift__(self, other: Vec | int) -> Vec:
        return self._apply("shl", other)

    def __rshift__(self, other: Vec | int) -> Vec:
        return self._apply("lshr", other)

    def shifted_right(self, n_bits: ir.Value) -> Vec:
        """All lanes by as many bits, an int64 known at run time."""

        def shift(value: ir.Value) -> ir.Value:
            scalar = self.builder.trunc(n_bits, value.type.element)
            return self.builder.lshr(value, Emitter(self.builder).splat(scalar, value.type.count).value)

        return self._then(shift)

    def at_once(self) -> Vec:
        """The same, computed here."""
        return Vec(self.builder, self.value)

    def to_float(self) -> Vec:
        """Signed integers as float32."""
        return self._then(lambda value: self.builder.sitofp(value, ir.VectorType(F32, value.type.count)))

    def as_float(self) -> Vec:
        """The bits of 32-bit integers read as float32."""
        return self._then(lambda value: self.builder.bitcast(value, ir.VectorType(F32, value.type.count)))

    def as_shorts(self) -> Vec:
        """The bits of 32-bit integers read as twice as many of 16 bits."""
        return self._then(lambda value: self.builder.bitcast(value, ir.VectorType(I16, 2 * value.type.count)))


class LateVec(Vec):
    """A vector that is computed anew wherever it is used, so that it need not stay in a register until then."""

    def __init__(self, builder: ir.IRBuilder, make: Callable[[], ir.Value]) -> None:
        self.builder = builder
        self._make = make

    @property
    def value(self) -> ir.Value:
        return self._make()

    def _then(self, make: Callable[[ir.Value], ir.Value]) -> Vec:
        return LateVec(self.builder, lambda: make(self.value))


class Emitter:
    """Emits loads, stores and vector operations at the position of an LLVM builder. Offsets are in bytes."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # Addresses

    def pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, I8.as_pointer())

    def at(self, pointer: ir.Value, offset: ir.Value | int, type: ir.Type = I8) -> ir.Value:
        index = offset if isinstance(offset, ir.Value) else const(offset)
        return self.builder.bitcast(self.builder.gep(pointer, [index]), type.as_pointer())

    def offset(self, index: ir.Value, stride: int, base: int = 0) -> ir.Value:
        """`index * stride + base`."""
        return self.builder.add(self.builder.mul(index, const(stride)), const(base))

    def scratch(self, n_floats: int) -> ir.Value:
        """Stack memory for floats; made once, in the entry block."""
        return self.builder.bitcast(
            cgutils.alloca_once(self.builder, ir.ArrayType(ir.VectorType(F32, 16), n_floats // 16)), I8.as_pointer()
        )

    def align_stack(self) -> None:
        """Vectors that registers have no room for will lie within cache lines: LLVM aligns the stack for what must be
        aligned, not for what it may put there later."""
        line = cgutils.alloca_once(self.builder, ir.VectorType(F32, 16))
        line.align = 64
        type = ir.FunctionType(ir.VoidType(), [line.type])
        self.builder.asm(type, "", "r", [line], True)

    # Scalars

    def load(self, pointer: ir.Value, offset: ir.Value | int, type: ir.Type) -> ir.Value:
        value = self.builder.load(self.at(pointer, offset, type))
        value.align = 1
        return value

    def load_u(self, pointer: ir.Value, offset: ir.Value | int, n_bits: int) -> ir.Value:
        """An unsigned little-endian number as an i32."""
        value = self.load(pointer, offset, ir.IntType(n_bits))
        return value if n_bits == 32 else self.builder.zext(value, I32)

    def bits(self, word: ir.Value, right: int, mask: int) -> ir.Value:
        """(word >> right) & mask of an i32."""
        return self.builder.and_(self.builder.lshr(word, const(right, I32)), const(mask, I32))

    def table(self, type: ir.Type, values: Sequence[float]) -> ir.Value:
        """A constant array in the code's module."""
        array = ir.Constant(ir.ArrayType(type, len(values)), [ir.Constant(type, value) for value in values])
        return self.builder.bitcast(cgutils.global_constant(self.builder, "table", array), I8.as_pointer())

    # Vectors

    def vec(self, value: ir.Value) -> Vec:
        return Vec(self.builder, value)

    def zeros(self) -> Vec:
        return self.vec(const_vec(F32, [0.0] * LANES))

    def floats(self, pointer: ir.Value, offset: ir.Value | int, align: int = 4, n: int = LANES) -> Vec:
        value = self.load(pointer, offset, ir.VectorType(F32, n))
        value.align = align
        return self.vec(value)

    def store(self, vec: Vec, pointer: ir.Value, offset: ir.Value | int, align: int = 4) -> None:
        store = self.builder.store(vec.value, self.at(pointer, offset, vec.value.type))
        store.align = align

    def bytes_u(self, pointer: ir.Value, offset: ir.Value | int, n: int = LANES) -> Vec:
        raw = self.load(pointer, offset, ir.VectorType(I8, n))
        return self.vec(self.builder.zext(raw, ir.VectorType(I32, n)))

    def bytes_s(self, pointer: ir.Value, offset: ir.Value | int, n: int = LANES) -> Vec:
        raw = self.load(pointer, offset, ir.VectorType(I8, n))
        return self.vec(self.builder.sext(raw, ir.VectorType(I32, n)))

    def halves(self, pointer: ir.Value, offset: ir.Value | int, n: int = LANES) -> Vec:
        """n IEEE halves as float32."""
        return self._widen_halves(self.load(pointer, offset, ir.VectorType(I16, n)))

    def half(self, pointer: ir.Value, offset: ir.Value | int) -> Vec:
        """One IEEE half as float32, in every lane."""
        return self.half_of(self.load(pointer, offset, I16))

    def half_of(self, bits: ir.Value) -> Vec:
        """An i16 read as IEEE half, as float32 in every lane."""
        return self._widen_halves(self.splat(bits).value)

    def _widen_halves(self, bits: ir.Value) -> Vec:
        n = bits.type.count
        if _HAS_HALF:
            as_half = self.builder.bitcast(bits, ir.VectorType(F16, n))
            return self.vec(self.builder.fpext(as_half, ir.VectorType(F32, n)))
        # Exponent and mantissa in place, then the exponent bias by an exact product; the top exponent stays special.
        wide = self.vec(self.builder.zext(bits, ir.VectorType(I32, n)))
        magnitude = (wide & 0x7FFF) << 13
        finite = self.vec(self.builder.bitcast((magnitude.as_float() * 2.0**112).value, wide.value.type))
        is_special = self.builder.icmp_unsigned(">=", magnitude.value, (magnitude & 0 | 0x0F800000).value)
        special = magnitude | 0x7F800000
        merged = self.vec(self.builder.select(is_special, special.value, finite.value))
        return (merged | (wide & 0x8000) << 16).as_float()

    def splat(self, scalar: ir.Value, n: int = LANES) -> Vec:
        type = ir.VectorType(scalar.type, n)
        undefined = ir.Constant(type, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, const(0, I32))
        return self.vec(self.builder.shuffle_vector(first, undefined, const_vec(I32, [0] * n)))

    def splat_float(self, pointer: ir.Value, offset: ir.Value | int, n: int = LANES) -> Vec:
        return self.splat(self.load(pointer, offset, F32), n)

    def words(self, table: ir.Value, type: ir.IntType, index: Sequence[ir.Value]) -> Vec:
        """Words of `table` at i32 indices, together LANES signed bytes, as float32."""
        b = self.builder
        joined = ir.Constant(ir.VectorType(type, len(index)), ir.Undefined)
        for lane, i in enumerate(index):
            word = self.load(table, self.offset(b.zext(i, I64), type.width // 8), type)
            joined = b.insert_element(joined, word, const(lane, I32))
        as_bytes = b.bitcast(joined, ir.VectorType(I8, LANES))
        return self.vec(b.sext(as_bytes, ir.VectorType(I32, LANES))).to_float()

    def mask(self, pointer: ir.Value, offset: ir.Value | int) -> ir.Value:
        """LANES bits, the lowest first, as a vector of i1."""
        return self.builder.bitcast(self.load(pointer, offset, ir.IntType(LANES)), ir.VectorType(I1, LANES))

    def joined_mask(self, parts: Sequence[ir.Value]) -> ir.Value:
        """The same from bytes, `LANES / 8` of them."""
        b, joined = self.builder, const(0, ir.IntType(LANES))
        for i, part in enumerate(parts):
            wide = b.zext(part, joined.type) if LANES > 8 else part
            joined = b.or_(joined, b.shl(wide, const(8 * i, joined.type)))
        return b.bitcast(joined, ir.VectorType(I1, LANES))

    def select(self, mask: ir.Value, when_set: Vec, when_clear: Vec) -> Vec:
        return self.vec(self.builder.select(mask, when_set.value, when_clear.value))

    def fma(self, a: Vec, b: Vec, c: Vec) -> Vec:
        type = a.value.type
        function = self.intrinsic(f"llvm.fmuladd.v{type.count}f32", type, [type] * 3)
        return self.vec(self.builder.call(function, [a.value, b.value, c.value]))

    def like(self, vec: Vec, value: float) -> Vec:
        """A constant with as many lanes as `vec`."""
        return self.vec(const_vec(F32, [value] * vec.value.type.count))

    def at_most(self, x: Vec, high: float) -> Vec:
        """min(x, high); NaN stays NaN."""
        ceiling = self.like(x, high)
        return self.select(self.builder.fcmp_ordered(">", x.value, ceiling.value), ceiling, x)

    def at_least(self, x: Vec, low: float) -> Vec:
        """max(x, low); NaN becomes `low`."""
        floor = self.like(x, low)
        return self.select(self.builder.fcmp_ordered(">", x.value, floor.value), x, floor)

    def prefetch(self, pointer: ir.Value, offset: ir.Value | int, cache: int = 1) -> None:
        """Ask for the line to come to this level of cache; an address outside any memory is harmless."""
        function = self.intrinsic("llvm.prefetch.p0", ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        self.builder.call(function, [self.at(pointer, offset), const(0, I32), const(4 - cache, I32), const(1, I32)])

    def intrinsic(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Function:
        return cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(result, arguments), name)

    def shuffle(self, a: Vec, b: Vec, lanes: Sequence[int]) -> Vec:
        return self.vec(self.builder.shuffle_vector(a.value, b.value, const_vec(I32, lanes)))

    # Tables of 16 values

    def linear(self, index: Vec, bias: int, scale: Vec, offset: Vec | None, mask: int = 15) -> Vec:
        """`((index & mask) + bias) * scale + offset`, product and sum rounded one by one."""
        product = ((index & mask) + bias).to_float() * scale
        return product if offset is None else product + offset

    def lookup(self, values: Vec, index: Vec) -> Vec:
        """values[index & 15] with AVX-512: `values` has 16 lanes."""
        type, int_type = values.value.type, index.value.type
        function = self.intrinsic("llvm.x86.avx512.permvar.sf.512", type, [type, int_type])
        return self.vec(self.builder.call(function, [values.value, index.value]))

    def lookup_halves(self, low: Vec, high: Vec, index: Vec) -> Vec:
        """(low + high)[index & 15] with AVX2: both have 8 lanes."""
        type, int_type = low.value.type, index.value.type
        function = self.intrinsic("llvm.x86.avx2.permps", type, [type, int_type])
        picked = [self.builder.call(function, [half.value, index.value]) for half in (low, high)]
        is_high = self.builder.icmp_signed("!=", (index & 8).value, (index & 0).value)
        return self.vec(self.builder.select(is_high, picked[1], picked[0]))

    def lookup_lanes(self, table: ir.Value, index: Vec) -> Vec:
        """Floats at table[index & 15], lane by lane, where there is no permute instruction."""
        wide = self.builder.zext((index & 15).value, ir.VectorType(I64, LANES))
        result = self.zeros().value
        for lane in range(LANES):
            offset = self.builder.shl(self.builder.extract_element(wide, const(lane, I32)), const(2))
            result = self.builder.insert_element(result, self.load(table, offset, F32), const(lane, I32))
        return self.vec(result)


class Variables:
    """Vectors that a loop changes, at first as given: on the stack; LLVM makes registers of them."""

    def __init__(self, e: Emitter, values: Sequence[Vec]) -> None:
        self.builder = e.builder
        self.places = [cgutils.alloca_once_value(e.builder, value.value) for value in values]

    def load(self) -> list[Vec]:
        return [Vec(self.builder, self.builder.load(place)) for place in self.places]

    def save(self, values: Sequence[Vec]) -> None:
        for place, value in zip(self.places, values, strict=True):
            self.builder.store(value.value, place)


class Steps:
    """`(i + bias) * scale + offset` for 4-bit (or narrower) i: a table lookup where that is cheaper than arithmetic.

    Only the low bits of an index count. Both ways round alike: the product, then the sum.
    """

    def __init__(self, e: Emitter, scale: Vec, offset: Vec | None = None, bias: int = 0, mask: int = 15) -> None:
        self.e, self.scale, self.offset, self.bias, self.mask = e, scale, offset, bias, mask
        if HAS_AVX512:
            values = e.vec(const_vec(F32, [float((i & mask) + bias) for i in range(16)])) * scale
            self.table = values if offset is None else values + offset

    def __getitem__(self, index: Vec) -> Vec:
        if HAS_AVX512:
            return self.e.lookup(self.table, index)
        return self.e.linear(index, self.bias, self.scale, self.offset, self.mask)


class Codebook:
    """`values[i] * scale` for 4-bit i. Only the low bits of an index count."""

    def __init__(self, e: Emitter, values: Sequence[float], scale: Vec) -> None:
        self.e, self.values, self.scale = e, [float(value) for value in values], scale
        if HAS_AVX512:
            self.table = e.vec(const_vec(F32, self.values)) * scale
        elif HAS_AVX2:
            self.low = e.vec(const_vec(F32, self.values[:8])) * scale
            self.high = e.vec(const_vec(F32, self.values[8:])) * scale

    def __getitem__(self, index: Vec) -> Vec:
        if HAS_AVX512:
            return self.e.lookup(self.table, index)
        if HAS_AVX2:
            return self.e.lookup_halves(self.low, self.high, index)
        return self.e.lookup_lanes(self.e.table(F32, self.values), index) * self.scale
