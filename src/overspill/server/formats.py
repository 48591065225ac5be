"""What an endpoint's answers look like: the contract of the formats, and the parts they share."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from overspill.engine.request import Timings
from overspill.server.answers import Answer, Piece
from overspill.server.errors import ApiError
from overspill.server.fields import SamplingFields
from overspill.server.generation import Progress

FINGERPRINT = "overspill"


class Format(Protocol):
    """An endpoint's way to tell answers. One object serves one request; `events` are in the order they are sent."""

    marks_end: bool
    """Whether a stream ends with `[DONE]`."""
    names_events: bool
    """Whether an event is named by its `type`."""

    def error(self, error: ApiError) -> dict[str, Any]:
        """The event for an error that ends a stream."""
        ...

    def progress(self, answer: Answer, progress: Progress) -> list[dict[str, Any]]:
        """Events for a part of a prompt computed."""
        ...

    def piece(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Events for a new piece of an answer."""
        ...

    def end(self, answer: Answer, piece: Piece) -> list[dict[str, Any]]:
        """Events for the end of an answer; `piece` is what was held back."""
        ...

    def closing(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        """Events after the end of all answers."""
        ...

    def whole(self, answers: Sequence[Answer]) -> Any:
        """All answers at once, for a request without streaming."""
        ...


class UnnamedEvents:
    """What the formats of llama-server and OpenAI share."""

    names_events = False

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.body


def timings_dict(t: Timings) -> dict[str, float]:
    """The `timings` object."""
    return {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_per_token_ms,
        "prompt_per_second": t.prompt_per_second,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_per_token_ms,
        "predicted_per_second": t.predicted_per_second,
    }


def timings_of(answers: Sequence[Answer]) -> dict[str, float]:
    """The timings of the last answer that ended."""
    return timings_dict(_done(answers[-1]).timings)


def timings_so_far(body: SamplingFields, answer: Answer) -> dict[str, Any]:
    """What a chunk has besides, where the request wants timings with each."""
    return {"timings": timings_dict(answer.timings)} if body.timings_per_token else {}


def progress_of(body: SamplingFields, progress: Progress) -> dict[str, Any]:
    """What a chunk has that tells how far a prompt is."""
    so_far = {
        "total": progress.n_total,
        "cache": progress.n_cached,
        "processed": progress.n_done,
        "time_ms": progress.time_ms,
    }
    read = Timings(cache_n=progress.n_cached, prompt_n=progress.n_done - progress.n_cached, prompt_ms=progress.time_ms)
    timings = {"timings": timings_dict(read)} if body.timings_per_token else {}
    return {"prompt_progress": so_far} | timings


def usage_of(answers: Sequence[Answer], n_per_prompt: int) -> dict[str, Any]:
    """Tokens of all answers; a prompt counts once, however many answers it has."""
    n_prompt = sum(len(answer.prompt_ids) for answer in answers[::n_per_prompt])
    n_generated = sum(len(answer.token_ids) for answer in answers)
    n_cached = sum(_done(answer).timings.cache_n for answer in answers[::n_per_prompt])
    return {
        "completion_tokens": n_generated,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


def finish_reason(answer: Answer) -> str:
    """OpenAI's `finish_reason`."""
    return "length" if answer.is_limited else "stop"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def now_s() -> int:
    return int(time.time())


def _done(answer: Answer) -> Any:
    assert answer.done is not None
    return answer.done
