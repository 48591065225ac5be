"""Answers in channels, as gpt-oss writes them: messages of a header and a body each.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>

The generation prompt ends with `<|start|>assistant`, so an answer begins inside a header. A header that is cut off says
nothing; text that is no header, and a call whose arguments are no JSON object, are said as they stand.
"""

from __future__ import annotations

import re

from overspill.server.reading import Called, Cutter, Part, Said, Thought
from overspill.server.reading_json import is_object

MARKS = START, CHANNEL, MESSAGE, END, CONSTRAIN, CALL = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
    "<|call|>",
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_BEGINNINGS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
_CUT_OFF = re.compile(r"\s*(<\|start\|>\w*|<\|channel\|>\s*\w*|<\|constrain\|>\s*\w*|to=[^\s<]*|\s)*(<[|\w]*)?")


def is_final(text: str) -> bool:
    """Whether an answer has just come to the body of its final message."""
    channels = _CHANNEL.findall(text)
    return text.endswith(MESSAGE) and channels[-1:] == ["final"]


class _Header:
    """Between messages."""


class _Arguments:
    """In the body of a call."""


_Kind = type[Thought] | type[Said] | type[_Header] | type[_Arguments]


class ChannelReader:
    """Reads an answer that begins inside a header. has_calls: tools are offered; a call is text otherwise."""

    def __init__(self, *, has_calls: bool) -> None:
        self._cutter = Cutter()
        self._has_calls = has_calls
        self._kind: _Kind = _Header
        self._header = ""
        self._arguments = ""

    def push(self, text: str) -> list[Part]:
        self._cutter.add(text)
        parts: list[Part] = []
        while True:
            text, mark = self._cutter.take([MESSAGE] if self._kind is _Header else [END, START, CALL])
            parts += self._take(text)
            if self._kind is _Header and self._is_no_header():
                self._cutter.put_back(self._header + (mark or ""))
                self._header, self._kind = "", Said
            elif mark is None:
                return parts
            else:
                parts += self._marked(mark)

    def finish(self) -> list[Part]:
        parts = self._take(self._cutter.take_rest())
        if self._kind is _Arguments:
            return [*parts, *self._end_call()]
        is_text = self._kind is _Header and not _CUT_OFF.fullmatch(self._header)
        return [*parts, Said(self._header)] if is_text else parts

    def _take(self, text: str) -> list[Part]:
        if self._kind is _Header:
            self._header += text
            return []
        if self._kind is _Arguments:
            self._arguments += text
            return []
        return [Thought(text) if self._kind is Thought else Said(text)] if text else []

    def _is_no_header(self) -> bool:
        begun = self._header.lstrip()
        return not any(begun.startswith(text) or text.startswith(begun) for text in _BEGINNINGS)

    def _marked(self, mark: str) -> list[Part]:
        if self._kind is _Header:
            self._open()
            return []
        parts = self._end_call() if self._kind is _Arguments else []
        self._kind, self._header = _Header, START if mark == START else ""
        return parts

    def _open(self) -> None:
        channel = _CHANNEL.search(self._header)
        if self._has_calls and _RECIPIENT.search(self._header):
            self._kind, self._arguments = _Arguments, ""
            return
        self._kind = Thought if channel is not None and channel[1] == "analysis" else Said
        self._header = ""

    def _end_call(self) -> list[Part]:
        header, body, self._header, self._arguments = self._header, self._arguments, "", ""
        recipient = _RECIPIENT.search(header)
        if recipient is not None and is_object(body):
            return Called(recipient[1], body.strip()).parts
        return [Said(header + MESSAGE + body)]
