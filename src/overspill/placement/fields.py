"""Fields of JSON objects that people write: all known, present and of the right kind, or one line that says which."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from overspill.errors import UserError

_EXPECTED: Final = {
    int: "a whole number of at least 0",
    float: "a number above 0",
    str: "a name",
    list: "a list",
    tuple: "a list of numbers above 0",
}


def checked(
    record: Any, path: str, where: str, required: Mapping[str, type], optional: Mapping[str, type]
) -> dict[str, Any]:
    """The fields of one JSON object, all known, present and of the right kind; `where` leads their names."""
    if not isinstance(record, dict):
        raise UserError(f"{path}: {where.rstrip('.') or 'the file'} is {record!r}; give an object with named fields")
    for name in record:
        if name not in required and name not in optional:
            raise UserError(f"{path}: unknown field {where}{name}; known are {', '.join({**required, **optional})}")
    for name in required:
        if name not in record:
            raise UserError(f"{path}: field {where}{name} is missing")
    kinds = {**required, **optional}
    for name, value in record.items():
        if not _is_valid(value, kinds[name]):
            raise UserError(f"{path}: {where}{name} is {value!r}; give {_EXPECTED[kinds[name]]}")
    return record


def _is_valid(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and value >= 0
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value) and value > 0
    if kind is str:
        return isinstance(value, str) and bool(value.strip())
    if kind is tuple:
        return isinstance(value, list) and all(_is_valid(number, float) for number in value)
    return isinstance(value, kind)
