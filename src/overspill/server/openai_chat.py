"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overspill.server.answers import Answer, Piece
from overspill.server.fields import ChatBody
from overspill.server.formats import (
    FINGERPRINT,
    finish_reason,
    new_id,
    now_s,
    progress_dict,
    timings_of,
    usage_of,
)
from overspill.server.generation import Job, Progress


class ChatFormat:
    """Choices with a message each; a stream opens every choice with its role."""

    marks_end = True

    def __init__(self, body: ChatBody, job: Job, model: str) -> None:
        self._body = body
        self._n = job.n
        self._opened: set[int] = set()
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": now_s(),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def progress(self, answer: Answer, progress: Progress) -> list[dict[str, Any]]:
        if not self._body.return_progress:
            return []
        return [*self._opening(answer), self._chunk(answer, {}) | {"prompt_progress": progress_dict(progress)}]

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        chunks = self._opening(answer)
        if piece.text or piece.logprobs:
            chunks.append(self._chunk(answer, {"content": piece.text}, logprobs=piece.logprobs))
        return chunks

    def end(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        last = self._chunk(answer, {}, reason=finish_reason(answer))
        if not self._body.wants_usage_chunk:
            last["timings"] = timings_of([answer])
        return [*self.piece(answer, piece), last]

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        if not self._body.wants_usage_chunk:
            return []
        usage = {"usage": usage_of(answers, self._n), "timings": timings_of(answers)}
        return [self._head | {"object": "chat.completion.chunk", "choices": []} | usage]

    def whole(self, answers: Sequence[Answer]) -> Any:
        usage = {"usage": usage_of(answers, self._n), "timings": timings_of(answers)}
        return self._head | {"object": "chat.completion", "choices": [_choice(a) for a in answers]} | usage

    def _opening(self, answer: Answer) -> list[dict[str, Any]]:
        if answer.index in self._opened:
            return []
        self._opened.add(answer.index)
        return [self._chunk(answer, {"role": "assistant", "content": None})]

    def _chunk(
        self,
        answer: Answer,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> dict[str, Any]:
        choice = {"index": answer.index, "delta": delta, "finish_reason": reason}
        if logprobs:
            choice["logprobs"] = {"content": list(logprobs)}
        return self._head | {"object": "chat.completion.chunk", "choices": [choice]}


def _choice(answer: Answer) -> dict[str, Any]:
    choice = {
        "index": answer.index,
        "message": {"role": "assistant", "content": answer.text},
        "finish_reason": finish_reason(answer),
    }
    return choice | ({"logprobs": {"content": answer.logprobs}} if answer.has_logprobs else {})
