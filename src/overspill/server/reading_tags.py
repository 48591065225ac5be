"""Answers with tags: thoughts between `<think>` and `</think>`, and calls in one of the forms of `reading_forms`.

Thoughts stand first, if anywhere: a tag that comes later is text. A call that is cut off, or is not of the form, is
text as well; nothing a model wrote gets lost, but for the blank lines between thoughts, text and calls. A call is told
when it is whole: only then is it certain that it is one. What closes a call may also stand inside it, in a text
argument, so where a closing mark does not complete a call, the next one may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overspill.server.reading import Called, Cutter, Part, Said, Thought

_MOST_CLOSINGS = 16  # tried for one call: enough for any argument, and a bound on the work for a hostile answer


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What opens and closes thoughts."""

    opening: str = "<think>"
    closing: str = "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallMarks:
    """What opens calls, with what closes each (None: the answer's end), and how to read one from mark to mark.

    is_first: calls stand before anything else that is said, or nowhere.
    """

    openings: dict[str, str | None]
    read: Callable[[str], list[Called] | None]
    is_first: bool


class TagReader:
    """thoughts, calls: which marks mean something. is_thinking: the prompt has opened the thoughts already."""

    def __init__(self, *, thoughts: ThoughtMarks | None, calls: CallMarks | None, is_thinking: bool) -> None:
        self._cutter = Cutter()
        self._thoughts = thoughts or ThoughtMarks()
        self._calls = calls
        self._openings = list(calls.openings) if calls else []
        self._opening = ""  # of the call that is being read
        self._n_searched = 0  # characters of it in which no closing mark is left to be tried
        self._n_closings = 0
        self._step = self._think if is_thinking else self._begin if thoughts else self._say
        self._blank = ""  # spaces that may turn out to stand before a mark
        self._is_at_start = is_thinking

    def push(self, text: str) -> list[Part]:
        self._cutter.add(text)
        return list(self._read())

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        while self._step == self._call:
            parts += [*self._end_call(), *self._read()]
        rest = self._cutter.take_rest()
        if self._step == self._think:
            return [*parts, *self._thought(rest)]
        text = self._unstarted(self._blank + rest)
        return [*parts, Said(text)] if text else parts

    def _read(self) -> Iterator[Part]:
        while True:
            parts, goes_on = self._step()
            yield from parts
            if not goes_on:
                return

    # --- the states: each takes what it can and says whether another one follows

    def _begin(self) -> tuple[list[Part], bool]:
        """Nothing but blanks so far: thoughts may follow."""
        text, mark = self._cutter.take([self._thoughts.opening])
        if mark and not text.strip() and not self._blank.strip():
            self._blank = ""
            self._step, self._is_at_start = self._think, True
            return [], True
        self._blank += text + (mark or "")
        if not self._blank.strip():
            return [], False
        blank, self._blank = self._blank, ""
        self._cutter.put_back(blank)
        self._step = self._say
        return [], True

    def _think(self) -> tuple[list[Part], bool]:
        text, mark = self._cutter.take([self._thoughts.closing])
        parts = self._thought(text)
        if mark:
            self._blank, self._step, self._is_at_start = "", self._say, True
        return parts, mark is not None

    def _say(self) -> tuple[list[Part], bool]:
        text, mark = self._cutter.take(self._openings) if self._openings else (self._cutter.take_rest(), None)
        if text.strip() and self._calls and self._calls.is_first and self._openings:
            self._openings = []
            self._cutter.put_back(text + (mark or ""))
            return [], True
        parts = self._said(text)
        if mark:
            self._opening, self._n_searched, self._n_closings, self._step = mark, 0, 0, self._call
        return parts, mark is not None

    def _call(self) -> tuple[list[Part], bool]:
        """Tries each closing mark in turn."""
        assert self._calls is not None
        closing = self._calls.openings[self._opening]
        if closing is None:
            return [], False
        body = self._cutter.take_rest()
        while (found := body.find(closing, self._n_searched)) >= 0 and self._n_closings < _MOST_CLOSINGS:
            self._n_closings += 1
            self._n_searched = found + len(closing)
            called = self._calls.read(self._opening + body[: self._n_searched])
            if called is not None:
                self._cutter.add(body[self._n_searched :])
                return self._called(called), True
        self._n_searched = max(self._n_searched, len(body) - len(closing) + 1)
        self._cutter.add(body)
        return (self._not_called(), True) if self._n_closings == _MOST_CLOSINGS else ([], False)

    def _end_call(self) -> list[Part]:
        """A call that nothing closed: one that the answer's end closes, or text after all."""
        assert self._calls is not None
        if self._calls.openings[self._opening] is None:
            body = self._cutter.take_rest()
            if called := self._calls.read(self._opening + body):
                return self._called(called)
            self._cutter.add(body)
        return self._not_called()

    def _not_called(self) -> list[Part]:
        """What seemed to open a call is text; what follows it may hold a call yet."""
        self._step = self._say
        if self._calls and self._calls.is_first:
            self._openings = []
        return self._said(self._opening)

    def _called(self, called: list[Called]) -> list[Part]:
        self._blank, self._is_at_start, self._step = "", True, self._say
        return [part for call in called for part in call.parts]

    # --- blanks

    def _said(self, text: str) -> list[Part]:
        return [Said(said)] if (said := self._unblanked(text)) else []

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
