"""One answer as it grows: tokens to text that may be shown, with the logprobs that belong to it.

Invariant: the pieces of an answer, joined, are the answer, text and logprobs alike; whether they are streamed or not
makes no difference. Tokens of a stop string that is cut off have no logprobs.
"""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from overspill.engine.request import DoneEvent, Timings, TokenEvent
from overspill.text.stream import TextStream
from overspill.text.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What an answer has new. logprobs: entries in llama-server's form."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[str, Any]]


class _Pending(NamedTuple):
    """A token whose text is not shown yet: its entry, and its place in the characters of the answer."""

    entry: dict[str, Any]
    start: int
    end: int


class Answer:
    """index: its place among the choices. shown_ids: control tokens to be seen. has_probs: logprobs are told as
    probabilities. is_late: it was ended because of the time it took. timings: so far. Feed it until `done` is set."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        index: int,
        prompt_ids: Sequence[int],
        stop: Sequence[str],
        *,
        shown_ids: frozenset[int],
        has_logprobs: bool,
        has_probs: bool = False,
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.done: DoneEvent | None = None
        self.timings = Timings()
        self.is_late = False
        self.has_logprobs = has_logprobs
        self._has_probs = has_probs
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._stream = TextStream(tokenizer, stop, shown_ids=shown_ids)
        self._pieces: list[str] = []
        self._pending: deque[_Pending] = deque()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0
        self._n_shown = 0

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._stream.stopped_by

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    @property
    def is_over(self) -> bool:
        """Nothing more is taken, whatever the engine has done meanwhile."""
        return self.is_stopped or self.is_late

    @property
    def is_limited(self) -> bool:
        """Ended by a limit, of tokens, of the context or of time."""
        return not self.is_stopped and self.done is not None and (self.is_late or self.done.reason == "length")

    def push(self, event: TokenEvent) -> Piece:
        """Take a token; nothing is taken after a stop string."""
        self.token_ids.append(event.token_id)
        self.timings = event.timings
        if self.has_logprobs:
            self._remember(event)
        text = "" if event.is_stop else self._stream.push(event.token_id)
        return self._piece(text, [event.token_id], is_last=False)

    def finish(self, done: DoneEvent) -> Piece:
        """The rest, which was held back."""
        self.done, self.timings = done, done.timings
        return self._piece(self._stream.finish(), [], is_last=True)

    def _piece(self, text: str, token_ids: list[int], *, is_last: bool) -> Piece:
        self._pieces.append(text)
        self._n_shown += len(text)
        shown = []
        while self._pending and self._is_shown(self._pending[0], is_last=is_last):
            shown.append(self._pending.popleft().entry)
        self.logprobs += shown
        return Piece(text, token_ids, shown)

    def _is_shown(self, token: _Pending, *, is_last: bool) -> bool:
        if self.is_stopped:
            return token.start < self._n_shown
        return is_last or token.end <= self._n_shown

    def _remember(self, event: TokenEvent) -> None:
        entry = self._entry(event.token_id, event.logprob)
        entry["top_probs" if self._has_probs else "top_logprobs"] = [
            self._entry(token_id, logprob) for token_id, logprob in event.top
        ]
        start = self._n_chars
        if not event.is_stop:
            piece = self._tokenizer.piece(event.token_id, special=event.token_id in self._shown_ids)
            self._n_chars += len(self._utf8.decode(piece))
        is_unfinished = self._utf8.getstate()[0] != b""
        self._pending.append(_Pending(entry, start, self._n_chars + is_unfinished))

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.piece(token_id, special=True)
        chance = {"prob": math.exp(logprob)} if self._has_probs else {"logprob": logprob}
        return {"id": token_id, "token": data.decode("utf-8", "replace"), "bytes": list(data), **chance}
