"""How weights become bytes: the types whose values are steps of an integer below 256.

An unpacker turns the blocks at one place of sixteen rows into groups of 32 values:
value = step * scale * q + offset * minimum. q is an unsigned byte; scale and minimum are small integers, for all 32 or
for each 16; step and offset are float32, of the block. Layouts and formulas are those of `quant.dequant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    """32 values of every row: 8 vectors of bytes (as 16-bit integers), `times` as large as they should be; scales and
    minima as int32, one of each or two for the halves, or none where they would be 1."""

    quants: Sequence[Vec]
    scales: Sequence[Vec] = ()
    minima: Sequence[Vec] = ()
    times: int = 1


class Block(NamedTuple):
    """A block of every row. step, offset: float32. Its groups are emitted one after the other."""

    step: Vec
    offset: Vec
    groups: Iterable[Group]


@dataclass(frozen=True)
class Unpacker:
    """How to read a block of `n_elements` values. largest: a byte may be; n_scales: of a group."""

    n_elements: int
    run: Callable[[Lanes], Block]
    largest: int
    n_scales: int = 0

    @property
    def n_groups(self) -> int:
        return self.n_elements // 32


def _pairs(rows: Lanes, offset: int, n_bytes: int = 16) -> list[Vec]:
    return [quad.as_shorts() for quad in rows.quads(offset, n_bytes)]


def _nibbles(raw: Sequence[Vec]) -> list[Vec]:
    """All low nibbles, then all high ones."""
    return [q & _LOW for q in raw] + [q >> 4 & _LOW for q in raw]


def _biased(step: Vec, bias: float, groups: Iterable[Group]) -> Block:
    """step * scale * (q + bias); minima are as scales."""
    return Block(step, step * bias, groups)


# --- One group


def _q8_0(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -128.0, [Group([q ^ _SIGN for q in _pairs(rows, 2, 32)])])


def _q4_0(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -8.0, [Group(_nibbles(_pairs(rows, 2)))])


def _q4_1(rows: Lanes) -> Block:
    return Block(rows.halves(0), rows.halves(2), [Group(_nibbles(_pairs(rows, 4)))])


def _fifth_bits(rows: Lanes, offset: int) -> list[Vec]:
    """32 bits to bytes 0 or 16. The product moves bit i of four to byte i."""
    bits = rows.words(offset)
    return [((bits >> 4 * i & 15) * 0x00204081 & 0x01010101).as_shorts() << 4 for i in range(8)]


def _q5_0(rows: Lanes) -> Block:
    quants = [q | high for q, high in zip(_nibbles(_pairs(rows, 6)), _fifth_bits(rows, 2), strict=True)]
    return _biased(rows.halves(0), -16.0, [Group(quants)])


def _q5_1(rows: Lanes) -> Block:
    quants = [q | high for q, high in zip(_nibbles(_pairs(rows, 8)), _fifth_bits(rows, 4), strict=True)]
    return Block(rows.halves(0), rows.halves(2), [Group(quants)])


def _iq4_nl(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -128.0, [Group([_iq4(rows, q) for q in _nibbles(_pairs(rows, 2))])])


def _iq4(rows: Lanes, index: Vec) -> Vec:
    return rows.looked_up([value + 128 for value in IQ4_VALUES], index)


def _mxfp4(rows: Lanes) -> Block:
    e, exponent = rows.e, rows.bytes(0)
    is_tiny = e.builder.icmp_unsigned("<", exponent.value, const_vec(I32, [2] * N_LANES))
    tiny = e.vec(e.builder.shl(const_vec(I32, [0x00200000] * N_LANES), (exponent & 1).value))
    step = e.select(is_tiny, tiny, exponent - 1 << 23).as_float()
    quants = [rows.looked_up([value + 12 for value in FP4_VALUES], q) for q in _nibbles(_pairs(rows, 1))]
    return _biased(step, -12.0, [Group(quants)])


# --- Super-blocks of 256


def _scales_and_minima(second: Vec, third: Vec, fourth: Vec) -> Iterator[tuple[list[Vec], list[Vec]]]:
    """Q4_K, Q5_K: scale and minimum of each group, from 6-bit fields: in bytes, four groups at a time."""
    scales = second & 0x3F3F3F3F, fourth & 0x0F0F0F0F | second >> 2 & 0x30303030
    minima = third & 0x3F3F3F3F, fourth >> 4 & 0x0F0F0F0F | third >> 2 & 0x30303030
    fours = [(scale.at_once(), minimum.at_once()) for scale, minimum in zip(scales, minima, strict=True)]
    for i in range(8):
        scale, minimum = (four >> 8 * (i % 4) & 255 for four in fours[i // 4])
        yield [scale], [minimum]


def _two_halves(both: Vec, rows: Lanes) -> tuple[Vec, Vec]:
    """Step and offset from d and dmin in one word."""
    return rows.half_of(both), rows.half_of(both >> 16) * -1.0


def _q4_k(rows: Lanes) -> Block:
    both, *words = rows.quads(0)
    return Block(*_two_halves(both, rows), _q4_k_groups(rows, words))


def _q4_k_groups(rows: Lanes, words: Sequence[Vec]) -> Iterator[Group]:
    scales = _scales_and_minima(*words)
    for run in range(4):
        raw = _pairs(rows, 16 + 32 * run, 32)
        yield Group([q & _LOW for q in raw], *next(scales))
        if HAS_BYTE_PRODUCTS:
            yield Group([q & _HIGH for q in raw], *next(scales), times=16)
        else:
            yield Group([q >> 4 & _LOW for q in raw], *next(scales))


def _q5_k(rows: Lanes) -> Block:
    both, *words = rows.quads(0)
    return Block(*_two_halves(both, rows), _q5_k_groups(rows, words))


def _q5_k_groups(rows: Lanes, words: Sequence[Vec]) -> Iterator[Group]:
    high, scales = _pairs(rows, 16, 32), _scales_and_minima(*words)
    for run in range(4):
        nibbles = _nibbles(_pairs(rows, 48 + 32 * run, 32))
        for i, half in enumerate((nibbles[:8], nibbles[8:])):
            quants = [q | (h >> 2 * run + i & _ONE_BIT) << 4 for q, h in zip(half, high, strict=True)]
            yield Group(quants, *next(scales))


def _q6_k(rows: Lanes) -> Block:
    return _biased(rows.halves(208), -32.0, _q6_k_groups(rows))


def _q6_k_groups(rows: Lanes) -> Iterator[Group]:
    packed = rows.quads(192)
    for half in range(2):
        low, high = _pairs(rows, 64 * half, 64), _pairs(rows, 128 + 32 * half, 32)
        for quarter in range(4):
            nibbles = low[8 * (quarter % 2) :][:8]
            nibbles = [(q >> 4 if quarter >= 2 else q) & _LOW for q in nibbles]
            quants = [q | (h >> 2 * quarter & _TWO_BITS) << 4 for q, h in zip(nibbles, high, strict=True)]
            i_scale = 8 * half + 2 * quarter
            scales = [rows.signed_byte(packed[i // 4], i % 4) for i in (i_scale, i_scale + 1)]
            yield Group(quants, scales, scales)


def _two_bits(rows: Lanes, offset: int) -> Iterator[list[Vec]]:
    """8 groups: per 32 bytes, four fields of 2 bits, field-major."""
    for half in range(2):
        raw = _pairs(rows, offset + 32 * half, 32)
        yield from ([q >> 2 * i & _TWO_BITS for q in raw] for i in range(4))


def _q2_k(rows: Lanes) -> Block:
    return Block(*_two_halves(rows.words(80), rows), _q2_k_groups(rows))


def _q2_k_groups(rows: Lanes) -> Iterator[Group]:
    words = rows.quads(0)
    for i, quants in enumerate(_two_bits(rows, 16)):
        packed = [words[j // 4] >> 8 * (j % 4) for j in (2 * i, 2 * i + 1)]
        yield Group(quants, [both & 15 for both in packed], [both >> 4 & 15 for both in packed])


def _q3_k(rows: Lanes) -> Block:
    return _biased(rows.halves(108), -4.0, _q3_k_groups(rows))


def _q3_k_groups(rows: Lanes) -> Iterator[Group]:
    high = _pairs(rows, 0, 32)
    words = [rows.words(96), rows.words(100), rows.words(104)]
    for i, quants in enumerate(_two_bits(rows, 32)):
        quants = [q | (h >> i & _ONE_BIT) << 2 for q, h in zip(quants, high, strict=True)]
        scales = [_six_bits(words, j) - 32 for j in (2 * i, 2 * i + 1)]
        yield Group(quants, scales, scales)


def _six_bits(words: Sequence[Vec], j: int) -> Vec:
    """Scale j of 16: four bits in the first two words, two in the third."""
    low = words[j // 4 % 2] >> 8 * (j % 4) + 4 * (j // 8) & 15
    return low | (words[2] >> 8 * (j % 4) + 2 * (j // 4) & 3) << 4


def _iq4_xs(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -128.0, _iq4_xs_groups(rows))


def _iq4_xs_groups(rows: Lanes) -> Iterator[Group]:
    high, low = rows.shorts(2), rows.words(4)
    for i in range(8):
        scales = [(low >> 4 * i & 15 | (high >> 2 * i & 3) << 4) - 32]
        yield Group([_iq4(rows, q) for q in _nibbles(_pairs(rows, 8 + 16 * i))], scales, scales)


_T = TensorType
UNPACKERS: dict[TensorType, Unpacker] = {
    _T.Q8_0: Unpacker(32, _q8_0, 255),
    _T.Q4_0: Unpacker(32, _q4_0, 15),
    _T.Q4_1: Unpacker(32, _q4_1, 15),
    _T.Q5_0: Unpacker(32, _q5_0, 31),
    _T.Q5_1: Unpacker(32, _q5_1, 31),
    _T.IQ4_NL: Unpacker(32, _iq4_nl, 241),
    _T.MXFP4: Unpacker(32, _mxfp4, 24),
    _T.Q2_K: Unpacker(256, _q2_k, 3, 2),
    _T.Q3_K: Unpacker(256, _q3_k, 7, 2),
    _T.Q4_K: Unpacker(256, _q4_k, 15, 1),
    _T.Q5_K: Unpacker(256, _q5_k, 31, 1),
    _T.Q6_K: Unpacker(256, _q6_k, 63, 2),
    _T.IQ4_XS: Unpacker(256, _iq4_xs, 241, 1),
}
