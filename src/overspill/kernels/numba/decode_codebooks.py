"""Decoders of the types that look values up: IQ4, the 4-bit floats, and the IQ1-IQ3 grids.

Block layouts and formulas: `quant.codebooks`. A grid point is one word of 4 or 8 signed bytes in a constant table;
words are loaded one by one and widened together.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.decoder import Decoder, group_floats, nibbles
from overspill.kernels.numba.emit import F32, I32, Codebook, Emitter, Vec, const, const_vec
from overspill.kernels.numba.target import LANES
from overspill.quant import grids
from overspill.quant.codebooks import FP4_VALUES, IQ1_DELTA, IQ4_VALUES
from overspill.quant.grids import Grid


def _iq4_nl(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return nibbles(e, unit, 2, Codebook(e, IQ4_VALUES, e.half(unit, 0)))


def _mxfp4(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    b = e.builder
    exponent = e.load_u(unit, 0, 8)
    tiny = b.shl(const(0x00200000, I32), exponent)
    normal = b.shl(b.sub(exponent, const(1, I32)), const(23, I32))
    bits = b.select(b.icmp_unsigned("<", exponent, const(2, I32)), tiny, normal)
    return nibbles(e, unit, 1, Codebook(e, FP4_VALUES, e.splat(b.bitcast(bits, F32))))


def _prepare_iq4_xs(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * (scale - 32) of group g, from 4 + 2 bits."""
    low = e.splat(e.load_u(unit, 4, 32), 8) >> e.vec(const_vec(I32, range(0, 32, 4)))
    high = e.splat(e.load_u(unit, 2, 16), 8) >> e.vec(const_vec(I32, range(0, 16, 2)))
    scale = (low & 15 | (high & 3) << 4) - 32
    d = e.half(unit, 0)
    e.store(scale.to_float() * e.shuffle(d, d, [0] * 8), scratch, 0)


