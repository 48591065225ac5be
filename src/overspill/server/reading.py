"""A model's raw answer to what a client is told: thoughts, text, calls of tools.

Models mark these in their text, each family in its own way; which way a model has is read off its chat template. A
reader takes the text in pieces, however they are cut, and holds back what may still become a mark. Invariant: the
parts it gives, those of a kind joined, do not depend on where the pieces were cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """More of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the last call, JSON text."""

    text: str


Part = Thought | Said | Call | Arguments


class Called(NamedTuple):
    """A whole call: arguments are the JSON text of an object."""

    name: str
    arguments: str

    @property
    def parts(self) -> list[Part]:
        return [Call(self.name), Arguments(self.arguments)]


Schemas = Mapping[str, Mapping[str, Any]]
"""The schema of each argument of each tool, as far as they are known."""


class Reader(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after more text."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


class PlainReader:
    """For models without marks: everything is said."""

    def push(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def read_all(reader: Reader, text: str) -> list[Part]:
    """All parts of a whole answer."""
    return [*reader.push(text), *reader.finish()]


def schemas_of(tools: Sequence[Any]) -> Schemas:
    """The schemas in tools as clients send them, which may be malformed."""
    return dict(_schemas(tools))


def _schemas(tools: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function, dict) and isinstance(properties, dict):
            yield str(function.get("name")), properties


def json_text(value: Any) -> str | None:
    """A value as JSON that every client can read; None for what JSON does not have."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError):  # infinities, sets, halves of surrogate pairs
        return None
    return text


class Cutter:
    """Cuts text at marks. The end of what it holds is held back while it may begin one of them."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> None:
        self._held += text

    def put_back(self, text: str) -> None:
        self._held = text + self._held

    def take(self, marks: Sequence[str]) -> tuple[str, str | None]:
        """The text up to the first of `marks` and that mark, or all that is certain to hold none and None."""
        found = [(i, mark) for mark in marks if (i := self._held.find(mark)) >= 0]
        if found:
            start, mark = min(found)
            text, self._held = self._held[:start], self._held[start + len(mark) :]
            return text, mark
        n_safe = len(self._held) - _n_undecided(self._held, marks)
        text, self._held = self._held[:n_safe], self._held[n_safe:]
        return text, None

    def take_rest(self) -> str:
        text, self._held = self._held, ""
        return text


def _n_undecided(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a mark."""
    lengths = range(min(len(text), max(map(len, marks)) - 1), 0, -1)
    return next((n for n in lengths if any(mark.startswith(text[-n:]) for mark in marks)), 0)
