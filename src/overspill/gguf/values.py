"""Metadata values: how they are stored, and how one is read without copying it.

Numeric arrays are views of the mapped file, string arrays keep only where each string begins, so the time to read
a header depends on the number of strings and the memory hardly at all. Text is decoded when somebody asks for it.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from overspill.gguf.cursor import Cursor, shown

MAX_ITEMS = 1 << 24  # per array; the largest vocabularies have 2^18 tokens and twice as many merges
_LENGTH = struct.Struct("<Q")


class ValueType(IntEnum):
    """The type ids of metadata values (GGUF specification)."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


_V = ValueType
_FORMATS = {
    _V.U8: "B",
    _V.I8: "b",
    _V.U16: "H",
    _V.I16: "h",
    _V.U32: "I",
    _V.I32: "i",
    _V.F32: "f",
    _V.BOOL: "B",
    _V.U64: "Q",
    _V.I64: "q",
    _V.F64: "d",
}
_STRUCTS = {type: struct.Struct("<" + format) for type, format in _FORMATS.items()}
_DTYPES = {type: np.dtype("<" + format) for type, format in _FORMATS.items()}
INTEGERS = frozenset({_V.U8, _V.I8, _V.U16, _V.I16, _V.U32, _V.I32, _V.U64, _V.I64})
FLOATS = frozenset({_V.F32, _V.F64})


class Strings(Sequence[str]):
    """The strings of an array, decoded one by one when asked for.

    Bytes that are not UTF-8 are shown as U+FFFD.
    """

    def __init__(self, data: memoryview, starts: array[int]) -> None:
        """`starts` holds where each string begins in `data`; one more closes the last string. 8 length bytes lie
        between two strings."""
        self._data = data
        self._starts = starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(i) for i in range(*index.indices(len(self)))]
        return self._text(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._text, range(len(self)))

    def decoded(self) -> tuple[list[str], bool]:
        """All of them, and whether bytes that are not UTF-8 had to be replaced."""
        try:
            return [self._text(i, "strict") for i in range(len(self))], False
        except UnicodeDecodeError:
            return list(self), True

    def _text(self, i: int, errors: str = "replace") -> str:
        return str(self._data[self._starts[i] : self._starts[i + 1] - _LENGTH.size], "utf-8", errors)


@dataclass(frozen=True, eq=False)
class Entry:
    """One metadata value as stored: `items` is the element type of an array, strings are undecoded bytes."""

    key: str
    type: ValueType
    value: int | float | bytes | NDArray[Any] | Strings
    items: ValueType | None = None

    @property
    def is_array(self) -> bool:
        return self.items is not None

    @property
    def described(self) -> str:
        """What was found, for messages: type and, if it is short, the value."""
        if isinstance(self.value, (np.ndarray, Strings)):
            assert self.items is not None
            return f"an array of {len(self.value)} {self.items.name.lower()}"
        if isinstance(self.value, bytes):
            return f"the string {shown(self.value.decode('utf-8', 'replace'))!r}"
        return f"{self.type.name.lower()} {bool(self.value) if self.type is _V.BOOL else self.value}"


def read_entry(cursor: Cursor, key: str) -> Entry:
    """Read the value type and the value at the cursor; `key` names it in errors."""
    type_id = cursor.u32(f"value type of key {shown(key)}")
    if type_id not in ValueType.__members__.values():
        raise cursor.fail(f"value type {type_id} of key {shown(key)} is unknown: damaged file; fetch it again")
    type = ValueType(type_id)
    if type is _V.ARRAY:
        return _read_array(cursor, key)
    if type is _V.STRING:
        return Entry(key, type, cursor.string("string", f"of key {shown(key)}"))
    value = cursor.scalar(_STRUCTS[type], f"value of key {shown(key)}")
    if type is _V.BOOL and value not in (0, 1):
        raise cursor.fail(f"key {shown(key)} is a bool stored as {value}, expected 0 or 1: damaged file")
    return Entry(key, type, value)


def _read_array(cursor: Cursor, key: str) -> Entry:
    items_id = cursor.u32(f"element type of key {shown(key)}")
    if items_id == _V.ARRAY:
        raise cursor.fail(f"key {shown(key)} is a nested array, which GGUF readers do not take; convert without it")
    if items_id not in ValueType.__members__.values():
        raise cursor.fail(f"element type {items_id} of key {shown(key)} is unknown: damaged file; fetch it again")
    items = ValueType(items_id)
    count = cursor.u64(f"array length of key {shown(key)}")
    what = f"key {shown(key)}: array length"
    if count > MAX_ITEMS:
        raise cursor.fail(f"{what} {count} is more than the {MAX_ITEMS} items allowed: damaged file; fetch it again")
    if items is _V.STRING:
        cursor.check_count(count, _LENGTH.size, what)
        return Entry(key, _V.ARRAY, _read_strings(cursor, count, key), items)
    dtype = _DTYPES[items]
    cursor.check_count(count, dtype.itemsize, what)
    start = cursor.skip(count * dtype.itemsize, what)
    return Entry(key, _V.ARRAY, np.frombuffer(cursor.data, dtype, count, start), items)


def _read_strings(cursor: Cursor, count: int, key: str) -> Strings:
    """Find `count` strings. The loop runs once per token and merge, so it does its own bounds checks."""
    data, position, end, unpack = cursor.data, cursor.position, len(cursor.data), _LENGTH.unpack_from
    starts = array("q")
    for i in range(count):
        begin = position + _LENGTH.size
        length = unpack(data, position)[0] if begin <= end else 0
        position = begin + length
        if position > end:
            cursor.position = min(begin, end)
            raise cursor.fail(
                f"string length {length} of element {i} of key {shown(key)} is more than the {cursor.n_left} bytes "
                "left: truncated or damaged file; fetch it again"
            )
        starts.append(begin)
    starts.append(position + _LENGTH.size)
    cursor.position = position
    return Strings(data, starts)