def _iq4_xs(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for group in range(2):
        values = Codebook(e, IQ4_VALUES, group_floats(e, scratch, i_run, 2, group))
        yield from nibbles(e, unit, e.offset(i_run, 32, 8 + 16 * group), values)


def _ue4m3_half(code: int) -> float:
    """Half of an unsigned E4M3 number: bias 7, codes 0 and 0x7F are zero."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return mantissa * 2.0**-10 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 11)


_UE4M3_HALVES = tuple(_ue4m3_half(code) for code in range(256))


def _nvfp4(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    scales = e.table(F32, _UE4M3_HALVES)
    for group in range(4):
        scale = e.load(scales, e.offset(e.builder.zext(e.load_u(unit, group, 8), i_run.type), 4), F32)
        values = Codebook(e, FP4_VALUES, e.splat(scale))
        low = e.bytes_u(unit, 4 + 8 * group, 8)
        both = e.shuffle(low, low >> 4, range(16))
        for at in range(0, 16, LANES):
            yield values[e.shuffle(both, both, range(at, at + LANES))]


def _iq2_xxs(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    word = e.load_u(unit, e.offset(i_run, 8, 6), 32)
    index = [e.load_u(unit, e.offset(i_run, 8, 2 + i), 8) for i in range(4)]
    signs = [_seven_signs(e, e.bits(word, 7 * i, 127)) for i in range(4)]
    step = _half_step(e, unit, e.bits(word, 28, 15), 0.25)
    return _signed(e, _points(e, grids.IQ2_XXS, index), signs, [step] * 4)


def _iq2_xs(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    words = [e.load_u(unit, e.offset(i_run, 8, 2 + 2 * i), 16) for i in range(4)]
    signs = [_seven_signs(e, e.bits(word, 9, 127)) for word in words]
    points = _points(e, grids.IQ2_XS, [e.bits(word, 0, 511) for word in words])
    return _signed(e, points, signs, _nibble_steps(e, unit, e.offset(i_run, 1, 66)))


def _iq2_s(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    high = e.load_u(unit, e.offset(i_run, 1, 66), 8)
    index = [_index(e, unit, e.offset(i_run, 4, 2 + i), e.bits(high, 2 * i, 3)) for i in range(4)]
    signs = [e.load(unit, e.offset(i_run, 4, 34 + i), ir.IntType(8)) for i in range(4)]
    return _signed(e, _points(e, grids.IQ2_S, index), signs, _nibble_steps(e, unit, e.offset(i_run, 1, 74)))


def _iq3_xxs(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    word = e.load_u(unit, e.offset(i_run, 4, 66), 32)
    index = [e.load_u(unit, e.offset(i_run, 8, 2 + i), 8) for i in range(8)]
    signs = [_seven_signs(e, e.bits(word, 7 * i, 127)) for i in range(4)]
    step = _half_step(e, unit, e.bits(word, 28, 15), 0.5)
    return _signed(e, _points(e, grids.IQ3_XXS, index), signs, [step] * 4)


def _iq3_s(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    b = e.builder
    high = e.load_u(unit, e.offset(i_run, 1, 66), 8)
    index = [_index(e, unit, e.offset(i_run, 8, 2 + i), e.bits(high, i, 1)) for i in range(8)]
    signs = [e.load(unit, e.offset(i_run, 4, 74 + i), ir.IntType(8)) for i in range(4)]
    pair = e.load_u(unit, b.add(b.lshr(i_run, const(1)), const(106)), 8)
    nibble = b.and_(b.lshr(pair, b.shl(b.trunc(b.and_(i_run, const(1)), I32), const(2, I32))), const(15, I32))
    return _signed(e, _points(e, grids.IQ3_S, index), signs, [_odd_step(e, e.half(unit, 0), nibble)] * 4)


def _iq1_s(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    word = e.load_u(unit, e.offset(i_run, 2, 34), 16)
    index = [_index(e, unit, e.offset(i_run, 4, 2 + i), e.bits(word, 3 * i, 7)) for i in range(4)]
    step = _odd_step(e, e.half(unit, 0), e.bits(word, 12, 7))
    return _shifted(e, _points(e, grids.IQ1, index), [e.bits(word, 15, 1)] * 4, [step] * 4)


def _iq1_m(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    b = e.builder
    tops = [b.and_(e.load_u(unit, 48 + 2 * i, 16), const(0xF000, I32)) for i in range(4)]
    d_bits = tops[3]
    for i in range(3):
        d_bits = b.or_(d_bits, b.lshr(tops[i], const(12 - 4 * i, I32)))
    d = e.half_of(b.trunc(d_bits, ir.IntType(16)))
    pair = e.load_u(unit, b.add(e.offset(b.lshr(i_run, const(1)), 2), const(48)), 16)
    scales = b.lshr(pair, b.mul(b.trunc(b.and_(i_run, const(1)), I32), const(6, I32)))
    high = [e.load_u(unit, e.offset(i_run, 2, 32 + i), 8) for i in range(2)]
    tags = [e.bits(high[i // 2], 4 * (i % 2), 15) for i in range(4)]
    index = [_index(e, unit, e.offset(i_run, 4, i), e.bits(tag, 0, 7)) for i, tag in enumerate(tags)]
    steps = [_odd_step(e, d, e.bits(scales, 3 * (i // 2), 7)) for i in range(4)]
    return _shifted(e, _points(e, grids.IQ1, index), [e.bits(tag, 3, 1) for tag in tags], steps)


def _index(e: Emitter, unit: ir.Value, offset: ir.Value, high: ir.Value) -> ir.Value:
    """A grid index: the byte at `offset` and what comes above it."""
    return e.builder.or_(e.load_u(unit, offset, 8), e.builder.shl(high, const(8, I32)))


def _points(e: Emitter, grid: Grid, index: list[ir.Value]) -> list[Vec]:
    """Grid points as floats, LANES coordinates to a vector."""
    word = ir.IntType(8 * grid.n_dims)
    rows = grid.points().astype("i1").tobytes()
    size = grid.n_dims
    words = [int.from_bytes(rows[i : i + size], "little") for i in range(0, len(rows), size)]
    table = e.table(word, words)
    per_vec = LANES // size
    return [e.words(table, word, index[i : i + per_vec]) for i in range(0, len(index), per_vec)]


def _seven_signs(e: Emitter, bits: ir.Value) -> ir.Value:
    """A byte of sign bits from seven of them: the eighth makes their number even."""
    b = e.builder
    ones = b.call(e.intrinsic("llvm.ctpop.i32", I32, [I32]), [bits])
    return b.trunc(b.or_(bits, b.shl(ones, const(7, I32))), ir.IntType(8))


def _half_step(e: Emitter, unit: ir.Value, scale: ir.Value, factor: float) -> Vec:
    """d * (0.5 + scale) * factor."""
    return e.half(unit, 0) * (e.splat(scale).to_float() + 0.5) * factor


def _odd_step(e: Emitter, d: Vec, scale: ir.Value) -> Vec:
    """d * (1 + 2 scale)."""
    return d * (e.splat(scale).to_float() * 2.0 + 1.0)


def _nibble_steps(e: Emitter, unit: ir.Value, offset: ir.Value) -> list[Vec]:
    """Steps of four groups of 8 values: the low nibble is for the first two, the high one for the others."""
    pair = e.load_u(unit, offset, 8)
    low, high = (_half_step(e, unit, e.bits(pair, shift, 15), 0.25) for shift in (0, 4))
    return [low, low, high, high]


def _signed(e: Emitter, points: list[Vec], signs: list[ir.Value], steps: list[Vec]) -> Iterator[Vec]:
    """step * (sign * point); a sign byte and a step belong to 8 values each."""
    per_vec = LANES // 8
    for i, values in enumerate(points):
        mask = e.joined_mask(signs[i * per_vec : (i + 1) * per_vec])
        yield e.select(mask, values * -1.0, values) * _spread(e, steps[i * per_vec : (i + 1) * per_vec])


def _shifted(e: Emitter, points: list[Vec], is_down: list[ir.Value], steps: list[Vec]) -> Iterator[Vec]:
    """step * (point + delta), where delta is negative if the bit is set; both belong to 8 values each."""
    per_vec = LANES // 8
    deltas = [(e.splat(bit).to_float() * -2.0 + 1.0) * IQ1_DELTA for bit in is_down]
    for i, values in enumerate(points):
        part = slice(i * per_vec, (i + 1) * per_vec)
        yield (values + _spread(e, deltas[part])) * _spread(e, steps[part])


def _spread(e: Emitter, values: list[Vec]) -> Vec:
    """One value, or the halves of two, over the lanes."""
    if len(values) == 1 or values[0] is values[1]:
        return values[0]
    half = LANES // 2
    return e.shuffle(values[0], values[1], [*range(half), *range(LANES, LANES + half)])


_T = TensorType
DECODERS: dict[TensorType, Decoder] = {
    _T.IQ4_NL: Decoder(32, 18, _iq4_nl),
    _T.IQ4_XS: Decoder(256, 136, _iq4_xs, 4, _prepare_iq4_xs),
    _T.MXFP4: Decoder(32, 17, _mxfp4),
    _T.NVFP4: Decoder(64, 36, _nvfp4),
    _T.IQ2_XXS: Decoder(256, 66, _iq2_xxs, 8),
    _T.IQ2_XS: Decoder(256, 74, _iq2_xs, 8),
    _T.IQ2_S: Decoder(256, 82, _iq2_s, 8),
    _T.IQ3_XXS: Decoder(256, 98, _iq3_xxs, 8),
    _T.IQ3_S: Decoder(256, 110, _iq3_s, 8),
    _T.IQ1_S: Decoder(256, 50, _iq1_s, 8),
    _T.IQ1_M: Decoder(256, 56, _iq1_m, 8),
}
