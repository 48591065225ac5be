"""Decoders of the K types: super-blocks of 256 values with quantised scales per group.

Block layouts and formulas: `quant.kquants`.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.decoder import Decoder, group_floats, quants
from overspill.kernels.numba.emit import F32, I8, I32, Emitter, Steps, Vec, const, const_vec
from overspill.kernels.numba.target import LANES


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


def _q4_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    raw = quants(e, unit, e.offset(i_run, 32, 16), 32)
    for group in range(2):
        values = Steps(e, group_floats(e, scratch, i_run, 2, group), group_floats(e, scratch, i_run, 2, group, 8))
        yield from (values[q >> 4 if group else q] for q in raw)


def _q5_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    raw = quants(e, unit, e.offset(i_run, 32, 48), 32)
    shift = e.splat(e.builder.trunc(e.offset(i_run, 2), I32))
    high = [h >> shift for h in quants(e, unit, 16, 32)]
    for group in range(2):
        step = group_floats(e, scratch, i_run, 2, group)
        offset = group_floats(e, scratch, i_run, 2, group, 8)
        for q, h in zip(raw, high, strict=True):
            value = (q >> 4 if group else q & 15) | h << 4 - group & 16
            yield value.to_float() * step + offset


def _prepare_q6_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    e.store(e.bytes_s(unit, 192, 16).to_float() * _splat16(e, unit, 208), scratch, 0)


def _q6_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    low = quants(e, unit, e.offset(i_run, 64), 64)
    high = quants(e, unit, e.offset(i_run, 32, 128), 32)
    n_parts = len(high)
    for quarter in range(4):
        half = low[n_parts * (quarter % 2) :][:n_parts]
        for part, (q, h) in enumerate(zip(half, high, strict=True)):
            top = h << 4 - 2 * quarter if quarter < 2 else h >> 2 * quarter - 4
            value = (q & 15 if quarter < 2 else q >> 4) | top & 48
            group = 2 * quarter + part * LANES // 16
            yield (value - 32).to_float() * group_floats(e, scratch, i_run, 8, group)


def _prepare_q2_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * scale, scratch[16 + g] = -dmin * min of group g."""
    scales = e.bytes_u(unit, 0, 16)
    e.store((scales & 15).to_float() * _splat16(e, unit, 80), scratch, 0)
    e.store((scales >> 4).to_float() * (_splat16(e, unit, 82) * -1.0), scratch, 64)


def _q2_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    raw = quants(e, unit, e.offset(i_run, 32, 16), 32)
    for quarter in range(4):
        for part, q in enumerate(raw):
            group = 2 * quarter + part * LANES // 16
            step = group_floats(e, scratch, i_run, 8, group)
            offset = group_floats(e, scratch, i_run, 8, group, 16)
            yield Steps(e, step, offset, mask=3)[q >> 2 * quarter]


def _prepare_q3_k(e: Emitter, unit: ir.Value, scratch: ir.Value) -> None:
    """scratch[g] = d * (scale - 32) of group g, from 6-bit fields."""
    low = [e.load_u(unit, 96, 32), e.load_u(unit, 100, 32)]
    high = e.load_u(unit, 104, 32)
    words = [e.builder.or_(_masked(e, low[i % 2], i // 2 * 4, 15), _masked(e, high, 2 * i, 3, 4)) for i in range(4)]
    e.store((_pack_words(e, words) - 32).to_float() * _splat16(e, unit, 108), scratch, 0)


def _q3_k(e: Emitter, unit: ir.Value, i_run: ir.Value, scratch: ir.Value) -> Iterator[Vec]:
    raw = quants(e, unit, e.offset(i_run, 32, 32), 32)
    shift = e.splat(e.builder.trunc(e.offset(i_run, 4), I32))
    high = [h >> shift for h in quants(e, unit, 0, 32)]
    for quarter in range(4):
        for part, (q, h) in enumerate(zip(raw, high, strict=True)):
            step = group_floats(e, scratch, i_run, 8, 2 * quarter + part * LANES // 16)
            top = h << 2 - quarter if quarter < 3 else h >> 1
            yield Steps(e, step, bias=-4, mask=7)[q >> 2 * quarter & 3 | top & 4]


_T = TensorType
DECODERS: dict[TensorType, Decoder] = {
    _T.Q2_K: Decoder(256, 84, _q2_k, 2, _prepare_q2_k),
    _T.Q3_K: Decoder(256, 110, _q3_k, 2, _prepare_q3_k),
    _T.Q4_K: Decoder(256, 144, _q4_k, 4, _prepare_scale_min),
    _T.Q5_K: Decoder(256, 176, _q5_k, 4, _prepare_scale_min),
    _T.Q6_K: Decoder(256, 210, _q6_k, 2, _prepare_q6_k),
}
