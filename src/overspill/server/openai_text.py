"""OpenAI's text completions: POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.server.answers import Answer, Piece
from overspill.server.fields import TextBody
from overspill.server.formats import (
    FINGERPRINT,
    UnnamedEvents,
    finish_reason,
    new_id,
    now_s,
    progress_of,
    timings_of,
    timings_so_far,
    usage_of,
)
from overspill.server.generation import Job, Progress
from overspill.text.tokenizer import Tokenizer


class TextFormat(UnnamedEvents):
    """Choices with a text each. Logprobs come as llama-server's list and as OpenAI's three."""

    marks_end = True

    def __init__(self, body: TextBody, job: Job, tokenizer: Tokenizer, model: str) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._echoed: set[int] = set()
        self._n = job.n
        self._head = {
            "id": new_id("cmpl-"),
            "object": "text_completion",
            "created": now_s(),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def progress(self, answer: Answer, progress: Progress) -> list[dict[str, Any]]:
        if not self._body.return_progress:
            return []
        return [self._chunk(answer, Piece("", [], []), None) | progress_of(self._body, progress)]

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        if self._body.echo and answer.index not in self._echoed:
            self._echoed.add(answer.index)
            piece = piece._replace(text=self._prompt(answer) + piece.text)
        if not (piece.text or piece.logprobs):
            return []
        return [self._chunk(answer, piece, None) | timings_so_far(self._body, answer)]

    def end(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        last = self._chunk(answer, Piece("", [], []), finish_reason(answer))
        usage = {"usage": usage_of([answer], 1), "timings": timings_of([answer])}
        return [*self.piece(answer, piece), last if self._body.wants_usage_chunk else last | usage]

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        if not self._body.wants_usage_chunk:
            return []
        return [self._head | {"choices": [], "usage": usage_of(answers, self._n), "timings": timings_of(answers)}]

    def whole(self, answers: Sequence[Answer]) -> Any:
        choices = [
            _choice(answer, self._prompt(answer) + answer.text, answer.logprobs, finish_reason(answer), is_whole=True)
            for answer in answers
        ]
        usage = {"usage": usage_of(answers, self._n), "timings": timings_of(answers)}
        return self._head | {"choices": choices} | usage

    def _prompt(self, answer: Answer) -> str:
        """What comes before the answer, where the request wants it again."""
        return self._tokenizer.decode(answer.prompt_ids) if self._body.echo else ""

    def _chunk(self, answer: Answer, piece: Piece, reason: str | None) -> dict[str, Any]:
        return self._head | {"choices": [_choice(answer, piece.text, piece.logprobs, reason)]}


def _choice(
    answer: Answer, text: str, logprobs: list[dict[str, Any]], reason: str | None, *, is_whole: bool = False
) -> dict[str, Any]:
    has_logprobs = answer.has_logprobs and (is_whole or bool(logprobs))
    return {
        "text": text,
        "index": answer.index,
        "logprobs": _logprobs(logprobs) if has_logprobs else None,
        "finish_reason": reason,
    }


def _logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "content": entries,
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [{top["token"]: top["logprob"] for top in entry.get("top_logprobs", ())} for entry in entries],
    }
