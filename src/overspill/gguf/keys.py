"""Typed, loud access to the metadata of a model.

A getter returns exactly the type it names or raises a `UserError` that names the file, the full key, what was
found and what was expected; a missing key is an error unless a default is given. Integers of any width are taken
if the value fits; a bool is no integer and an integer is no bool. Text that is not UTF-8 is returned with U+FFFD in
place of the bad bytes, and the typed getters log one warning for it: refusing a model over one odd token or a
mangled description would help nobody. Keys nobody reads are never decoded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.cursor import shown, shown_path
from overspill.gguf.values import FLOATS, INTEGERS, Entry, Strings, ValueType

Value = bool | int | float | str | NDArray[Any] | Sequence[str]
T = TypeVar("T")
D = TypeVar("D")

MAX_LAYERS = 1 << 16
_NOT_UTF8 = "key %s holds bytes that are not UTF-8; they read as U+FFFD"
_log = logging.getLogger(__name__)


class Required(Enum):
    """Type of `REQUIRED`, the default of getters: the key must be there."""

    REQUIRED = "required"


REQUIRED: Final = Required.REQUIRED


class Keys(Mapping[str, Value]):
    """The metadata of a file, or the part of it below a prefix (`scoped`).

    As a mapping it yields the plain values: text is `str`, numeric arrays are read-only numpy arrays (bools as
    bool), string arrays a lazy `Sequence[str]`. Getters are stricter, see the module.
    """

    def __init__(self, entries: Mapping[str, Entry], path: Path, prefix: str = "") -> None:
        self._entries = entries
        self._path = path
        self._prefix = prefix

    @classmethod
    def of(cls, values: Mapping[str, bool | int | float | str | tuple[int, ...]], name: str) -> Keys:
        """Metadata made up by a program: plain values, stored under the usual types; `name` stands for a path."""
        return cls({key: _entry(key, value) for key, value in values.items()}, Path(name))

    def scoped(self, prefix: str) -> Keys:
        """View of the keys that begin with `prefix` and a dot, without that beginning."""
        return Keys(self._entries, self._path, f"{self._prefix}{prefix}.")

    def without(self, key: str) -> Keys:
        """The same without one key, given in full."""
        return Keys({name: entry for name, entry in self._entries.items() if name != key}, self._path, self._prefix)

    @property
    def file(self) -> str:
        """Where they are from, for messages."""
        return shown_path(self._path)

    def full_name(self, name: str) -> str:
        """The key in the file that `name` stands for in this view."""
        return self._prefix + name

    @property
    def arch(self) -> str:
        """`general.architecture`, whatever the scope."""
        return Keys(self._entries, self._path).text("general.architecture")

    def is_array(self, name: str) -> bool:
        """Whether the key is there and holds an array."""
        entry = self._entries.get(self.full_name(name))
        return entry is not None and entry.is_array

    def u32(self, name: str, default: D | Required = REQUIRED) -> int | D:
        return self._get(name, default, _integer(0, 2**32 - 1), "an unsigned 32-bit integer")

    def f32(self, name: str, default: D | Required = REQUIRED) -> float | D:
        return self._get(name, default, _float, "a number")

    def flag(self, name: str, default: D | Required = REQUIRED) -> bool | D:
        return self._get(name, default, _flag, "a bool")

    def text(self, name: str, default: D | Required = REQUIRED) -> str | D:
        return self._get(name, default, _text, "a string")

    def u32s(self, name: str, default: D | Required = REQUIRED) -> tuple[int, ...] | D:
        return self._get(name, default, _integers(0, 2**32 - 1), "an array of unsigned 32-bit integers")

    def u64s(self, name: str, default: D | Required = REQUIRED) -> tuple[int, ...] | D:
        return self._get(name, default, _integers(0, 2**64 - 1), "an array of unsigned 64-bit integers")

    def i32s(self, name: str, default: D | Required = REQUIRED) -> tuple[int, ...] | D:
        return self._get(name, default, _integers(-(2**31), 2**31 - 1), "an array of signed 32-bit integers")

    def f32s(self, name: str, default: D | Required = REQUIRED) -> tuple[float, ...] | D:
        return self._get(name, default, _floats, "an array of numbers")

    def flags(self, name: str, default: D | Required = REQUIRED) -> tuple[bool, ...] | D:
        return self._get(name, default, _flags, "an array of bools")

    def texts(self, name: str, default: D | Required = REQUIRED) -> list[str] | D:
        return self._get(name, default, _texts, "an array of strings")

    def per_layer(self, name: str, n_layer: int, default: int | Sequence[int] | Required = REQUIRED) -> tuple[int, ...]:
        """One unsigned integer per layer: from an array of exactly `n_layer`, or a scalar for all of them."""
        return self._per_layer(name, n_layer, default, self.u32s if self.is_array(name) else self.u32)

    def per_layer_f32(
        self, name: str, n_layer: int, default: float | Sequence[float] | Required = REQUIRED
    ) -> tuple[float, ...]:
        """As `per_layer`, for floats."""
        return self._per_layer(name, n_layer, default, self.f32s if self.is_array(name) else self.f32)

    def per_layer_flags(
        self, name: str, n_layer: int, default: bool | Sequence[bool] | Required = REQUIRED
    ) -> tuple[bool, ...]:
        """As `per_layer`, for bools."""
        return self._per_layer(name, n_layer, default, self.flags if self.is_array(name) else self.flag)

    def __getitem__(self, name: str) -> Value:
        return _plain(self._entries[self.full_name(name)])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.full_name(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        n_prefix = len(self._prefix)
        return (full[n_prefix:] for full in self._entries if full.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _fail(self, name: str, message: str) -> UserError:
        return UserError(f"{shown_path(self._path)}: key {shown(self.full_name(name))} {message}")

    def _get(self, name: str, default: D | Required, convert: Callable[[Entry], T | None], expected: str) -> T | D:
        """The converted value; `convert` gives None for a value of another kind."""
        entry = self._entries.get(self.full_name(name))
        if entry is None:
            if isinstance(default, Required):
                raise self._fail(name, "is missing: not a complete model of its kind; convert the model again")
            return default
        value = convert(entry)
        if value is None:
            raise self._fail(name, f"is {entry.described}, expected {expected}; convert the model again")
        return value

    def _per_layer(
        self, name: str, n_layer: int, default: T | Sequence[T] | Required, get: Callable[[str, Any], Any]
    ) -> tuple[T, ...]:
        if not 0 <= n_layer <= MAX_LAYERS:
            raise self._fail(name, f"cannot be read for a block_count of {n_layer}; at most {MAX_LAYERS} layers")
        value = get(name, default)
        if not isinstance(value, Sequence):
            return (value,) * n_layer
        if len(value) != n_layer:
            raise self._fail(name, f"is an array of {len(value)} values, expected one for each of {n_layer} layers")
        return tuple(value)


def _integer(low: int, high: int) -> Callable[[Entry], int | None]:
    def convert(entry: Entry) -> int | None:
        if entry.type not in INTEGERS or not isinstance(entry.value, int):
            return None
        return entry.value if low <= entry.value <= high else None

    return convert


def _integers(low: int, high: int) -> Callable[[Entry], tuple[int, ...] | None]:
    def convert(entry: Entry) -> tuple[int, ...] | None:
        if entry.items not in INTEGERS or not isinstance(entry.value, np.ndarray):
            return None
        values: tuple[int, ...] = tuple(entry.value.tolist())
        return values if all(low <= value <= high for value in values) else None

    return convert


def _float(entry: Entry) -> float | None:
    if entry.type not in FLOATS | INTEGERS or not isinstance(entry.value, (int, float)):
        return None
    return None if math.isnan(entry.value) else float(entry.value)


def _floats(entry: Entry) -> tuple[float, ...] | None:
    if entry.items not in FLOATS | INTEGERS or not isinstance(entry.value, np.ndarray):
        return None
    return tuple(entry.value.astype(np.float64).tolist())


def _flag(entry: Entry) -> bool | None:
    return bool(entry.value) if entry.type is ValueType.BOOL else None


def _flags(entry: Entry) -> tuple[bool, ...] | None:
    if entry.items is not ValueType.BOOL or not isinstance(entry.value, np.ndarray):
        return None
    return tuple((entry.value != 0).tolist())


def _text(entry: Entry) -> str | None:
    if not isinstance(entry.value, bytes):
        return None
    text = entry.value.decode("utf-8", "replace")
    if text.encode() != entry.value:
        _log.warning(_NOT_UTF8, shown(entry.key))
    return text


def _texts(entry: Entry) -> list[str] | None:
    if not isinstance(entry.value, Strings):
        return None
    texts, is_replaced = entry.value.decoded()
    if is_replaced:
        _log.warning(_NOT_UTF8, shown(entry.key))
    return texts


def _plain(entry: Entry) -> Value:
    value = entry.value
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if ValueType.BOOL in (entry.type, entry.items):
        return (value != 0) if isinstance(value, np.ndarray) else bool(value)
    return value


def _entry(key: str, value: bool | int | float | str | tuple[int, ...]) -> Entry:
    if isinstance(value, tuple):
        return Entry(key, ValueType.ARRAY, np.array(value, np.uint64), ValueType.U64)
    if isinstance(value, str):
        return Entry(key, ValueType.STRING, value.encode())
    kind = {bool: ValueType.BOOL, int: ValueType.U32, float: ValueType.F32}[type(value)]
    return Entry(key, kind, value)
