"""Decoders of the plain floats and of the types whose block has one scale (and perhaps one offset).

Block layouts and formulas: `quant.linear`.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.decoder import Decoder, nibbles, quants
from overspill.kernels.numba.emit import I16, I32, Emitter, Steps, Vec, const_vec
from overspill.kernels.numba.target import LANES, UNIT_ELEMENTS


def _f32(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        yield e.floats(unit, 4 * at, align=1)


def _f16(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        yield e.halves(unit, 2 * at)


def _bf16(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        raw = e.load(unit, 2 * at, ir.VectorType(I16, LANES))
        yield (e.vec(e.builder.zext(raw, ir.VectorType(I32, LANES))) << 16).as_float()


def _q8_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 0)
    for at in range(0, 32, LANES):
        yield e.bytes_s(unit, 2 + at).to_float() * d


def _q4_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return nibbles(e, unit, 2, Steps(e, e.half(unit, 0), bias=-8))


def _q4_1(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return nibbles(e, unit, 4, Steps(e, e.half(unit, 0), e.half(unit, 2)))


def _five_bits(e: Emitter, unit: ir.Value, high: int, low: int) -> Iterator[Vec]:
    """4 bytes of fifth bits at `high`, 16 bytes of nibbles at `low`, to integers 0..31."""
    raw = quants(e, unit, low, 16)
    for i, q in enumerate([q & 15 for q in raw] + [q >> 4 for q in raw]):
        yield e.select(e.mask(unit, high + i * LANES // 8), q | 16, q)


def _q5_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 0)
    return ((q - 16).to_float() * d for q in _five_bits(e, unit, 2, 6))


def _q5_1(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d, m = e.half(unit, 0), e.half(unit, 2)
    return (q.to_float() * d + m for q in _five_bits(e, unit, 4, 8))


def _q1_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 0)
    return (e.select(e.mask(unit, 2 + at // 8), d, d * -1.0) for at in range(0, 128, LANES))


def _q2_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    values = Steps(e, e.half(unit, 0), bias=-1, mask=3)
    shifts = e.vec(const_vec(I32, range(0, 2 * LANES, 2)))
    for at in range(0, 16, LANES // 4):
        yield values[e.splat(e.load_u(unit, 2 + at, 2 * LANES)) >> shifts]


def _tq2_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    values = Steps(e, e.half(unit, 64), bias=-1, mask=3)
    raw = quants(e, unit, e.offset(i_run, 32), 32)
    return (values[q >> 2 * quarter] for quarter in range(4) for q in raw)


def _tq1_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 52)
    for raw in (quants(e, unit, 0, 32), quants(e, unit, 32, 16)):
        yield from (_digit(q * 3**n) * d for n in range(5) for q in raw)
    last = e.bytes_u(unit, 48, 4)
    for at in range(0, 16, LANES):
        powers = e.vec(const_vec(I32, [3 ** (i // 4) for i in range(at, at + LANES)]))
        yield _digit(e.shuffle(last, last, [i % 4 for i in range(LANES)]) * powers) * d


def _digit(shifted: Vec) -> Vec:
    """The top ternary digit of a byte, less one."""
    return ((((shifted & 255) * 3) >> 8) - 1).to_float()


_T = TensorType
DECODERS: dict[TensorType, Decoder] = {
    _T.F32: Decoder(UNIT_ELEMENTS, 4 * UNIT_ELEMENTS, _f32, is_plain=True),
    _T.F16: Decoder(UNIT_ELEMENTS, 2 * UNIT_ELEMENTS, _f16, is_plain=True),
    _T.BF16: Decoder(UNIT_ELEMENTS, 2 * UNIT_ELEMENTS, _bf16, is_plain=True),
    _T.Q8_0: Decoder(32, 34, _q8_0),
    _T.Q4_0: Decoder(32, 18, _q4_0),
    _T.Q4_1: Decoder(32, 20, _q4_1),
    _T.Q5_0: Decoder(32, 22, _q5_0),
    _T.Q5_1: Decoder(32, 24, _q5_1),
    _T.Q1_0: Decoder(128, 18, _q1_0),
    _T.Q2_0: Decoder(64, 18, _q2_0),
    _T.TQ1_0: Decoder(256, 54, _tq1_0),
    _T.TQ2_0: Decoder(256, 66, _tq2_0, 2),
}
