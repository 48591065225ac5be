"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from overspill.server.answers import Answer, Piece
from overspill.server.fields import ChatBody
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
from overspill.server.prompts import begun_text
from overspill.server.reading import Arguments, Call, Part, Reader, Said, Thought, read_all


class ChatFormat(UnnamedEvents):
    """Choices with a message each; a stream opens every choice with its role."""

    marks_end = True

    def __init__(self, body: ChatBody, job: Job, make_reader: Callable[[], Reader], model: str) -> None:
        self._body = body
        self._n = job.n
        self._echoed = begun_text(body) if body.echo and body.continue_final_message else ""
        self._make_reader = make_reader
        self._messages: dict[int, _Message] = {}
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": now_s(),
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }

    def progress(self, answer: Answer, progress: Progress) -> list[dict[str, Any]]:
        if not self._body.return_progress:
            return []
        return [*self._opening(answer), self._chunk(answer, {}) | progress_of(self._body, progress)]

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        return self._pieces(answer, self._message(answer).push, piece)

    def end(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        message = self._message(answer)
        pieces = self._pieces(answer, message.finish, piece)
        last = self._chunk(answer, {}, reason=_finish_reason(answer, message))
        if not self._body.wants_usage_chunk:
            last["timings"] = timings_of([answer])
        return [*pieces, last]

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        if not self._body.wants_usage_chunk:
            return []
        usage = {"usage": usage_of(answers, self._n), "timings": timings_of(answers)}
        return [self._head | {"object": "chat.completion.chunk", "choices": []} | usage]

    def whole(self, answers: Sequence[Answer]) -> Any:
        usage = {"usage": usage_of(answers, self._n), "timings": timings_of(answers)}
        return self._head | {"object": "chat.completion", "choices": [self._choice(a) for a in answers]} | usage

    def _message(self, answer: Answer) -> _Message:
        return self._messages.setdefault(answer.index, _Message(self._make_reader(), self._echoed))

    def _opening(self, answer: Answer) -> list[dict[str, Any]]:
        message = self._message(answer)
        if message.is_open:
            return []
        message.is_open = True
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": None},
            *([{"content": self._echoed}] if self._echoed else []),
        ]
        return [self._chunk(answer, delta) for delta in deltas]

    def _pieces(
        self, answer: Answer, read: Callable[[str], list[dict[str, Any]]], piece: Piece
    ) -> list[dict[str, Any]]:
        """A chunk for each delta, the first with the logprobs, the last with the timings."""
        chunks = self._opening(answer)
        deltas = read(piece.text) or ([{"content": ""}] if piece.logprobs else [])
        for i, delta in enumerate(deltas):
            chunks.append(self._chunk(answer, delta, logprobs=() if i else piece.logprobs))
        if deltas:
            chunks[-1] |= timings_so_far(self._body, answer)
        return chunks

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

    def _choice(self, answer: Answer) -> dict[str, Any]:
        message = _Message(self._make_reader(), self._echoed)
        message.finish(answer.text)
        choice = {
            "index": answer.index,
            "message": message.whole(),
            "finish_reason": _finish_reason(answer, message),
        }
        return choice | ({"logprobs": {"content": answer.logprobs}} if answer.has_logprobs else {})


class _Message:
    """A message as it grows: deltas in OpenAI's form, and all of it at the end. begun: what it begins with."""

    def __init__(self, reader: Reader, begun: str) -> None:
        self.is_open = False
        self.calls: list[dict[str, Any]] = []
        self._reader = reader
        self._thoughts: list[str] = []
        self._said = [begun]

    def push(self, text: str) -> list[dict[str, Any]]:
        return [self._delta(part) for part in self._reader.push(text)]

    def finish(self, text: str) -> list[dict[str, Any]]:
        return [self._delta(part) for part in read_all(self._reader, text)]

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._said)}
        if self._thoughts:
            message["reasoning_content"] = "".join(self._thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def _delta(self, part: Part) -> dict[str, Any]:
        match part:
            case Said():
                self._said.append(part.text)
                return {"content": part.text}
            case Thought():
                self._thoughts.append(part.text)
                return {"reasoning_content": part.text}
            case Call():
                call = {"id": new_id("call_"), "type": "function", "function": {"name": part.name, "arguments": ""}}
                self.calls.append(call)
                opened = call | {"function": dict(self.calls[-1]["function"])}
                return {"tool_calls": [{"index": len(self.calls) - 1} | opened]}
            case Arguments():
                self.calls[-1]["function"]["arguments"] += part.text
                return {"tool_calls": [{"index": len(self.calls) - 1, "function": {"arguments": part.text}}]}


def _finish_reason(answer: Answer, message: _Message) -> str:
    reason = finish_reason(answer)
    return "tool_calls" if message.calls and reason == "stop" else reason
