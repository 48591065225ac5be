"""Answers in channels, as gpt-oss writes them: messages of a header and a body each.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>arguments<|call|>

The generation prompt ends with `<|start|>assistant`, so an answer begins inside a header. A header that is cut off says
nothing.
"""

from __future__ import annotations

import re

from overspill.server.reading import Arguments, Call, Cutter, Part, Said, Thought

MARKS = START, CHANNEL, MESSAGE, END, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class ChannelReader:
    """Reads an answer that begins inside a header."""

    def __init__(self) -> None:
        self._cutter = Cutter()
        self._header = ""
        self._kind: type[Thought] | type[Said] | type[Arguments] | None = None  # None: in a header

    def push(self, text: str) -> list[Part]:
        self._cutter.add(text)
        parts: list[Part] = []
        while True:
            text, mark = self._cutter.take([MESSAGE] if self._kind is None else [END, START])
            parts += self._take(text)
            if mark is None:
                return parts
            if mark == MESSAGE:
                parts += self._open()
            else:
                self._kind = None

    def finish(self) -> list[Part]:
        return self._take(self._cutter.take_rest())

    def _take(self, text: str) -> list[Part]:
        if self._kind is None:
            self._header += text
            return []
        return [self._kind(text)] if text else []

    def _open(self) -> list[Part]:
        header, self._header = self._header, ""
        if recipient := _RECIPIENT.search(header):
            self._kind = Arguments
            return [Call(recipient[1])]
        channel = _CHANNEL.search(header)
        self._kind = Thought if channel is not None and channel[1] == "analysis" else Said
        return []
