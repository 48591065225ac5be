"""From logits to one token id.

The logits get their biases, go through the request's chain of samplers (llama.cpp's, in its default order), and one
token is drawn. Where a constraint forbids that token, the choice is made again among those it allows, as llama.cpp
does: most tokens of a constrained answer cost no more than others. Sums run in float64 in one thread and the random
numbers are NumPy's PCG64, so a seed gives the same tokens whatever the number of threads (they are not the tokens
llama.cpp draws for that seed). Logits that are not numbers never become text: they raise `BadLogits`.

Legend: V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.engine.candidates import Candidates, Doubles, all_places, drawn, largest
from overspill.engine.chain import chain_of, is_greedy, looks_back
from overspill.engine.constraint import Constraint
from overspill.engine.mirostat import mirostat_1, mirostat_2, next_mu
from overspill.engine.params import SamplingParams
from overspill.engine.request import TopLogprobs

Floats = NDArray[np.float32]
Allowed = NDArray[np.bool_]

# The largest float32; JSON has no infinity, so a logprob of -inf is reported as the lowest float, as llama-server does.
_FLOAT_MAX = float(np.finfo(np.float32).max)
_MOST = float(np.finfo(np.float64).max) / 4


class BadLogits(RuntimeError):
    """The model gave no numbers to choose by: NaN or +inf, or nothing but -inf."""


class NoTokenLeft(RuntimeError):
    """The request's own settings forbid every token that the model allows."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled id, its logprob, and the likeliest (id, logprob)."""

    id: int
    logprob: float
    top: TopLogprobs


class Sampler:
    """Samples the tokens of one request. Holds the random state, mirostat's, and the constraint's: one per request.

    seed: of the random numbers (instead of `params.seed`, which may be None). banned_ids: never sampled.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        banned_ids: frozenset[int] = frozenset(),
        constraint: Constraint | None = None,
    ) -> None:
        self.seed = seed
        self._params = params
        self._constraint = constraint
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._biases = tuple((i, bias) for i, bias in params.logit_bias if bias != -math.inf)
        banned = banned_ids | {i for i, bias in params.logit_bias if bias == -math.inf}
        self._banned_ids = np.array(sorted(banned), dtype=np.int64)
        self._is_greedy = is_greedy(params)
        self._chain = looks_back(params) if self._is_greedy else chain_of(params)
        self._takes_best = self._is_greedy and not (self._chain or self._biases or banned)
        self._mu = 2 * params.mirostat_tau

    def sample(self, logits: torch.Tensor | Floats, history: Sequence[int]) -> Draw:
        """Choose the next token.

        logits: [V] float32 on the host, left as they are. history: the prompt and what was generated so far.
        Raises BadLogits, NoTokenLeft, and the UserError of a constraint.
        """
        logits_V: Floats = logits.numpy() if isinstance(logits, torch.Tensor) else logits
        best_id = _checked_argmax(logits_V)
        left, place = self._chosen(logits_V, history, None)
        if self._constraint is not None:
            if not self._constraint.allows(int(left.ids[place])):
                left, place = self._chosen(logits_V, history, self._constraint.allowed(len(logits_V)))
            self._constraint.accept(int(left.ids[place]))
        if self._params.mirostat:
            chance = float(left.probabilities[place])
            self._mu = next_mu(self._mu, chance, self._params.mirostat_tau, self._params.mirostat_eta)
        return self._told(logits_V, best_id, left, place)

    def _chosen(self, logits_V: Floats, history: Sequence[int], allowed: Allowed | None) -> tuple[Candidates, int]:
        """What the chain leaves, and the place of the token that was drawn."""
        if self._takes_best and allowed is None:
            return Candidates(np.array([logits_V.argmax()]), np.zeros(1)), 0
        c = self._candidates(logits_V, allowed)
        for step in self._chain:
            c = step(c, history, self._rng)
        if self._is_greedy:
            return c, int(c.logits.argmax())
        if self._params.mirostat == 1:
            c = mirostat_1(c, self._mu, len(logits_V))
        elif self._params.mirostat == 2:
            c = mirostat_2(c, self._mu)
        return c, drawn(c, self._rng.random())

    def _candidates(self, logits_V: Floats, allowed: Allowed | None) -> Candidates:
        """The tokens that may come at all, their biases added."""
        biased_V: Doubles = logits_V.astype(np.float64)
        for token_id, bias in self._biases:
            biased_V[token_id] = np.clip(biased_V[token_id] + bias, -_MOST, _MOST)
        is_left = logits_V > -np.inf
        is_left[self._banned_ids] = False
        if allowed is not None:
            is_left &= allowed
        if is_left.all():
            return Candidates(all_places(len(biased_V)), biased_V)
        ids = np.flatnonzero(is_left)
        if not ids.size:
            raise NoTokenLeft("no token is left to sample: logit_bias, ignore_eos or a grammar forbid all there are")
        return Candidates(ids, biased_V[ids])

    def _told(self, logits_V: Floats, best_id: int, left: Candidates, place: int) -> Draw:
        n, token_id = self._params.n_probs, int(left.ids[place])
        if self._params.post_sampling_probs:
            only = left.take(np.array([place])) if self._is_greedy else left
            logprobs = np.log(np.maximum(only.probabilities, np.finfo(np.float64).tiny))
            top = tuple((int(only.ids[i]), float(logprobs[i])) for i in largest(only.logits, n)) if n else ()
            return Draw(token_id, float(logprobs[only.ids == token_id][0]), top)
        log_total = _log_sum_exp(logits_V, logits_V[best_id])
        top = tuple((int(i), _logprob(logits_V[i], log_total)) for i in largest(logits_V, n)) if n else ()
        return Draw(token_id, _logprob(logits_V[token_id], log_total), top)


def _checked_argmax(logits_V: Floats) -> int:
    # argmax finds a NaN before any number: one pass tells all that could be wrong.
    best_id = int(logits_V.argmax())
    best = logits_V[best_id]
    if np.isfinite(best):
        return best_id
    if best == -np.inf:
        raise BadLogits(f"all {len(logits_V)} logits are -inf: the model allows no token")
    n_nan, n_inf = int(np.isnan(logits_V).sum()), int(np.isposinf(logits_V).sum())
    raise BadLogits(
        f"{n_nan} of {len(logits_V)} logits are NaN and {n_inf} are +inf: the model's weights hold bad values "
        f"or a sum overflowed; check the model file"
    )


def _log_sum_exp(logits_V: Floats, largest_logit: np.float32) -> float:
    with np.errstate(over="ignore"):  # two huge logits may lie further apart than a float32 tells: probability 0
        total = np.exp(logits_V - largest_logit).sum(dtype=np.float64)
    return float(largest_logit) + math.log(total)


def _logprob(logit: np.float32, log_total: float) -> float:
    return max(float(logit) - log_total, -_FLOAT_MAX)
