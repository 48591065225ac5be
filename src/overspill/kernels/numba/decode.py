"""Block decoders in vector IR: one per tensor type, bit-equal to `quant.dequant`.

A decoder turns one unit (a block; 32 values for the plain floats) into vectors of float32 in ascending element
order. Types with scales per group first `prepare` them: float steps (and offsets) go to a small stack array, then
`run(i)` decodes the i-th of `n_runs` equal parts with `i` known only at run time, which keeps the code small.
Block layouts: the GGUF block formats, as in `quant.linear`, `quant.kquants` and `quant.codebooks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.emit import F32, I8, I16, I32, Codebook, Emitter, Steps, Vec, const, const_vec
from overspill.kernels.numba.target import LANES, UNIT_ELEMENTS
from overspill.quant.codebooks import FP4_VALUES, IQ4_VALUES

Prepare = Callable[[Emitter, ir.Value, ir.Value], None]
Run = Callable[[Emitter, ir.Value, ir.Value, ir.Value], Iterator[Vec]]
SCRATCH_FLOATS = 32


@dataclass(frozen=True)
class Decoder:
    """How to read one unit: `run(e, unit, i_run, scratch)` yields `n_elements / n_runs` values, LANES at a time."""

    n_elements: int
    n_bytes: int
    run: Run
    n_runs: int = 1
    prepare: Prepare | None = None

    @property
    def run_elements(self) -> int:
        return self.n_elements // self.n_runs


def _quants(e: Emitter, unit: ir.Value, offset: ir.Value | int, n_bytes: int) -> list[Vec]:
    start = offset if isinstance(offset, ir.Value) else const(offset)
    return [e.bytes_u(unit, e.builder.add(start, const(at))) for at in range(0, n_bytes, LANES)]


# Plain floats


def _f32(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        yield e.floats(unit, 4 * at)


def _f16(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        yield e.halves(unit, 2 * at)


def _bf16(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for at in range(0, UNIT_ELEMENTS, LANES):
        raw = e.load(unit, 2 * at, ir.VectorType(I16, LANES))
        yield (e.vec(e.builder.zext(raw, ir.VectorType(I32, LANES))) << 16).as_float()


# One scale per block of 32


def _q8_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 0)
    for at in range(0, 32, LANES):
        yield e.bytes_s(unit, 2 + at).to_float() * d


def _nibbles(e: Emitter, unit: ir.Value, offset: ir.Value | int, values: Steps | Codebook) -> Iterator[Vec]:
    """16 bytes: low nibbles are the first 16 values, high ones the next."""
    quants = _quants(e, unit, offset, 16)
    yield from (values[q] for q in quants)
    yield from (values[q >> 4] for q in quants)


def _q4_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return _nibbles(e, unit, 2, Steps(e, e.half(unit, 0), bias=-8))


def _q4_1(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return _nibbles(e, unit, 4, Steps(e, e.half(unit, 0), e.half(unit, 2)))


def _iq4_nl(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    return _nibbles(e, unit, 2, Codebook(e, IQ4_VALUES, e.half(unit, 0)))


def _mxfp4(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    b = e.builder
    exponent = e.load_u(unit, 0, 8)
    tiny = b.shl(const(0x00200000, I32), exponent)
    normal = b.shl(b.sub(exponent, const(1, I32)), const(23, I32))
    bits = b.select(b.icmp_unsigned("<", exponent, const(2, I32)), tiny, normal)
    return _nibbles(e, unit, 1, Codebook(e, FP4_VALUES, e.splat(b.bitcast(bits, F32))))


def _five_bits(e: Emitter, unit: ir.Value, high: int, low: int) -> Iterator[Vec]:
    """4 bytes of fifth bits at `high`, 16 bytes of nibbles at `low`, to integers 0..31."""
    quants = _quants(e, unit, low, 16)
    for i, q in enumerate([q & 15 for q in quants] + [q >> 4 for q in quants]):
        bits = e.load(unit, high + i * LANES // 8, ir.IntType(LANES))
        is_set = e.builder.bitcast(bits, ir.VectorType(ir.IntType(1), LANES))
        yield e.vec(e.builder.select(is_set, (q | 16).value, q.value))


def _q5_0(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d = e.half(unit, 0)
    return ((q - 16).to_float() * d for q in _five_bits(e, unit, 2, 6))


def _q5_1(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    d, m = e.half(unit, 0), e.half(unit, 2)
    return (q.to_float() * d + m for q in _five_bits(e, unit, 4, 8))


# Super-blocks of 256


def _pack_words(e: Emitter, words: list[ir.Value]) -> Vec:
    """Four i32 words as 16 unsigned bytes, widened to 16 lanes of int32."""
    b = e.builder
    packed = ir.Constant(ir.VectorType(I32, 4), ir.Undefined)
    for lane, word in enumerate(words):
        packed = b.insert_element(packed, word, const(lane, I32))
    as_bytes = b.bitcast(packed, ir.VectorType(I8, 16))
    return e.vec(b.zext(as_bytes, ir.VectorType(I32, 16)))


def _masked(e: Emitter, word: ir.Value, right: int, mask: int, left: int = 0) -> ir.Value:
    """((word >> right) & mask in every byte) << left."""
    b = e.builder
    kept = b.and_(b.lshr(word, const(right, I32)), const(mask * 0x01010101, I32))
    return b.shl(kept, const(left, I32))


def _splat16(e: Emitter, unit: ir.Value, offset: int) -> Vec:
    """One half as float32 in 16 lanes, whatever LANES is."""
    return e.shuffle(d := e.half(unit, offset), d, [0] * 16)


def _prepare_scale_min(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """Q4_K, Q5_K: scratch[g] = d * scale, scratch[8 + g] = -dmin * min of group g, from 6-bit fields."""
    b = e.builder
    s0, s1, s2 = (e.load_u(unit, 4 + 4 * i, 32) for i in range(3))
    words = [
        _masked(e, s0, 0, 63),
        b.or_(_masked(e, s2, 0, 15), _masked(e, s0, 6, 3, 4)),
        _masked(e, s1, 0, 63),
        b.or_(_masked(e, s2, 4, 15), _masked(e, s1, 6, 3, 4)),
    ]
    sign = e.vec(const_vec(F32, [1.0] * 8 + [-1.0] * 8))
    both = e.halves(unit, 0, 2)
    factors = e.shuffle(both, both, [0] * 8 + [1] * 8) * sign
    e.store(_pack_words(e, words).to_float() * factors, scratch, 0)


def _group_floats(e: Emitter, scratch: ir.Value, i_run: ir.Value, n_per_run: int, group: int, base: int = 0) -> Vec:
    return e.splat_float(scratch, e.offset(i_run, 4 * n_per_run, 4 * (base + group)))


def _q4_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    quants = _quants(e, unit, e.offset(i_run, 32, 16), 32)
    for group in range(2):
        values = Steps(e, _group_floats(e, scratch, i_run, 2, group), _group_floats(e, scratch, i_run, 2, group, 8))
        yield from (values[q >> 4 if group else q] for q in quants)


def _q5_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    quants = _quants(e, unit, e.offset(i_run, 32, 48), 32)
    shift = e.splat(e.builder.trunc(e.offset(i_run, 2), I32))
    high = [h >> shift for h in _quants(e, unit, 16, 32)]
    for group in range(2):
        step = _group_floats(e, scratch, i_run, 2, group)
        offset = _group_floats(e, scratch, i_run, 2, group, 8)
        for q, h in zip(quants, high, strict=True):
            value = (q >> 4 if group else q & 15) | h << 4 - group & 16
            yield value.to_float() * step + offset


def _prepare_q6_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    e.store(e.bytes_s(unit, 192, 16).to_float() * _splat16(e, unit, 208), scratch, 0)


def _q6_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    low = _quants(e, unit, e.offset(i_run, 64), 64)
    high = _quants(e, unit, e.offset(i_run, 32, 128), 32)
    n_parts = len(high)
    for quarter in range(4):
        half = low[n_parts * (quarter % 2) :][:n_parts]
        for part, (q, h) in enumerate(zip(half, high, strict=True)):
            top = h << 4 - 2 * quarter if quarter < 2 else h >> 2 * quarter - 4
            value = (q & 15 if quarter < 2 else q >> 4) | top & 48
            group = 2 * quarter + part * LANES // 16
            yield (value - 32).to_float() * _group_floats(e, scratch, i_run, 8, group)


def _prepare_q2_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * scale, scratch[16 + g] = -dmin * min of group g."""
    scales = e.bytes_u(unit, 0, 16)
    e.store((scales & 15).to_float() * _splat16(e, unit, 80), scratch, 0)
    e.store((scales >> 4).to_float() * (_splat16(e, unit, 82) * -1.0), scratch, 64)


