"""From logits to one token id.

The chain is llama.cpp's, in its default order: logit_bias, penalties, top_k, top_p, min_p, temperature, draw. Because
temperature comes last, top_p and min_p judge probabilities at temperature 1. Sums run in float64 in one thread and the
random numbers are NumPy's PCG64, so a seed gives the same tokens whatever the number of threads (they are not the
tokens llama.cpp draws for that seed). Logits that are not numbers never become text: they raise `BadLogits`.

Legend: V vocabulary, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.engine.request import SamplingParams, TopLogprobs

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

# The largest float32; JSON has no infinity, so a logprob of -inf is reported as the lowest float, as llama-server does.
_FLOAT_MAX = float(np.finfo(np.float32).max)


class BadLogits(RuntimeError):
    """No token can be sampled from these logits: they hold NaN or +inf, or nothing but -inf."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled id, its logprob under the raw logits, and the likeliest (id, logprob)."""

    id: int
    logprob: float
    top: TopLogprobs


class Sampler:
    """Samples the tokens of one request. Holds the random state, so one per request.

    seed: of the random numbers (instead of `params.seed`, which may be None). banned_ids: never sampled.
    """

    def __init__(self, params: SamplingParams, seed: int, banned_ids: frozenset[int] = frozenset()) -> None:
        self.seed = seed
        self._params = params
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._biases = tuple((i, bias) for i, bias in params.logit_bias if bias != -math.inf)
        banned = banned_ids | {i for i, bias in params.logit_bias if bias == -math.inf}
        self._banned_ids = np.array(sorted(banned), dtype=np.int64)

    def sample(self, logits: torch.Tensor | Floats, history: Sequence[int]) -> Draw:
        """Choose the next token.

        logits: [V] float32 on the host, left as they are. history: the prompt and what was generated so far.
        Raises BadLogits.
        """
        logits_V: Floats = logits.numpy() if isinstance(logits, torch.Tensor) else logits
        best_id = _checked_argmax(logits_V)
        log_total = _log_sum_exp(logits_V, logits_V[best_id])
        token_id = self._choose(self._adjusted(logits_V, history))
        top = tuple((int(i), _logprob(logits_V[i], log_total)) for i in self._top_ids(logits_V))
        return Draw(token_id, _logprob(logits_V[token_id], log_total), top)

    def _top_ids(self, logits_V: Floats) -> Ids:
        n_probs = self._params.n_probs
        return largest(logits_V, n_probs) if n_probs else np.empty(0, np.int64)

    def _adjusted(self, logits_V: Floats, history: Sequence[int]) -> Floats:
        """The logits after bias, penalties and bans; a copy unless nothing changes them."""
        p = self._params
        window = history[-p.repeat_last_n :] if p.repeat_last_n else ()
        is_penalised = p.repeat_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        if not (self._biases or self._banned_ids.size or (is_penalised and window)):
            return logits_V
        adjusted_V = logits_V.copy()
        for token_id, bias in self._biases:
            _store(adjusted_V, np.array([token_id]), np.float64(adjusted_V[token_id]) + np.array([bias]))
        if is_penalised and window:
            ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
            _store(adjusted_V, ids, penalised(adjusted_V[ids].astype(np.float64), counts, p))
        adjusted_V[self._banned_ids] = -np.inf
        return adjusted_V

    def _choose(self, logits_V: Floats) -> int:
        best_id = int(logits_V.argmax())
        if logits_V[best_id] == -np.inf:
            raise BadLogits("no token is left to sample: logit_bias or ignore_eos bans all that the model allows")
        if self._params.temperature == 0:
            return best_id
        ids, relative_C = _candidates(logits_V, self._params)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, which is meant
            cumulative_C = np.cumsum(np.exp(relative_C / self._params.temperature))
        return int(ids[np.searchsorted(cumulative_C, self._rng.random() * cumulative_C[-1])])


def largest(values: Floats, k: int) -> Ids:
    """Ids of the k largest values, descending, the lower id first on ties. values: [V], without NaN."""
    n = len(values)
    if k < n:
        # The k-th value does not depend on how partition breaks ties; the ids it would choose do.
        ids = np.flatnonzero(values >= np.partition(values, n - k)[n - k])
    else:
        ids = np.arange(n)
    return ids[np.argsort(-values[ids], kind="stable")[:k]]


def penalised(logits: Doubles, counts: Ids, params: SamplingParams) -> Doubles:
    """Logits of tokens that occur `counts` times in the window: divided (or, below 0, multiplied) by repeat_penalty,
    then less counts * frequency_penalty + presence_penalty. Source: llama.cpp's sampler "penalties"."""
    with np.errstate(over="ignore"):  # the result is brought back into float32's range when it is stored
        scaled = np.where(logits > 0, logits / params.repeat_penalty, logits * params.repeat_penalty)
    less: Doubles = scaled - (counts * params.frequency_penalty + params.presence_penalty)
    return less


def _candidates(logits_V: Floats, params: SamplingParams) -> tuple[Ids, Doubles]:
    """Ids that pass top_k, top_p and min_p, and their logits less the largest.

    top_p and min_p both keep a prefix of the descending order, so min_p, which needs no order, thins before the sort.
    """
    ids = largest(logits_V, params.top_k) if params.top_k else np.arange(len(logits_V))
    logits_C = logits_V[ids]
    relative_C = logits_C.astype(np.float64) - np.float64(logits_C.max())
    kept = np.flatnonzero(relative_C >= math.log(params.min_p)) if params.min_p else np.arange(len(ids))
    if params.top_p < 1:
        kept = _nucleus(logits_C, np.exp(relative_C), kept, params.top_p)
    return ids[kept], relative_C[kept]


def _nucleus(logits_C: Floats, weights_C: Doubles, kept: Ids, top_p: float) -> Ids:
    """The fewest of `kept`, likeliest first, whose share of all weights reaches top_p; all of them if none do."""
    wanted = top_p * weights_C.sum()
    n_sorted = 256  # mostly enough: a whole vocabulary takes long to sort
    while True:
        order = kept[largest(logits_C[kept], n_sorted)]
        reached = np.cumsum(weights_C[order])
        if reached[-1] >= wanted or n_sorted >= len(kept):
            return order[: np.searchsorted(reached, wanted) + 1]
        n_sorted *= 16


def _store(logits_V: Floats, ids: Ids, values: Doubles) -> None:
    with np.errstate(over="ignore"):  # below float32's range is -inf, probability 0 either way; above it is a number
        logits_V[ids] = np.minimum(values, _FLOAT_MAX)


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
