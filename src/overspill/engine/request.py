"""What goes into the engine and what comes out: requests and events.

Ids in, ids out: nothing here knows text. All values are frozen. What depends on the model (vocabulary, context) is
checked by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from overspill.engine.constraint import Constraint
from overspill.engine.params import SamplingParams

DoneReason = Literal["stop", "length", "cancelled", "refused", "error"]
TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    id: unique among the requests in flight. prompt_ids: at least one, fewer than a slot's context.
    stop_ids: the model's end-of-generation ids. constraint: of this request alone, what its answer may consist of.
    slot: the one to use, modulo their number; None: any. reuses_cells: what a slot has of the prompt is not computed
    again.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    slot: int | None = None
    reuses_cells: bool = True


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

    logprob: natural log of its probability under the raw logits, before bias, penalties and temperature (after all of
    them with `post_sampling_probs`); always finite.
    top: the `n_probs` likeliest (id, logprob), best first. is_stop: an end id, to be counted but not shown. timings: of
    the request so far.
    """

    request_id: str
    token_id: int
    logprob: float
    top: TopLogprobs = ()
    is_stop: bool = False
    timings: Timings = field(default_factory=Timings, compare=False)


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """The last event of a request.

    reason: "stop" (an end id came), "length" (max_tokens or the context reached), "cancelled", "refused" (the request's
    settings leave no token, or its constraint cannot be followed), "error" (the device or the model failed).
    slot: where it was; None if it never had one.
    n_generated: tokens, a final end id included. message: one line, with "refused" and "error". seed: what the draws
    used.
    """

    request_id: str
    reason: DoneReason
    n_prompt: int
    n_generated: int
    message: str = ""
    timings: Timings = field(default_factory=Timings)
    seed: int | None = None
    slot: int | None = None


Event = ProgressEvent | TokenEvent | DoneEvent