def _q2_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    quants = _quants(e, unit, e.offset(i_run, 32, 16), 32)
    for quarter in range(4):
        for part, q in enumerate(quants):
            group = 2 * quarter + part * LANES // 16
            step = _group_floats(e, scratch, i_run, 8, group)
            offset = _group_floats(e, scratch, i_run, 8, group, 16)
            yield Steps(e, step, offset, mask=3)[q >> 2 * quarter]


def _prepare_q3_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * (scale - 32) of group g, from 6-bit fields."""
    low = [e.load_u(unit, 96, 32), e.load_u(unit, 100, 32)]
    high = e.load_u(unit, 104, 32)
    words = [e.builder.or_(_masked(e, low[i % 2], i // 2 * 4, 15), _masked(e, high, 2 * i, 3, 4)) for i in range(4)]
    e.store((_pack_words(e, words) - 32).to_float() * _splat16(e, unit, 108), scratch, 0)


def _q3_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    quants = _quants(e, unit, e.offset(i_run, 32, 32), 32)
    shift = e.splat(e.builder.trunc(e.offset(i_run, 4), I32))
    high = [h >> shift for h in _quants(e, unit, 0, 32)]
    for quarter in range(4):
        for part, (q, h) in enumerate(zip(quants, high, strict=True)):
            step = _group_floats(e, scratch, i_run, 8, 2 * quarter + part * LANES // 16)
            top = h << 2 - quarter if quarter < 3 else h >> 1
            yield Steps(e, step, bias=-4, mask=7)[q >> 2 * quarter & 3 | top & 4]


def _prepare_iq4_xs(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * (scale - 32) of group g, from 4 + 2 bits."""
    low = e.splat(e.load_u(unit, 4, 32), 8) >> e.vec(const_vec(I32, range(0, 32, 4)))
    high = e.splat(e.load_u(unit, 2, 16), 8) >> e.vec(const_vec(I32, range(0, 16, 2)))
    scale = (low & 15 | (high & 3) << 4) - 32
    d = e.half(unit, 0)
    e.store(scale.to_float() * e.shuffle(d, d, [0] * 8), scratch, 0)


