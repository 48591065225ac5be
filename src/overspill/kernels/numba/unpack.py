"""How weights become bytes: the types whose values are steps of an integer below 256.

An unpacker turns the units at one place of sixteen rows into groups of 32 values: value = step * q + offset, q an
unsigned byte, step and offset float32, for all 32 or for each 16. Rounded in this way (step, offset, then one
fused multiplication) the value is bit-equal to `quant.dequant`, where the block layouts and formulas are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overspill.gguf.types import TensorType
from overspill.kernels.numba.emit import I32, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES, Lanes
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS
from overspill.quant.codebooks import FP4_VALUES, IQ4_VALUES

# Of every byte, in pairs.
_LOW, _HIGH, _TWO_BITS, _ONE_BIT, _SIGN = 0x0F0F, -0x0F10, 0x0303, 0x0101, -0x7F80


class Group(NamedTuple):
    """32 values of every row: 8 vectors of bytes (as 16-bit integers); one step and offset, or two for the halves."""

    quants: Sequence[Vec]
    steps: Sequence[Vec]
    offsets: Sequence[Vec]


@dataclass(frozen=True)
class Unpacker:
    """How to read one unit of `n_elements` values in `n_bytes`. largest: a byte may be; n_steps: of a group."""

    n_elements: int
    n_bytes: int
    run: Callable[[Lanes], Iterator[Group]]
    largest: int
    n_steps: int = 1

    @property
    def n_groups(self) -> int:
        return self.n_elements // 32


def _group(quants: Sequence[Vec], step: Vec, bias: float) -> Group:
    """step * (q + bias)."""
    return Group(quants, [step], [step * bias])


def _pairs(rows: Lanes, offset: int, n_bytes: int = 16) -> list[Vec]:
    return [quad.as_shorts() for quad in rows.quads(offset, n_bytes)]


def _nibbles(raw: Sequence[Vec]) -> list[Vec]:
    """All low nibbles, then all high ones."""
    return [q & _LOW for q in raw] + [q >> 4 & _LOW for q in raw]


# --- One block of 32


def _q8_0(rows: Lanes) -> Iterator[Group]:
    yield _group([q ^ _SIGN for q in _pairs(rows, 2, 32)], rows.halves(0), -128.0)


def _q4_0(rows: Lanes) -> Iterator[Group]:
    yield _group(_nibbles(_pairs(rows, 2)), rows.halves(0), -8.0)


def _q4_1(rows: Lanes) -> Iterator[Group]:
    yield Group(_nibbles(_pairs(rows, 4)), [rows.halves(0)], [rows.halves(2)])


def _fifth_bits(rows: Lanes, offset: int) -> list[Vec]:
    """32 bits to bytes 0 or 16. The product moves bit i of four to byte i."""
    bits = rows.words(offset)
    return [((bits >> 4 * i & 15) * 0x00204081 & 0x01010101).as_shorts() << 4 for i in range(8)]


def _q5_0(rows: Lanes) -> Iterator[Group]:
    quants = [q | high for q, high in zip(_nibbles(_pairs(rows, 6)), _fifth_bits(rows, 2), strict=True)]
    yield _group(quants, rows.halves(0), -16.0)


def _q5_1(rows: Lanes) -> Iterator[Group]:
    quants = [q | high for q, high in zip(_nibbles(_pairs(rows, 8)), _fifth_bits(rows, 4), strict=True)]
    yield Group(quants, [rows.halves(0)], [rows.halves(2)])


def _iq4_nl(rows: Lanes) -> Iterator[Group]:
    yield _group([_iq4(rows, q) for q in _nibbles(_pairs(rows, 2))], rows.halves(0), -128.0)


def _iq4(rows: Lanes, index: Vec) -> Vec:
    return rows.looked_up([value + 128 for value in IQ4_VALUES], index)


def _mxfp4(rows: Lanes) -> Iterator[Group]:
    e, exponent = rows.e, rows.bytes(0)
    is_tiny = e.builder.icmp_unsigned("<", exponent.value, const_vec(I32, [2] * N_LANES))
    tiny = e.vec(e.builder.shl(const_vec(I32, [0x00200000] * N_LANES), (exponent & 1).value))
    step = e.select(is_tiny, tiny, exponent - 1 << 23).as_float()
    quants = [rows.looked_up([value + 12 for value in FP4_VALUES], q) for q in _nibbles(_pairs(rows, 1))]
    yield _group(quants, step, -12.0)


# --- Super-blocks of 256


def _scales_and_minima(rows: Lanes) -> Iterator[tuple[Vec, Vec]]:
    """Q4_K, Q5_K: d * scale and -dmin * min of each group, from 6-bit fields."""
    both, first, second, third = rows.quads(0)
    d, negative_dmin = rows.half_of(both), rows.half_of(both >> 16) * -1.0
    for group in range(8):
        at = 8 * (group % 4)
        if group < 4:
            scale, minimum = first >> at & 63, second >> at & 63
        else:
            scale = third >> at & 15 | (first >> at + 6 & 3) << 4
            minimum = third >> at + 4 & 15 | (second >> at + 6 & 3) << 4
        yield scale.to_float() * d, minimum.to_float() * negative_dmin


def _q4_k(rows: Lanes) -> Iterator[Group]:
    scales = _scales_and_minima(rows)
    for run in range(4):
        raw = _pairs(rows, 16 + 32 * run, 32)
        step, offset = next(scales)
        yield Group([q & _LOW for q in raw], [step], [offset])
        step, offset = next(scales)
        yield _of_high_nibbles(raw, step, offset)


def _shifted(raw: Sequence[Vec], step: Vec, offset: Vec) -> Group:
    return Group([q >> 4 & _LOW for q in raw], [step], [offset])


def _left_in_place(raw: Sequence[Vec], step: Vec, offset: Vec) -> Group:
    """Sixteen times the number, a sixteenth of the step, and the same bits."""
    return Group([q & _HIGH for q in raw], [step * 0.0625], [offset])


_of_high_nibbles = _left_in_place if HAS_BYTE_PRODUCTS else _shifted


def _q5_k(rows: Lanes) -> Iterator[Group]:
    high = _pairs(rows, 16, 32)
    scales = _scales_and_minima(rows)
    for run in range(4):
        nibbles = _nibbles(_pairs(rows, 48 + 32 * run, 32))
        for i, half in enumerate((nibbles[:8], nibbles[8:])):
            step, offset = next(scales)
            quants = [q | (h >> 2 * run + i & _ONE_BIT) << 4 for q, h in zip(half, high, strict=True)]
            yield Group(quants, [step], [offset])


def _halved(quants: Sequence[Vec], steps: Sequence[Vec], bias: float) -> Group:
    return Group(quants, steps, [step * bias for step in steps])


def _q6_k(rows: Lanes) -> Iterator[Group]:
    d, scales = rows.halves(208), rows.quads(192)
    for half in range(2):
        low, high = _pairs(rows, 64 * half, 64), _pairs(rows, 128 + 32 * half, 32)
        for quarter in range(4):
            nibbles = low[8 * (quarter % 2) :][:8]
            nibbles = [(q >> 4 if quarter >= 2 else q) & _LOW for q in nibbles]
            quants = [q | (h >> 2 * quarter & _TWO_BITS) << 4 for q, h in zip(nibbles, high, strict=True)]
            i_scale = 8 * half + 2 * quarter
            steps = [rows.signed_byte(scales[i // 4], i % 4).to_float() * d for i in (i_scale, i_scale + 1)]
            yield _halved(quants, steps, -32.0)


def _two_bits(rows: Lanes, offset: int) -> Iterator[list[Vec]]:
    """8 groups: per 32 bytes, four fields of 2 bits, field-major."""
    for half in range(2):
        raw = _pairs(rows, offset + 32 * half, 32)
        yield from ([q >> 2 * i & _TWO_BITS for q in raw] for i in range(4))


def _q2_k(rows: Lanes) -> Iterator[Group]:
    both, scales = rows.words(80), rows.quads(0)
    d, negative_dmin = rows.half_of(both), rows.half_of(both >> 16) * -1.0
    for i, quants in enumerate(_two_bits(rows, 16)):
        packed = [scales[j // 4] >> 8 * (j % 4) for j in (2 * i, 2 * i + 1)]
        steps = [(scale & 15).to_float() * d for scale in packed]
        offsets = [(scale >> 4 & 15).to_float() * negative_dmin for scale in packed]
        yield Group(quants, steps, offsets)


def _q3_k(rows: Lanes) -> Iterator[Group]:
    d, high = rows.halves(108), _pairs(rows, 0, 32)
    words = [rows.words(96), rows.words(100), rows.words(104)]
    for i, quants in enumerate(_two_bits(rows, 32)):
        quants = [q | (h >> i & _ONE_BIT) << 2 for q, h in zip(quants, high, strict=True)]
        steps = [(_six_bits(words, j) - 32).to_float() * d for j in (2 * i, 2 * i + 1)]
        yield _halved(quants, steps, -4.0)


def _six_bits(words: Sequence[Vec], j: int) -> Vec:
    """Scale j of 16: four bits in the first two words, two in the third."""
    low = words[j // 4 % 2] >> 8 * (j % 4) + 4 * (j // 8) & 15
    return low | (words[2] >> 8 * (j % 4) + 2 * (j // 4) & 3) << 4


def _iq4_xs(rows: Lanes) -> Iterator[Group]:
    d, high, low = rows.halves(0), rows.shorts(2), rows.words(4)
    for i in range(8):
        scale = (low >> 4 * i & 15 | (high >> 2 * i & 3) << 4) - 32
        quants = [_iq4(rows, q) for q in _nibbles(_pairs(rows, 8 + 16 * i))]
        yield _group(quants, scale.to_float() * d, -128.0)


_T = TensorType
UNPACKERS: dict[TensorType, Unpacker] = {
    _T.Q8_0: Unpacker(32, 34, _q8_0, 255),
    _T.Q4_0: Unpacker(32, 18, _q4_0, 15),
    _T.Q4_1: Unpacker(32, 20, _q4_1, 15),
    _T.Q5_0: Unpacker(32, 22, _q5_0, 31),
    _T.Q5_1: Unpacker(32, 24, _q5_1, 31),
    _T.IQ4_NL: Unpacker(32, 18, _iq4_nl, 241),
    _T.MXFP4: Unpacker(32, 17, _mxfp4, 24),
    _T.Q2_K: Unpacker(256, 84, _q2_k, 3, 2),
    _T.Q3_K: Unpacker(256, 110, _q3_k, 7, 2),
    _T.Q4_K: Unpacker(256, 144, _q4_k, 15),
    _T.Q5_K: Unpacker(256, 176, _q5_k, 31),
    _T.Q6_K: Unpacker(256, 210, _q6_k, 63, 2),
    _T.IQ4_XS: Unpacker(256, 136, _iq4_xs, 241),
}
