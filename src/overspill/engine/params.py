"""How the next token is chosen: the settings of one request, checked when they are made.

Names, defaults and order are llama.cpp's. Whatever holds a `SamplingParams` holds a valid one; what depends on the
model (vocabulary, context) is checked by the scheduler.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from overspill.errors import UserError

DEFAULT_SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

_INT_LIMITS = {
    "top_k": (0, None),
    "repeat_last_n": (0, None),
    "max_tokens": (-1, None),
    "n_probs": (0, None),
    "min_keep": (0, None),
    "dry_allowed_length": (0, None),
    "dry_penalty_last_n": (-1, None),
    "mirostat": (0, 2),
    "seed": (0, 2**64 - 1),
}
_NUMBER_LIMITS = {
    "temperature": (0.0, None),
    "dynatemp_range": (0.0, None),
    "dynatemp_exponent": (0.0, None),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "top_n_sigma": (None, None),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "repeat_penalty": (0.0, None),
    "presence_penalty": (-1000.0, 1000.0),
    "frequency_penalty": (-1000.0, 1000.0),
    "dry_multiplier": (0.0, None),
    "dry_base": (1.0, None),
    "mirostat_tau": (0.0, 1000.0),
    "mirostat_eta": (0.0, 1000.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The chain: logit_bias, then `samplers` in their order, then a draw.

    temperature: 0 takes the largest logit that is left (the lowest id on ties). dynatemp_range: the temperature moves
    that far up and down with the entropy, 0 is off; dynatemp_exponent: the curve of that.
    top_k, top_p, min_p, typical_p, top_n_sigma: cuts; off at 0, 1, 0, 1 and anything up to 0. min_keep: what top_p,
    min_p, typical_p and XTC leave at least.
    xtc_probability: of dropping, for a token, all candidates above xtc_threshold but the least likely of them.
    repeat_penalty (1 is off), presence_penalty, frequency_penalty: count the last `repeat_last_n` tokens of prompt and
    answer.
    dry_multiplier (0 is off), dry_base, dry_allowed_length: a token that would lengthen a repetition of n tokens loses
    multiplier * base ** (n - allowed); dry_penalty_last_n: tokens looked at, -1 for all; dry_breakers: sequences of ids
    that no repetition reaches across.
    mirostat: 1 or 2 replaces all samplers but temperature, aiming at a surprise of mirostat_tau bits, learning at
    mirostat_eta; 0 is off.
    samplers: which of `DEFAULT_SAMPLERS`, in which order.
    seed: None draws one, which `DoneEvent.seed` reports.
    max_tokens: -1 is "until the context is full", 0 only computes the prompt.
    stop_ids: end the request, besides the model's own end ids (`Request.stop_ids`).
    ignore_eos: the model's own end ids are never sampled.
    logit_bias: (id, bias) added to the logits; -inf bans an id.
    n_probs: how many of the likeliest tokens a `TokenEvent` lists. post_sampling_probs: they and the token's own are
    told as they are after the chain, not before it.
    Raises UserError for values outside these meanings.
    """

    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    min_keep: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_breakers: tuple[tuple[int, ...], ...] = ()
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = DEFAULT_SAMPLERS
    seed: int | None = None
    max_tokens: int = -1
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    n_probs: int = 0
    post_sampling_probs: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _INT_LIMITS.items():
            if not (name == "seed" and self.seed is None):
                _check_int(name, getattr(self, name), low, high)
        for name, (least, most) in _NUMBER_LIMITS.items():
            _check_number(name, getattr(self, name), least, most)
        if self.repeat_penalty == 0:
            raise UserError("repeat_penalty: 0 is no penalty, give a number above 0 (1 turns it off)")
        for sampler in self.samplers:
            if sampler not in DEFAULT_SAMPLERS:
                raise UserError(f"samplers: {sampler!r} found, there are {', '.join(DEFAULT_SAMPLERS)}")
        if () in self.dry_breakers:
            raise UserError("dry_breakers: one of them is empty, give at least one id each")
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
