"""Answers with tags: `<think>...</think>` for thoughts, `<tool_call>{"name", "arguments"}</tool_call>` for calls.

Thoughts stand first, if anywhere: a tag that comes later is text. A call that is cut off, or is no JSON of the right
form, is text as well; nothing a model wrote gets lost, but for the blank lines between thoughts, text and calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from overspill.server.reading import Arguments, Call, Cutter, Part, Said, Thought

THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"


class TagReader:
    """has_thoughts, has_calls: which tags mean something. is_thinking: the prompt has opened the thoughts already."""

    def __init__(self, *, has_thoughts: bool, has_calls: bool, is_thinking: bool) -> None:
        self._cutter = Cutter()
        self._has_calls = has_calls
        self._step = self._think if is_thinking else self._begin if has_thoughts else self._say
        self._blank = ""  # spaces that may turn out to stand before a mark
        self._is_at_start = is_thinking

    def push(self, text: str) -> list[Part]:
        self._cutter.add(text)
        return list(self._read())

    def finish(self) -> list[Part]:
        rest, step = self._cutter.take_rest(), self._step
        if step == self._think:
            return self._thought(rest)
        lead = CALL if step == self._call else ""
        text = self._blank + lead + self._unstarted(lead + rest).removeprefix(lead)
        return [Said(text)] if text else []

    def _read(self) -> Iterator[Part]:
        while True:
            parts, goes_on = self._step()
            yield from parts
            if not goes_on:
                return

    # --- the states: each takes what it can and says whether another one follows

    def _begin(self) -> tuple[list[Part], bool]:
        """Nothing but blanks so far: thoughts may follow."""
        text, mark = self._cutter.take([THINK])
        if mark and not text.strip() and not self._blank.strip():
            self._blank = ""
            self._step, self._is_at_start = self._think, True
            return [], True
        self._blank += text + (mark or "")
        if not self._blank.strip():
            return [], False
        blank, self._blank = self._blank, ""
        self._cutter_first(blank)
        self._step = self._say
        return [], True

    def _think(self) -> tuple[list[Part], bool]:
        text, mark = self._cutter.take([THOUGHT])
        parts = self._thought(text)
        if mark:
            self._blank, self._step, self._is_at_start = "", self._say, True
        return parts, mark is not None

    def _say(self) -> tuple[list[Part], bool]:
        text, mark = self._cutter.take([CALL]) if self._has_calls else (self._cutter.take_rest(), None)
        parts: list[Part] = [Said(said)] if (said := self._unblanked(text)) else []
        if mark:
            self._step = self._call
        return parts, mark is not None

    def _call(self) -> tuple[list[Part], bool]:
        """Waits for the whole call: a part of it is no JSON."""
        body = self._cutter.take_rest()
        text, mark, rest = body.partition(CALLED)
        if not mark:
            self._cutter.add(body)
            return [], False
        self._cutter.add(rest)
        self._step = self._say
        called = _called(text)
        if called is None:
            blank, self._blank = self._blank, ""
            self._is_at_start = False
            return [Said(blank + CALL + text + CALLED)], True
        self._blank, self._is_at_start = "", True
        return [Call(called[0]), Arguments(called[1])], True

    # --- blanks

    def _thought(self, text: str) -> list[Part]:
        text = self._unblanked(text)
        return [Thought(text)] if text else []

    def _unblanked(self, text: str) -> str:
        """Text without the blanks before and after; those inside come with what follows them."""
        text = self._unstarted(self._blank + text)
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        return shown

    def _unstarted(self, text: str) -> str:
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text

    def _cutter_first(self, text: str) -> None:
        self._cutter.add(text + self._cutter.take_rest())


def _called(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is none."""
    try:
        call: Any = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
