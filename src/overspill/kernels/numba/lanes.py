"""The same place in sixteen rows at once: lane r of a vector belongs to row r.

Unpackers of weight types are written in these terms. A vector of int32 holds four neighbouring bytes of every row, so
byte-wise work (nibbles, masks, bytes looked up) is done for 64 values at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Self

from llvmlite import ir

from overspill.gguf.types import TensorType
from overspill.kernels.numba.emit import F16, F32, I8, I16, I32, Emitter, LateVec, Vec, const, const_vec
from overspill.kernels.numba.target import HAS_AVX512
from overspill.quant.panels import PANEL_ROWS, fields_of

N_LANES = PANEL_ROWS
_LOOK_UP, _LOOK_UP_BYTES = ("llvm.x86.avx512.pshuf.b.512", 64) if HAS_AVX512 else ("llvm.x86.avx2.pshuf.b", 32)


class Layout(IntEnum):
    """How a weight lies in memory: row after row, or as `quant.panels.Panels`."""

    ROWS = 0
    PANELS = 1


class Lanes(ABC):
    """Loads from sixteen units (blocks), one in each row. Offsets are bytes of the unit."""

    def __init__(self, e: Emitter) -> None:
        self.e = e

    @abstractmethod
    def moved(self, index: ir.Value, n_bytes: int) -> Self:
        """Lanes whose offsets begin `index` times so many bytes, whole words, later in the unit."""

    @abstractmethod
    def quads(self, offset: int, n_bytes: int = 16) -> list[Vec]:
        """`n_bytes`, a multiple of 16: vector i holds bytes 4i to 4i + 3 of every row."""

    @abstractmethod
    def words(self, offset: int) -> Vec:
        """32-bit integers."""

    @abstractmethod
    def shorts(self, offset: int) -> Vec:
        """Unsigned 16-bit integers as int32."""

    @abstractmethod
    def bytes(self, offset: int) -> Vec:
        """Unsigned bytes as int32."""

    def halves(self, offset: int) -> Vec:
        """IEEE halves as float32."""
        return self.half_of(self.shorts(offset))

    def half_of(self, words: Vec) -> Vec:
        """The low 16 bits read as IEEE halves, as float32."""
        b = self.e.builder
        as_half = b.bitcast(b.trunc(words.value, ir.VectorType(I16, N_LANES)), ir.VectorType(F16, N_LANES))
        return self.e.vec(b.fpext(as_half, ir.VectorType(F32, N_LANES)))

    def signed_byte(self, words: Vec, i_byte: int) -> Vec:
        """Byte `i_byte` of each word, sign extended."""
        left = words << 24 - 8 * i_byte
        return self.e.vec(self.e.builder.ashr(left.value, const_vec(I32, [24] * N_LANES)))

    def looked_up(self, table: Sequence[int], index: Vec) -> Vec:
        """table[i] for each byte i (below 16); entries are unsigned bytes."""
        e, b, n_bytes = self.e, self.e.builder, _LOOK_UP_BYTES
        type = ir.VectorType(I8, n_bytes)
        function = e.intrinsic(_LOOK_UP, type, [type, type])
        places = e.vec(b.bitcast(index.value, ir.VectorType(I8, 4 * N_LANES)))
        parts = [e.shuffle(places, places, range(at, at + n_bytes)) for at in range(0, 4 * N_LANES, n_bytes)]
        found = [e.vec(b.call(function, [const_vec(I8, [*table] * (n_bytes // 16)), part.value])) for part in parts]
        whole = e.shuffle(found[0], found[-1], range(4 * N_LANES))
        return e.vec(b.bitcast(whole.value, index.value.type))

    def _widened(self, numbers: ir.Value) -> Vec:
        return self.e.vec(self.e.builder.zext(numbers, ir.VectorType(I32, N_LANES)))


class PanelLanes(Lanes):
    """Units of a panel: every vector is in one place."""

    def __init__(self, e: Emitter, unit: ir.Value, type: TensorType) -> None:
        super().__init__(e)
        self.unit = unit
        self.type = type

    def moved(self, index: ir.Value, n_bytes: int) -> PanelLanes:
        return PanelLanes(self.e, self.e.at(self.unit, self.e.offset(index, N_LANES * n_bytes)), self.type)

    def quads(self, offset: int, n_bytes: int = 16) -> list[Vec]:
        return [self._late_words(at) for at in range(offset, offset + n_bytes, 4)]

    def _late_words(self, offset: int) -> Vec:
        return LateVec(self.e.builder, lambda: self.words(offset).value)

    def words(self, offset: int) -> Vec:
        return self._numbers(offset, 4)

    def shorts(self, offset: int) -> Vec:
        return self._numbers(offset, 2)

    def bytes(self, offset: int) -> Vec:
        return self._numbers(offset, 1)

    def _numbers(self, offset: int, width: int) -> Vec:
        """Numbers of a field, or parts of a field's numbers."""
        (field,) = (field for field in fields_of(self.type) if field.first <= offset < field.last)
        before = (offset - field.first) % field.width
        type = ir.VectorType(ir.IntType(8 * field.width), N_LANES)
        numbers = self.e.load(self.unit, N_LANES * (offset - before), type)
        if field.width == width:
            return self._widened(numbers) if width < 4 else self.e.vec(numbers)
        return self.e.vec(numbers) >> 8 * before & (1 << 8 * width) - 1


