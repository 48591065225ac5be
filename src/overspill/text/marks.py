"""Telling a template's markup from what clients wrote, in a prompt that is already rendered.

Where a message spells a special token, the spelling is put between marks before rendering, and a mark at either end of
a message's text keeps it from growing together with its surroundings. Marks are characters of Unicode's private use
area that occur nowhere in the conversation; templates carry them through like any other character, whatever they cut
off, move or leave out. Between an opening and a closing mark is ordinary text, everything else is markup.

Guarded are control tokens, and in what clients wrote also the user-defined tokens that the template uses as markup
(`</think>`, `<tool_call>`). In an assistant's text those are the model's own and stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.errors import UserError
from overspill.text.messages import Message
from overspill.text.special import Segment, SpecialFinder, SpecialTexts

_PRIVATE_USE = range(0xE000, 0xF900)
_PROSE = ("content", "reasoning_content", "thinking")


@dataclass(frozen=True)
class Guards:
    """Finders of what may not be spelled, by who wrote the text."""

    client: SpecialFinder
    assistant: SpecialFinder

    @classmethod
    def of(cls, texts: SpecialTexts, source: str) -> Guards:
        """The guards for a vocabulary and the template `source`."""
        marks = {text for text in texts.user_defined if text in source and any(c.isalnum() for c in text)}
        client, assistant = (dict.fromkeys(guarded, 0) for guarded in (texts.control | marks, texts.control))
        return cls(SpecialFinder(client), SpecialFinder(assistant))


@dataclass(frozen=True)
class Marks:
    """The three characters: before a guarded spelling, after it, at the ends of a text."""

    opening: str
    closing: str
    end: str

    @classmethod
    def unused_in(cls, *texts: str) -> Marks:
        free = (chr(code) for code in _PRIVATE_USE if not any(chr(code) in text for text in texts))
        try:
            return cls(next(free), next(free), next(free))
        except StopIteration:
            raise UserError("the messages use up Unicode's private use area; leave those characters out") from None

    def marked_messages(self, messages: Sequence[Message], guards: Guards, *, has_ends: bool) -> list[Message]:
        """Copies with marks in all texts; without `has_ends` only around guarded spellings."""
        prose = _PROSE if has_ends else ()
        return [
            {
                name: self._marked(item, _guard(message, guards), is_prose=name in prose)
                for name, item in message.items()
            }
            for message in messages
        ]

    def marked_tools(self, tools: Sequence[Mapping[str, Any]], guards: Guards) -> list[Any]:
        return [self._marked(tool, guards.client, is_prose=False) for tool in tools]

    def removed_from(self, text: str) -> str:
        return re.sub(f"[{self.opening}{self.closing}{self.end}]", "", text)

    def segments(self, text: str) -> list[Segment]:
        """`text` cut at its marks, which are left out; a mark whose partner got lost only cuts."""
        marks = f"{self.opening}{self.closing}{self.end}"
        parts: list[Segment] = []
        start = 0
        for match in re.finditer(f"{self.opening}([^{marks}]*){self.closing}|[{marks}]", text):
            parts += (Segment(text[start : match.start()], True), Segment(match[1] or "", False))
            start = match.end()
        return [part for part in (*parts, Segment(text[start:], True)) if part.text]

    def _marked(self, value: Any, guard: SpecialFinder, *, is_prose: bool) -> Any:
        if isinstance(value, Mapping):
            return {
                self._guarded(name, guard): self._marked(item, guard, is_prose=is_prose and name != "type")
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._marked(item, guard, is_prose=is_prose) for item in value]
        if not isinstance(value, str):
            return value
        guarded = self._guarded(value, guard)
        return _framed(guarded, self.end) if is_prose else guarded

    def _guarded(self, text: str, guard: SpecialFinder) -> str:
        parts: list[str] = []
        start = 0
        for hit in guard.find(text):
            parts += (text[start : hit.start], self.opening, text[hit.start : hit.end], self.closing)
            start = hit.end
        return "".join((*parts, text[start:]))


def _guard(message: Message, guards: Guards) -> SpecialFinder:
    return guards.assistant if message["role"] == "assistant" else guards.client


def _framed(text: str, end: str) -> str:
    """`end` on both sides of what is not white space, so that trimming works as before."""
    core = text.strip()
    if not core:
        return text
    start = text.index(core)
    return f"{text[:start]}{end}{core}{end}{text[start + len(core) :]}"
