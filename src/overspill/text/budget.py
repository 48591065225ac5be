"""What a chat template may spend: steps, characters, time.

Templates come from model files and are programs. Rendering counts loop rounds and calls as steps and weighs values
before they are multiplied or written, so that a hostile template fails within seconds and megabytes. The budget in
force belongs to the thread (more exactly the context) that renders.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


class OverBudget(Exception):
    """The template spends more than it may; the message names the limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`n_steps`: loop rounds, calls, operations; `n_chars`: of any one value; `n_written`: of all output together,
    captured output included; `n_range`: items of a range; `seconds`: wall-clock time."""

    n_steps: int = 2_000_000
    n_chars: int = 1 << 24
    n_written: int = 1 << 26
    n_range: int = 100_000
    seconds: float = 5.0


class Budget:
    """What is left of `Limits` for one rendering."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._n_steps = 0
        self._n_written = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self._n_steps += 1
        if self._n_steps > self._limits.n_steps:
            raise OverBudget(f"takes more than {self._limits.n_steps} steps")
        if self._n_steps % 256 == 0 and time.monotonic() > self._deadline:
            raise OverBudget(f"takes more than {self._limits.seconds} s")

    def check_size(self, n_chars: int) -> None:
        """Whether a value of so many characters or items may exist."""
        if n_chars > self._limits.n_chars:
            raise OverBudget(f"makes a value of more than {self._limits.n_chars} characters")

    def write(self, n_chars: int) -> None:
        self.check_size(n_chars)
        self._n_written += n_chars
        if self._n_written > self._limits.n_written:
            raise OverBudget(f"writes more than {self._limits.n_written} characters")

    def check_range(self, n_items: int) -> None:
        if n_items > self._limits.n_range:
            raise OverBudget(f"asks for a range of more than {self._limits.n_range} items")

    def weigh(self, *values: Any) -> int:
        """Characters and items in all of `values`, shared parts as often as they occur; stops at the limit."""
        n_total = 0
        pending = list(values)
        while pending:
            value = pending.pop()
            n_total += len(value) if isinstance(value, str) else 1
            if isinstance(value, dict):
                pending += (*value.keys(), *value.values())
            elif isinstance(value, (list, tuple)):
                pending += value
            self.check_size(n_total + len(pending))
        return n_total

    def each(self, items: Iterable[Any], n_chars: int = 0) -> Iterator[Any]:
        """`items`, a step and `n_chars` of output each."""
        for item in items:
            self.step()
            self.write(n_chars)
            yield item


_current: ContextVar[Budget] = ContextVar("budget of the template being rendered")


def current() -> Budget:
    """The budget in force."""
    return _current.get()


@contextmanager
def spending(limits: Limits) -> Iterator[Budget]:
    """Puts a fresh budget in force."""
    budget = Budget(limits)
    token = _current.set(budget)
    try:
        yield budget
    finally:
        _current.reset(token)
