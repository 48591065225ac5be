"""Samplers that look back: what a token loses for having come before.

Sources: llama.cpp's samplers "penalties" and "dry"; the latter's idea is github.com/oobabooga/text-generation-webui
pull request 5677. Both are pure functions of the candidates and the tokens before them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from overspill.engine.candidates import Candidates, Doubles, Ids

Breakers = Mapping[int, Sequence[tuple[int, ...]]]

_MOST = float(np.finfo(np.float64).max) / 4
_LOG_MOST_PENALTY = math.log(float(np.finfo(np.float32).max))


def penalties(c: Candidates, window: Sequence[int], repeat: float, presence: float, frequency: float) -> Candidates:
    """Each logit of a token in the window is divided (below 0: multiplied) by `repeat`, then loses `frequency` for each
    time it comes there, and `presence` once."""
    ids, counts = np.unique(np.array(window, dtype=np.int64), return_counts=True)
    places, which = _places(c, ids)
    logits = c.logits[places]
    with np.errstate(over="ignore"):
        scaled = np.where(logits > 0, logits / repeat, logits * repeat)
    return _with_logits(c, places, scaled - (counts[which] * frequency + presence))


def dry(
    c: Candidates, window: Sequence[int], multiplier: float, base: float, n_allowed: int, breakers: Breakers
) -> Candidates:
    """A token that would lengthen a repetition of n tokens loses multiplier * base ** (n - n_allowed), if n is at least
    n_allowed. breakers: first id -> the rests of sequences no repetition reaches across."""
    lengths = {
        token_id: n
        for token_id, n in repetitions(window, breakers).items()
        if n >= n_allowed and () not in breakers.get(token_id, ())
    }
    ids = np.array(sorted(lengths), dtype=np.int64)
    places, which = _places(c, ids)
    lost = np.array([_dry_penalty(multiplier, base, lengths[int(i)] - n_allowed) for i in ids[which]], dtype=np.float64)
    return _with_logits(c, places, c.logits[places] - lost)


def repetitions(window: Sequence[int], breakers: Breakers) -> dict[int, int]:
    """Token -> length of the longest end of the window that has come before, followed by that token."""
    backwards = list(reversed(window))
    most = _n_since_breaker(backwards, breakers)
    lengths: dict[int, int] = {}
    for i, n in enumerate(_self_overlaps(backwards)[1:], start=1):
        followed_by = backwards[i - 1]
        lengths[followed_by] = max(lengths.get(followed_by, 0), min(n, most))
    return lengths


@lru_cache(maxsize=64)
def by_head(sequences: tuple[tuple[int, ...], ...]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """First id -> the rests of the sequences that begin with it."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for head, *rest in sequences:
        found.setdefault(head, []).append(tuple(rest))
    return {head: tuple(rests) for head, rests in found.items()}


def _n_since_breaker(backwards: Sequence[int], breakers: Breakers) -> int:
    """How many tokens follow the last breaker, all if there is none."""
    for i, head in enumerate(backwards):
        matching = [len(rest) for rest in breakers.get(head, ()) if _follows(backwards, i, rest)]
        if matching:
            return i - max(matching)
    return len(backwards)


def _follows(backwards: Sequence[int], i: int, rest: tuple[int, ...]) -> bool:
    return len(rest) <= i and all(backwards[i - 1 - k] == token_id for k, token_id in enumerate(rest))


def _self_overlaps(ids: Sequence[int]) -> list[int]:
    """For each place, how many ids from there on equal those from the beginning on (the Z function)."""
    n = len(ids)
    z = [n] * n
    left = right = 0
    for i in range(1, n):
        k = min(right - i, z[i - left]) if i < right else 0
        while i + k < n and ids[k] == ids[i + k]:
            k += 1
        z[i] = k
        if i + k > right:
            left, right = i, i + k
    return z


def _dry_penalty(multiplier: float, base: float, exponent: int) -> float:
    """Beyond float32's range it grows no more, as in llama.cpp."""
    most = int(_LOG_MOST_PENALTY / math.log(base)) if base > 1.000001 else exponent
    return multiplier * float(base ** min(exponent, most))


def _places(c: Candidates, ids: Ids) -> tuple[Ids, Ids]:
    """Where candidates have one of the ids (sorted), and which."""
    places = np.flatnonzero(np.isin(c.ids, ids))
    return places, np.searchsorted(ids, c.ids[places])


def _with_logits(c: Candidates, places: Ids, logits: Doubles) -> Candidates:
    changed = c.logits.copy()
    changed[places] = np.clip(logits, -_MOST, _MOST)
    return Candidates(c.ids, changed)
