"""Checks before an operation of a template that can make much out of little.

One call such as `"x" * 10**10` would eat the memory before any counter sees it, so the size of the result is worked
out first and held against the budget. Methods of built-in types are allowed by name; those that pad, format to a width
or leave the types that templates need are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import BuiltinMethodType
from typing import Any

from overspill.text.budget import ITEM_CHARS, OverBudget, current

MAX_BITS = 4096
MAX_WIDTH = 1000
METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        (
            *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
            *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "isupper", "join", "lower", "lstrip"),
            *("partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit"),
            *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
        )
    ),
    # Messages are copies, so that a template may append to lists, as some that keep queues of call ids do.
    list: frozenset(("append", "copy", "count", "index", "insert", "pop")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    float: frozenset(("is_integer",)),
}
_WIDE = {"%": re.compile(r"%[^a-zA-Z%]*(\*|\d{4})"), "{": re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})")}


def check_operands(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`."""
    if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        current().make((len(left) + len(right)) * _unit(left))
    elif operator == "*":
        _check_product(left, right)
        _check_product(right, left)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str):
        check_format(left, "%", right if isinstance(right, tuple) else (right,), {})


def _check_product(value: Any, factor: Any) -> None:
    if not isinstance(factor, int):
        return
    if isinstance(value, (str, list, tuple)):
        current().make(len(value) * max(factor, 0) * _unit(value))
    elif isinstance(value, int):
        _check_bits(value.bit_length() + factor.bit_length())


def _unit(value: Any) -> int:
    return 1 if isinstance(value, str) else ITEM_CHARS


def _check_bits(n_bits: int) -> None:
    if n_bits > MAX_BITS:
        raise OverBudget(f"makes a number of more than {MAX_BITS} bits")


def check_format(text: str, mark: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Before formatting by `%` or `str.format`: no wide fields, and every field may be as large as all arguments."""
    if _WIDE[mark].search(text):
        raise OverBudget(f"formats to a width of {MAX_WIDTH} or more")
    budget = current()
    n_chars = budget.weigh(*args, *kwargs.values())
    budget.make(len(text) + text.count(mark) * (n_chars + MAX_WIDTH))


def checked_arguments(method: BuiltinMethodType, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a method of a built-in type; an iterator among the arguments comes back as a list."""
    owner, budget = method.__self__, current()
    if isinstance(owner, str) and method.__name__ == "join" and len(args) == 1:
        items = budget.gathered(args[0])
        check_join(owner, items)
        return (items,)
    if isinstance(owner, str) and method.__name__ == "replace":
        check_replace(owner, args)
    elif isinstance(owner, list):
        budget.weigh(owner, *args)
    return args


def check_join(separator: str, items: Sequence[Any]) -> None:
    budget = current()
    budget.make(budget.weigh(*items) + len(separator) * len(items))


def check_replace(text: str, args: Sequence[Any]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        current().make(len(text) + text.count(args[0]) * len(args[1]))


def spelled_out(items: Iterable[Any]) -> str:
    """Everything as text, joined; what `~` does."""
    values = list(items)
    check_join("", values)
    return "".join(map(str, values))
