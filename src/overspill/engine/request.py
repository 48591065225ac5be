"""What goes into the engine and what comes out: requests, sampling parameters, events.

Ids in, ids out: nothing here knows text. All values are frozen; `SamplingParams` checks itself when it is made, so
that whatever holds one holds a valid one. What depends on the model (vocabulary, context) is checked by the scheduler.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Literal

from overspill.errors import UserError

DoneReason = Literal["stop", "length", "cancelled", "error"]
TopLogprobs = tuple[tuple[int, float], ...]

_INT_LIMITS = {
    "top_k": (0, None),
    "repeat_last_n": (0, None),
    "max_tokens": (-1, None),
    "n_probs": (0, None),
    "seed": (0, 2**64 - 1),
}
_NUMBER_LIMITS = {
    "temperature": (0.0, None),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (0.0, None),
    "presence_penalty": (-1000.0, 1000.0),
    "frequency_penalty": (-1000.0, 1000.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen. The chain: logit_bias, penalties, top_k, top_p, min_p, temperature, draw.

    temperature: 0 takes the largest logit (the lowest id on ties). top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    repeat_penalty (1 is off), presence_penalty, frequency_penalty: count the last `repeat_last_n` tokens of prompt and
    answer.
    seed: None draws one, which `DoneEvent.seed` reports.
    max_tokens: -1 is "until the context is full", 0 only computes the prompt.
    stop_ids: end the request, besides the model's own end ids (`Request.stop_ids`).
    ignore_eos: the model's own end ids are never sampled.
    logit_bias: (id, bias) added to the logits; -inf bans an id.
    n_probs: how many of the likeliest tokens a `TokenEvent` lists.
    Raises UserError for values outside these meanings.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = -1
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_probs: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _INT_LIMITS.items():
            if not (name == "seed" and self.seed is None):
                _check_int(name, getattr(self, name), low, high)
        for name, (least, most) in _NUMBER_LIMITS.items():
            _check_number(name, getattr(self, name), least, most)
        if self.repeat_penalty == 0:
            raise UserError("repeat_penalty: 0 is no penalty, give a number above 0 (1 turns it off)")
        for stop_id in self.stop_ids:
            _check_int("stop_ids", stop_id, 0, None)
        for token_id, bias in self.logit_bias:
            _check_int("logit_bias id", token_id, 0, None)
            if bias != -math.inf:
                _check_number(f"logit_bias of id {token_id}", bias, None, None)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _range_text(low: float | None, high: float | None) -> str:
    return "" if low is None else f" from {low} up" if high is None else f" from {low} to {high}"


def _check_int(name: str, value: int, low: int, high: int | None) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):
        raise UserError(f"{name}: {value!r} found, give a whole number{_range_text(low, high)}")


def _check_number(name: str, value: float, low: float | None, high: float | None) -> None:
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    least = -sys.float_info.max if low is None else low
    most = sys.float_info.max if high is None else high
    if not is_number or not least <= value <= most:  # NaN is within nothing
        raise UserError(f"{name}: {value!r} found, give a finite number{_range_text(low, high)}")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    id: unique among the requests in flight. prompt_ids: at least one, fewer than a slot's context.
    stop_ids: the model's end-of-generation ids.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """Times of one request, milliseconds, under the names llama-server uses in its `timings` object.

    cache_n: prompt tokens taken from cells a former request left. prompt_n: prompt tokens computed.
    prompt_ms: from the first wave of the request to its first token. predicted_n: tokens generated.
    predicted_ms: from the first token to the last, so rates count predicted_n - 1 steps. A rate without steps is 0.
    """

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0

    @property
    def prompt_per_token_ms(self) -> float:
        return _ratio(self.prompt_ms, self.prompt_n)

    @property
    def prompt_per_second(self) -> float:
        return _ratio(1000.0 * self.prompt_n, self.prompt_ms)

    @property
    def predicted_per_token_ms(self) -> float:
        return _ratio(self.predicted_ms, self.predicted_n - 1)

    @property
    def predicted_per_second(self) -> float:
        return _ratio(1000.0 * (self.predicted_n - 1), self.predicted_ms)


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """After each wave of a prompt: n_done of its n_total tokens have cells, n_cached of them had them before."""

    request_id: str
    n_done: int
    n_total: int
    n_cached: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token.

    logprob: natural log of its probability under the raw logits, before bias, penalties and temperature; always finite.
    top: the `n_probs` likeliest (id, logprob), best first. is_stop: an end id, to be counted but not shown.
    """

    request_id: str
    token_id: int
    logprob: float
    top: TopLogprobs = ()
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The last event of a request.

    reason: "stop" (an end id came), "length" (max_tokens or the context reached), "cancelled", "error".
    n_generated: tokens, a final end id included. message: one line, only with "error". seed: what the draws used.
    """

    request_id: str
    reason: DoneReason
    n_prompt: int
    n_generated: int
    message: str = ""
    timings: Timings = field(default_factory=Timings)
    seed: int | None = None


Event = ProgressEvent | TokenEvent | DoneEvent