def _iq4_xs(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    for group in range(2):
        values = Codebook(e, IQ4_VALUES, _group_floats(e, scratch, i_run, 2, group))
        yield from _nibbles(e, unit, e.offset(i_run, 32, 8 + 16 * group), values)


_T = TensorType
DECODERS: dict[TensorType, Decoder] = {
    _T.F32: Decoder(UNIT_ELEMENTS, 4 * UNIT_ELEMENTS, _f32),
    _T.F16: Decoder(UNIT_ELEMENTS, 2 * UNIT_ELEMENTS, _f16),
    _T.BF16: Decoder(UNIT_ELEMENTS, 2 * UNIT_ELEMENTS, _bf16),
    _T.Q8_0: Decoder(32, 34, _q8_0),
    _T.Q4_0: Decoder(32, 18, _q4_0),
    _T.Q4_1: Decoder(32, 20, _q4_1),
    _T.Q5_0: Decoder(32, 22, _q5_0),
    _T.Q5_1: Decoder(32, 24, _q5_1),
    _T.IQ4_NL: Decoder(32, 18, _iq4_nl),
    _T.MXFP4: Decoder(32, 17, _mxfp4),
    _T.Q2_K: Decoder(256, 84, _q2_k, 2, _prepare_q2_k),
    _T.Q3_K: Decoder(256, 110, _q3_k, 2, _prepare_q3_k),
    _T.Q4_K: Decoder(256, 144, _q4_k, 4, _prepare_scale_min),
    _T.Q5_K: Decoder(256, 176, _q5_k, 4, _prepare_scale_min),
    _T.Q6_K: Decoder(256, 210, _q6_k, 2, _prepare_q6_k),
    _T.IQ4_XS: Decoder(256, 136, _iq4_xs, 4, _prepare_iq4_xs),
}
