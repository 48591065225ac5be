"""Tokens that may come next, and the samplers that cut or reshape them: one pure function each.

Sources: llama.cpp's samplers of the same names; min-p arXiv:2407.01082, typical arXiv:2202.00666, top-n-sigma
arXiv:2411.07641, nucleus arXiv:1904.09751. Sums run in float64. No function changes what it is given.

Legend: C candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

_N_IN_GROUP = 64


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """ids and their logits, [C] each, at least one. Logits are finite; only their differences mean anything.

    Where samplers have sorted, the likeliest comes first, the lower id first on ties.
    """

    ids: Ids
    logits: Doubles

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, places: NDArray[np.intp] | NDArray[np.bool_]) -> Candidates:
        return Candidates(self.ids[places], self.logits[places])

    @property
    def weights(self) -> Doubles:
        """Probabilities up to a factor, the largest 1."""
        weights: Doubles = np.exp(self.logits - self.logits.max())
        return weights

    @property
    def probabilities(self) -> Doubles:
        weights = self.weights
        shares: Doubles = weights / weights.sum()
        return shares


@lru_cache(maxsize=4)
def all_places(n: int) -> Ids:
    """0 to n - 1, not to be written to: a vocabulary's worth of numbers takes long to make for each token."""
    places: Ids = np.arange(n)
    places.flags.writeable = False
    return places


def largest(values: NDArray[np.floating], k: int) -> Ids:
    """Places of the k largest values, descending, the lower place first on ties. values: without NaN."""
    n_groups = len(values) // _N_IN_GROUP
    if k < n_groups:
        # The largest of each group: k of them reach the k-th of these, so the k largest values do too.
        largest_of_groups = values[: n_groups * _N_IN_GROUP].reshape(_N_IN_GROUP, n_groups).max(axis=0)
        places = np.flatnonzero(values >= _kth(largest_of_groups, k))
    else:
        places = all_places(len(values))
    if k < len(places):
        places = places[values[places] >= _kth(values[places], k)]
    return places[np.argsort(-values[places], kind="stable")[:k]]


def _kth(values: NDArray[np.floating], k: int) -> np.floating:
    """The k-th largest value. (The places that partition would choose depend on how it breaks ties.)"""
    kth: np.floating = np.partition(values, len(values) - k)[len(values) - k]
    return kth


def top_k(c: Candidates, k: int) -> Candidates:
    """The k likeliest, sorted."""
    return c.take(largest(c.logits, k))


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """The fewest, likeliest first, whose probabilities reach p; at least min_keep."""
    weights = c.weights
    wanted = p * weights.sum()
    n_sorted = max(256, min_keep)  # mostly enough: a whole vocabulary takes long to sort
    while True:
        order = largest(c.logits, n_sorted)
        reached = np.cumsum(weights[order])
        if reached[-1] >= wanted or n_sorted >= len(c):
            return c.take(order[: max(int(np.searchsorted(reached, wanted)) + 1, min_keep)])
        n_sorted *= 16


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Those at least p times as likely as the likeliest; at least min_keep."""
    is_kept = c.logits >= c.logits.max() + math.log(p)
    if int(is_kept.sum()) < min_keep:
        return top_k(c, min_keep)
    return c.take(is_kept)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Those within n standard deviations of all logits below the largest."""
    return c.take(c.logits >= c.logits.max() - n * c.logits.std())


def typical(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """The fewest, those of the most expected surprise first, whose probabilities exceed p; at least min_keep."""
    c = top_k(c, len(c))
    shares = c.probabilities
    order = np.argsort(np.abs(-_logs(shares) - entropy(shares)), kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(shares[order]), p, side="right")) + 1
    return c.take(order[: max(n_kept, min_keep)])


def xtc(c: Candidates, threshold: float, min_keep: int = 0) -> Candidates:
    """Without those of at least `threshold`, but for the least likely of them; unless fewer than min_keep were left.

    Whether to do so at all is for the caller to draw.
    """
    c = top_k(c, len(c))
    n_above = int((c.probabilities >= threshold).sum())
    if n_above < 2 or len(c) - (n_above - 1) < min_keep:
        return c
    return c.take(np.arange(n_above - 1, len(c)))


def temperature(c: Candidates, t: float) -> Candidates:
    """Logits divided by t; at 0 the likeliest alone."""
    if t <= 0:
        return c.take(np.array([c.logits.argmax()]))
    with np.errstate(over="ignore"):
        relative = (c.logits - c.logits.max()) / t
    return Candidates(c.ids, np.maximum(relative, -np.finfo(np.float64).max))


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> float:
    """The temperature between t - spread and t + spread that the candidates' entropy asks for."""
    low, high = max(0.0, t - spread), t + spread
    if len(c) < 2:
        return t
    share = min(1.0, max(0.0, entropy(c.probabilities) / math.log(len(c))))  # rounding may leave 0 to 1
    return low + (high - low) * float(share**exponent)


def entropy(probabilities: Doubles) -> float:
    """In nats."""
    return float(-(probabilities * _logs(probabilities)).sum())


def drawn(c: Candidates, u: float) -> int:
    """The place that a uniform number from 0 up to 1 falls on."""
    cumulative = np.cumsum(c.weights)
    return int(np.searchsorted(cumulative, u * cumulative[-1]))


def _logs(probabilities: Doubles) -> Doubles:
    """Natural logarithms; of 0, that of the smallest number: it adds nothing to an entropy, and is rare enough."""
    logs: Doubles = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    return logs
