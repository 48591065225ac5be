"""How weights become bytes: the types whose values are steps of an integer below 256.

An unpacker turns the blocks at one place of sixteen rows into groups of 32 values:
value = step * scale * q + offset * minimum. q is an unsigned byte; scale and minimum are small integers, for all 32 or
for each 16; step and offset are float32, of the block. Layouts and formulas are those of `quant.dequant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.emit import I32, Vec, const_vec
from overspill.kernels.numba.lanes import N_LANES, Lanes
from overspill.kernels.numba.target import HAS_BYTE_PRODUCTS
from overspill.quant.codebooks import FP4_VALUES, IQ4_VALUES

# Of every byte, in pairs.
_LOW, _HIGH, _TWO_BITS, _ONE_BIT, _SIGN = 0x0F0F, -0x0F10, 0x0303, 0x0101, -0x7F80


Quants = Sequence[Vec]
"""32 values of every row: 8 vectors of bytes (as 16-bit integers)."""


class Block(NamedTuple):
    """A block of every row. step, offset: float32. quants: of the groups of a run, whose index is an int64.

    scales, minima: int32, of all groups, one or two of each; none where they would be 1. A scale of float32 is for
    quants that are larger than they should be.
    """

    step: Vec
    offset: Vec
    quants: Callable[[ir.Value], Iterable[Quants]]
    scales: Sequence[Vec] = ()
    minima: Sequence[Vec] = ()


@dataclass(frozen=True)
class Unpacker:
    """How to read a block of `n_elements` values. largest: a byte may be; n_scales: of a group.

    n_runs: the code for some groups serves others as well, as that of a whole block would not stay decoded in the CPU.
    """

    n_elements: int
    read: Callable[[Lanes], Block]
    largest: int
    n_scales: int = 0
    n_runs: int = 1

    @property
    def n_groups(self) -> int:
        return self.n_elements // 32


def _pairs(rows: Lanes, offset: int, n_bytes: int = 16) -> list[Vec]:
    return [quad.as_shorts() for quad in rows.quads(offset, n_bytes)]


def _nibbles(raw: Sequence[Vec]) -> list[Vec]:
    """All low nibbles, then all high ones."""
    return [q & _LOW for q in raw] + [q >> 4 & _LOW for q in raw]


def _biased(
    step: Vec, bias: float, quants: Callable[[ir.Value], Iterable[Quants]], scales: Sequence[Vec] = ()
) -> Block:
    """step * scale * (q + bias)."""
    return Block(step, step * bias, quants, scales, scales)


# --- One group


def _q8_0(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -128.0, lambda run: [[q ^ _SIGN for q in _pairs(rows, 2, 32)]])


def _q4_0(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -8.0, lambda run: [_nibbles(_pairs(rows, 2))])


def _q4_1(rows: Lanes) -> Block:
    return Block(rows.halves(0), rows.halves(2), lambda run: [_nibbles(_pairs(rows, 4))])


def _fifth_bits(rows: Lanes, offset: int) -> list[Vec]:
    """32 bits to bytes 0 or 16. The product moves bit i of four to byte i."""
    bits = rows.words(offset)
    return [((bits >> 4 * i & 15) * 0x00204081 & 0x01010101).as_shorts() << 4 for i in range(8)]


def _five_bits(rows: Lanes, offset: int) -> Quants:
    """Fifth bits, then nibbles."""
    nibbles, fifths = _nibbles(_pairs(rows, offset + 4)), _fifth_bits(rows, offset)
    return [q | high for q, high in zip(nibbles, fifths, strict=True)]


def _q5_0(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -16.0, lambda run: [_five_bits(rows, 2)])


def _q5_1(rows: Lanes) -> Block:
    return Block(rows.halves(0), rows.halves(2), lambda run: [_five_bits(rows, 4)])


def _iq4_nl(rows: Lanes) -> Block:
    return _biased(rows.halves(0), -128.0, lambda run: [_iq4(rows, 2)])


def _iq4(rows: Lanes, offset: int) -> Quants:
    return [rows.looked_up([value + 128 for value in IQ4_VALUES], q) for q in _nibbles(_pairs(rows, offset))]


def _mxfp4(rows: Lanes) -> Block:
    e, exponent = rows.e, rows.bytes(0)
    is_tiny = e.builder.icmp_unsigned("<", exponent.value, const_vec(I32, [2] * N_LANES))
    tiny = e.vec(e.builder.shl(const_vec(I32, [0x00200000] * N_LANES), (exponent & 1).value))
    step = e.select(is_tiny, tiny, exponent - 1 << 23).as_float()

    def quants(run: ir.Value) -> Iterator[Quants]:
        yield [rows.looked_up([value + 12 for value in FP4_VALUES], q) for q in _nibbles(_pairs(rows, 1))]

    return _biased(step, -12.0, quants)


# --- Super-blocks of 256


def _scales_and_minima(second: Vec, third: Vec, fourth: Vec) -> tuple[list[Vec], list[Vec]]:
    """Q4_K, Q5_K: from 6-bit fields, by way of bytes, of four groups at a time."""
    scales = second & 0x3F3F3F3F, fourth & 0x0F0F0F0F | second >> 2 & 0x30303030
    minima = third & 0x3F3F3F3F, fourth >> 4 & 0x0F0F0F0F | third >> 2 & 0x30303030
    return _bytes_of(scales), _bytes_of(minima)


def _bytes_of(words: Iterable[Vec]) -> list[Vec]:
    return [word >> 8 * i & 255 for word in [word.at_once() for word in words] for i in range(4)]


def _two_halves(both: Vec, rows: Lanes) -> tuple[Vec, Vec]:
    """Step and offset from d and dmin in one word."""
    return rows.half_of(both), rows.half_of(both >> 16) * -1.0


def _q4_k(rows: Lanes) -> Block:
    both, *words = rows.quads(0)
    scales, minima = _scales_and_minima(*words)
    if HAS_BYTE_PRODUCTS:
        scales[1::2] = [scale.to_float() * 0.0625 for scale in scales[1::2]]

    def quants(run: ir.Value) -> Iterator[Quants]:
        raw = _pairs(rows.moved(run, 32), 16, 32)
        yield [q & _LOW for q in raw]
        yield [q & _HIGH if HAS_BYTE_PRODUCTS else q >> 4 & _LOW for q in raw]

    return Block(*_two_halves(both, rows), quants, scales, minima)


def _q5_k(rows: Lanes) -> Block:
    both, *words = rows.quads(0)

    def quants(run: ir.Value) -> Iterator[Quants]:
        high, nibbles = _pairs(rows, 16, 32), _nibbles(_pairs(rows.moved(run, 32), 48, 32))
        for i, half in enumerate((nibbles[:8], nibbles[8:])):
            n_bits = rows.e.offset(run, 2, i)
            yield [q | (h.shifted_right(n_bits) & _ONE_BIT) << 4 for q, h in zip(half, high, strict=True)]

    return Block(*_two_halves(both, rows), quants, *_scales_and_minima(*words))


def _q6_k(rows: Lanes) -> Block:
    packed = rows.quads(192)

    def quants(run: ir.Value) -> Iterator[Quants]:
        low, high = _pairs(rows.moved(run, 64), 0, 64), _pairs(rows.moved(run, 32), 128, 32)
        for i in range(4):
            nibbles = [(q >> 4 if i >= 2 else q) & _LOW for q in low[8 * (i % 2) :][:8]]
            yield [q | (h >> 2 * i & _TWO_BITS) << 4 for q, h in zip(nibbles, high, strict=True)]

    return _biased(rows.halves(208), -32.0, quants, [rows.signed_byte(word, i) for word in packed for i in range(4)])


def _two_bits(rows: Lanes, offset: int) -> Iterator[Quants]:
    """Four groups: four fields of 2 bits in 32 bytes, field-major."""
    raw = _pairs(rows, offset, 32)
    yield from ([q >> 2 * i & _TWO_BITS for q in raw] for i in range(4))


def _q2_k(rows: Lanes) -> Block:
    pairs = [word >> 8 * i for word in rows.quads(0) for i in range(4)]
    return Block(
        *_two_halves(rows.words(80), rows),
        quants=lambda run: _two_bits(rows.moved(run, 32), 16),
        scales=[pair & 15 for pair in pairs],
        minima=[pair >> 4 & 15 for pair in pairs],
    )


def _q3_k(rows: Lanes) -> Block:
    words = [rows.words(96), rows.words(100), rows.words(104)]

    def quants(run: ir.Value) -> Iterator[Quants]:
        high = _pairs(rows, 0, 32)
        for i, low in enumerate(_two_bits(rows.moved(run, 32), 32)):
            n_bits = rows.e.offset(run, 4, i)
            yield [q | (h.shifted_right(n_bits) & _ONE_BIT) << 2 for q, h in zip(low, high, strict=True)]

    return _biased(rows.halves(108), -4.0, quants, [_six_bits(words, i) - 32 for i in range(16)])


def _six_bits(words: Sequence[Vec], j: int) -> Vec:
    """Scale j of 16: four bits in the first two words, two in the third."""
    low = words[j // 4 % 2] >> 8 * (j % 4) + 4 * (j // 8) & 15
    return low | (words[2] >> 8 * (j % 4) + 2 * (j // 4) & 3) << 4


def _iq4_xs(rows: Lanes) -> Block:
    high, low = rows.shorts(2), rows.words(4)
    scales = [(low >> 4 * i & 15 | (high >> 2 * i & 3) << 4) - 32 for i in range(8)]
    return _biased(rows.halves(0), -128.0, lambda run: (_iq4(rows.moved(run, 32), at) for at in (8, 24)), scales)


_T = TensorType
UNPACKERS: dict[TensorType, Unpacker] = {
    _T.Q8_0: Unpacker(32, _q8_0, 255),
    _T.Q4_0: Unpacker(32, _q4_0, 15),
    _T.Q4_1: Unpacker(32, _q4_1, 15),
    _T.Q5_0: Unpacker(32, _q5_0, 31),
    _T.Q5_1: Unpacker(32, _q5_1, 31),
    _T.IQ4_NL: Unpacker(32, _iq4_nl, 241),
    _T.MXFP4: Unpacker(32, _mxfp4, 24),
    _T.Q2_K: Unpacker(256, _q2_k, 3, 2, 2),
    _T.Q3_K: Unpacker(256, _q3_k, 7, 2, 2),
    _T.Q4_K: Unpacker(256, _q4_k, 15, 1, 4),
    _T.Q5_K: Unpacker(256, _q5_k, 31, 1, 4),
    _T.Q6_K: Unpacker(256, _q6_k, 63, 2, 2),
    _T.IQ4_XS: Unpacker(256, _iq4_xs, 241, 1, 4),
}
