"""The samplers of one request in their order, from `SamplingParams`; those that are off cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from overspill.engine.candidates import (
    Candidates,
    dynamic_temperature,
    min_p,
    temperature,
    top_k,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from overspill.engine.params import SamplingParams
from overspill.engine.repetition import by_head, dry, penalties

History = Sequence[int]
Step = Callable[[Candidates, History, np.random.Generator], Candidates]

_XTC_MOST = 0.5  # above half of all, two tokens cannot both be


def chain_of(p: SamplingParams) -> tuple[Step, ...]:
    """What to do with the candidates of a token, one step after the other; the last step leaves what is drawn from."""
    if p.mirostat:
        return tuple(_STEPS["temperature"](p))
    return tuple(step for name in p.samplers for step in _STEPS[name](p))


def is_greedy(p: SamplingParams) -> bool:
    """Whether the likeliest token after bias and penalties is what the chain ends with, so that nothing has to be cut.

    typ_p and XTC may drop the likeliest token; the other cuts never do.
    """
    is_cold = p.temperature == 0 and p.dynatemp_range == 0 and "temperature" in p.samplers
    return is_cold and not p.mirostat and not _typical(p) and not _xtc(p)


def looks_back(p: SamplingParams) -> tuple[Step, ...]:
    """The steps that reorder candidates by what came before."""
    return tuple(step for name in p.samplers if name in ("penalties", "dry") for step in _STEPS[name](p))


def _penalties(p: SamplingParams) -> list[Step]:
    is_on = p.repeat_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
    if not is_on or not p.repeat_last_n:
        return []
    n, repeat, presence, frequency = p.repeat_last_n, p.repeat_penalty, p.presence_penalty, p.frequency_penalty
    return [lambda c, history, rng: penalties(c, history[-n:], repeat, presence, frequency)]


def _dry(p: SamplingParams) -> list[Step]:
    if not p.dry_multiplier or not p.dry_penalty_last_n:
        return []
    breakers, n = by_head(p.dry_breakers), p.dry_penalty_last_n

    def step(c: Candidates, history: History, rng: np.random.Generator) -> Candidates:
        window = history[-n:] if n > 0 else history
        return dry(c, window, p.dry_multiplier, p.dry_base, p.dry_allowed_length, breakers)

    return [step]


def _xtc(p: SamplingParams) -> list[Step]:
    if p.xtc_probability <= 0 or p.xtc_threshold > _XTC_MOST:
        return []

    def step(c: Candidates, history: History, rng: np.random.Generator) -> Candidates:
        return xtc(c, p.xtc_threshold, p.min_keep) if rng.random() < p.xtc_probability else c

    return [step]


def _temperature(p: SamplingParams) -> list[Step]:
    def step(c: Candidates, history: History, rng: np.random.Generator) -> Candidates:
        if p.dynatemp_range <= 0:
            return temperature(c, p.temperature)
        return temperature(c, dynamic_temperature(c, p.temperature, p.dynatemp_range, p.dynatemp_exponent))

    return [step]


def _typical(p: SamplingParams) -> list[Step]:
    return _cut(typical, p.typical_p, p.min_keep) if p.typical_p < 1 else []


def _cut(cut: Callable[[Candidates, float, int], Candidates], value: float, min_keep: int) -> list[Step]:
    return [lambda c, history, rng: cut(c, value, min_keep)]


_STEPS: dict[str, Callable[[SamplingParams], list[Step]]] = {
    "penalties": _penalties,
    "dry": _dry,
    "top_n_sigma": lambda p: [lambda c, history, rng: top_n_sigma(c, p.top_n_sigma)] if p.top_n_sigma > 0 else [],
    "top_k": lambda p: [lambda c, history, rng: top_k(c, p.top_k)] if p.top_k else [],
    "typ_p": _typical,
    "top_p": lambda p: _cut(top_p, p.top_p, p.min_keep) if p.top_p < 1 else [],
    "min_p": lambda p: _cut(min_p, p.min_p, p.min_keep) if p.min_p else [],
    "xtc": _xtc,
    "temperature": _temperature,
}
