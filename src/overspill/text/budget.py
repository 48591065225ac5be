"""What a chat template may spend: steps, characters, time.

Templates come from model files and are programs. Rendering counts loop rounds and calls as steps and charges every
value that an operation makes, where possible before it is made, so that a hostile template fails within seconds and
megabytes. The budget in force belongs to the thread (more exactly the context) that renders.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

ITEM_CHARS = 16


class OverBudget(Exception):
    """The template spends more than it may; the message names the limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`n_steps`: loop rounds, calls, operations; `n_chars`: size of any one value; `n_made`: of all values together
    that operations make; `n_written`: of all output, captured output included; `n_range`: items of a range;
    `seconds`: wall-clock time. Sizes count characters; an item of a list or a mapping counts as `ITEM_CHARS`."""

    n_steps: int = 2_000_000
    n_chars: int = 1 << 24
    n_made: int = 1 << 28
    n_written: int = 1 << 26
    n_range: int = 100_000
    seconds: float = 5.0


class Budget:
    """What is left of `Limits` for one rendering."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._n_steps = 0
        self._n_made = 0
        self._n_written = 0
        self._deadline = time.monotonic() + limits.seconds

    def step(self) -> None:
        self._n_steps += 1
        if self._n_steps > self._limits.n_steps:
            raise OverBudget(f"takes more than {self._limits.n_steps} steps")
        if self._n_steps % 256 == 0 and time.monotonic() > self._deadline:
            raise OverBudget(f"takes more than {self._limits.seconds} s")

    def make(self, n_chars: int) -> None:
        """Charges a value of this size, which is about to be made."""
        if n_chars > self._limits.n_chars:
            raise OverBudget(f"makes a value of more than {self._limits.n_chars} characters")
        self._n_made += n_chars
        if self._n_made > self._limits.n_made:
            raise OverBudget(f"makes more than {self._limits.n_made} characters in all")

    def made(self, value: Any) -> Any:
        """Charges a value that has been made from values already charged, and gives it back."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.make(ITEM_CHARS * len(value))
        return value

    def write(self, n_chars: int) -> None:
        self._n_written += n_chars
        if self._n_written > self._limits.n_written:
            raise OverBudget(f"writes more than {self._limits.n_written} characters")

    def check_range(self, n_items: int) -> None:
        if n_items > self._limits.n_range:
            raise OverBudget(f"asks for a range of more than {self._limits.n_range} items")

    def weigh(self, *values: Any) -> int:
        """Size of `values` with all they hold, shared parts as often as they occur; never more than one value may."""
        n_chars = 0
        pending = list(values)
        while pending:
            value = pending.pop()
            n_chars += ITEM_CHARS + (len(value) if isinstance(value, str) else 0)
            if isinstance(value, dict):
                pending += (*value.keys(), *value.values())
            elif isinstance(value, (list, tuple)):
                pending += value
            if n_chars + ITEM_CHARS * len(pending) > self._limits.n_chars:
                raise OverBudget(f"makes a value of more than {self._limits.n_chars} characters")
        return n_chars

    def each(self, items: Iterable[Any], n_chars: int = 0) -> Iterator[Any]:
        """`items`, a step and `n_chars` of output each."""
        for item in items:
            self.step()
            self.write(n_chars)
            yield item

    def gathered(self, items: Iterable[Any]) -> list[Any]:
        """A list of what an iterable yields."""
        gathered = []
        for item in items:
            self.step()
            self.make(ITEM_CHARS)
            gathered.append(item)
        return gathered


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