class RowLanes(Lanes):
    """Units of rows that lie apart: numbers are gathered, sixteen bytes of every row transposed."""

    def __init__(self, e: Emitter, units: Sequence[ir.Value]) -> None:
        super().__init__(e)
        self.units = units

    def moved(self, index: ir.Value, n_bytes: int) -> RowLanes:
        offset = self.e.offset(index, n_bytes)
        return RowLanes(self.e, [self.e.at(unit, offset) for unit in self.units])

    def quads(self, offset: int, n_bytes: int = 16) -> list[Vec]:
        return [vec for at in range(0, n_bytes, 16) for vec in self._quads16(offset + at)]

    def _quads16(self, offset: int) -> list[Vec]:
        """A transposition: rows i, i + 4, i + 8, i + 12 side by side, then 4 x 4 words within each 128 bits."""
        e = self.e
        rows = [e.vec(e.load(unit, offset, ir.VectorType(I32, 4))) for unit in self.units]
        a, b, c, d = (self._joined(rows[i::4]) for i in range(4))
        low, high = _in_each_four((0, 4, 1, 5)), _in_each_four((2, 6, 3, 7))
        ab, cd = (e.shuffle(a, b, low), e.shuffle(a, b, high)), (e.shuffle(c, d, low), e.shuffle(c, d, high))
        first, second = _in_each_four((0, 1, 4, 5)), _in_each_four((2, 3, 6, 7))
        return [e.shuffle(x, y, lanes) for x, y in zip(ab, cd, strict=True) for lanes in (first, second)]

    def _joined(self, parts: Sequence[Vec]) -> Vec:
        e = self.e
        first, second = (e.shuffle(parts[i], parts[i + 1], range(8)) for i in (0, 2))
        return e.shuffle(first, second, range(N_LANES))

    def words(self, offset: int) -> Vec:
        return self.e.vec(self._gathered(offset, I32))

    def shorts(self, offset: int) -> Vec:
        return self._widened(self._gathered(offset, I16))

    def bytes(self, offset: int) -> Vec:
        return self._widened(self._gathered(offset, I8))

    def _gathered(self, offset: int, type: ir.Type) -> ir.Value:
        b, vector = self.e.builder, ir.Constant(ir.VectorType(type, N_LANES), ir.Undefined)
        for lane, unit in enumerate(self.units):
            vector = b.insert_element(vector, self.e.load(unit, offset, type), const(lane, I32))
        return vector


def _in_each_four(lanes: tuple[int, int, int, int]) -> list[int]:
    """The same choice in each 128 bits of two vectors; 4 to 7 are of the second."""
    return [at + lane if lane < 4 else at + lane + 12 for at in range(0, N_LANES, 4) for lane in lanes]
