"""Anthropic's answers: a message of blocks, or the events that build one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from overspill.server.answers import Answer, Piece
from overspill.server.errors import ApiError
from overspill.server.formats import new_id, timings_of
from overspill.server.generation import Progress
from overspill.server.reading import Arguments, Call, Part, Reader, Said, Thought, read_all

Event = dict[str, Any]
_KINDS: dict[type, str] = {Said: "text", Thought: "thinking", Call: "tool_use"}


class MessagesFormat:
    """One answer. Events are named; `message_start` comes with the first part of the prompt computed."""

    marks_end = False
    names_events = True

    def __init__(self, make_reader: Callable[[], Reader], model: str) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._make_reader = make_reader
        self._reader = make_reader()
        self._is_started = False
        self._kinds: list[str] = []  # of the blocks so far

    def error(self, error: ApiError) -> Event:
        return {"type": "error", **error.body}

    def progress(self, answer: Answer, progress: Progress) -> list[Event]:
        return self._start(answer, progress.n_cached)

    def piece(self, answer: Answer, piece: Piece) -> list[Event]:
        return self._start(answer, 0) + self._events(self._reader.push(piece.text))

    def end(self, answer: Answer, piece: Piece) -> list[Event]:
        events = self._start(answer, 0) + self._events(read_all(self._reader, piece.text)) + self._close()
        reason = _stop_reason(answer, self._kinds)
        delta = {"stop_reason": reason, "stop_sequence": answer.stopped_by}
        usage = {"output_tokens": len(answer.token_ids)}
        told = {"delta": delta, "usage": usage, "timings": timings_of([answer])}
        return [*events, {"type": "message_delta", **told}, {"type": "message_stop"}]

    def closing(self, answers: Sequence[Answer]) -> list[Event]:
        return []

    def whole(self, answers: Sequence[Answer]) -> Any:
        (answer,) = answers
        assert answer.done is not None
        blocks = _blocks(read_all(self._make_reader(), answer.text))
        return self._head | {
            "content": blocks,
            "stop_reason": _stop_reason(answer, [block["type"] for block in blocks]),
            "stop_sequence": answer.stopped_by,
            "usage": _usage(answer, answer.done.timings.cache_n),
            "timings": timings_of([answer]),
        }

    def _start(self, answer: Answer, n_cached: int) -> list[Event]:
        if self._is_started:
            return []
        self._is_started = True
        begun: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(answer, n_cached),
        }
        return [{"type": "message_start", "message": self._head | begun}]

    def _events(self, parts: Sequence[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if not isinstance(part, Arguments) and (isinstance(part, Call) or self._kinds[-1:] != [_kind(part)]):
                events += [*self._close(), self._open(part)]
            if not isinstance(part, Call):
                events.append({"type": "content_block_delta", "index": len(self._kinds) - 1, "delta": _delta(part)})
        return events

    def _open(self, part: Said | Thought | Call) -> Event:
        self._kinds.append(_kind(part))
        return {"type": "content_block_start", "index": len(self._kinds) - 1, "content_block": _block(part)}

    def _close(self) -> list[Event]:
        return [{"type": "content_block_stop", "index": len(self._kinds) - 1}] if self._kinds else []


def _kind(part: Part) -> str:
    return _KINDS[type(part)]


def _block(part: Said | Thought | Call) -> dict[str, Any]:
    match part:
        case Said():
            return {"type": "text", "text": ""}
        case Thought():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case Call():
            return {"type": "tool_use", "id": new_id("toolu_"), "name": part.name, "input": {}}


def _delta(part: Said | Thought | Arguments) -> dict[str, str]:
    match part:
        case Said():
            return {"type": "text_delta", "text": part.text}
        case Thought():
            return {"type": "thinking_delta", "thinking": part.text}
        case Arguments():
            return {"type": "input_json_delta", "partial_json": part.text}


def _blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []  # of each block
    for part in parts:
        if isinstance(part, Arguments):
            arguments[-1] += part.text
            continue
        if isinstance(part, Call) or not blocks or blocks[-1]["type"] != _kind(part):
            blocks.append(_block(part))
            arguments.append("")
        if not isinstance(part, Call):
            blocks[-1][_kind(part)] += part.text
    for block, text in zip(blocks, arguments, strict=True):
        if block["type"] == "tool_use":
            block["input"] = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Arguments as the object they spell; those that were cut off, or are none, as they stand."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unparsed": text}


def _usage(answer: Answer, n_cached: int) -> dict[str, int]:
    return {
        "input_tokens": len(answer.prompt_ids) - n_cached,
        "cache_read_input_tokens": n_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.token_ids),
    }


def _stop_reason(answer: Answer, kinds: Sequence[str]) -> str:
    if answer.is_limited:
        return "max_tokens"
    return "tool_use" if "tool_use" in kinds else "stop_sequence" if answer.is_stopped else "end_turn"
