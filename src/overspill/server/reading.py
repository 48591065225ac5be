"""A model's raw answer to what a client is told: thoughts, text, calls of tools.

Models mark these in their text, each family in its own way; which way a model has is read off its chat template. A
reader takes the text in pieces, however they are cut, and holds back what may still become a mark. Invariant: the
parts it gives, those of a kind joined, do not depend on where the pieces were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


class Cutter:
    """Cuts text at marks. The end of what it holds is held back while it may begin one of them."""

    def __init__(self) -> None:
        self._held = ""

    def add(self, text: str) -> None:
        self._held += text

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
