"""Generated tokens to text that may be shown at once.

A character can be spread over tokens, and so can a stop string. Text is held back while its last bytes may still
become a character, or its end may still become a stop string; what was handed out is never taken back. Invariant: the
pieces handed out, joined, are the decoding of all tokens (invalid bytes as U+FFFD), cut before the stop string that
is complete first (of those that end at the same character, the longest).
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

from overspill.errors import UserError


class Pieces(Protocol):
    """The part of a tokenizer that a stream needs."""

    def piece(self, token_id: int, *, special: bool = False) -> bytes: ...


class TextStream:
    """Text of one generation. Feed ids with `push`, end with `finish`; one thread at a time."""

    def __init__(self, tokenizer: Pieces, stop: Sequence[str] = (), *, shown_ids: Collection[int] = ()) -> None:
        """`stop`: strings that end the text; `shown_ids`: control tokens that are to be visible."""
        if "" in stop:
            raise UserError("stop holds an empty string, which would end every text at once; leave it out")
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = tuple(dict.fromkeys(stop))
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        """The text that is now safe to show, maybe empty. After a stop string it is always empty."""
        piece = self._tokenizer.piece(token_id, special=token_id in self._shown_ids)
        return self._advance(self._utf8.decode(piece))

    def finish(self) -> str:
        """The rest: what was held back, an unfinished character as U+FFFD."""
        text = self._advance(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        if found := self._first_stop(text):
            start, self.stopped_by = found
            self._held = ""
            return text[:start]
        n_safe = len(text) - self._n_undecided(text)
        self._held = text[n_safe:]
        return text[:n_safe]

    def _first_stop(self, text: str) -> tuple[int, str] | None:
        """Where the stop string that is complete first begins, and which it is."""
        found = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(ends)[1:] if ends else None

    def _n_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stops)), 0)
