"""Mirostat: cut the candidates so that the surprise of what is drawn stays near a target.

Source: arXiv:2007.14966 as llama.cpp implements it. mu is the largest surprise to allow, in bits; it begins at twice
the target and moves against each error. Pure functions; the caller keeps mu.
"""

from __future__ import annotations

import math

import numpy as np

from overspill.engine.candidates import Candidates, Doubles, top_k

_N_FOR_EXPONENT = 100


def mirostat_1(c: Candidates, mu: float, n_vocab: int) -> Candidates:
    """As many of the likeliest as a Zipf law with this surprise has."""
    c = top_k(c, len(c))
    return c.take(np.arange(min(len(c), _n_of_zipf(zipf_exponent(c.probabilities), mu, n_vocab))))


def mirostat_2(c: Candidates, mu: float) -> Candidates:
    """Those whose own surprise is at most mu; at least the likeliest."""
    c = top_k(c, len(c))
    with np.errstate(divide="ignore"):
        n_kept = int((-np.log2(c.probabilities) <= mu).sum())
    return c.take(np.arange(max(1, n_kept)))


def next_mu(mu: float, probability: float, tau: float, eta: float) -> float:
    """mu after a token of this probability (among those left) was drawn."""
    return mu - eta * (-math.log2(probability) - tau)


def zipf_exponent(probabilities: Doubles) -> float:
    """Least squares over the likeliest; probabilities: descending."""
    p = probabilities[:_N_FOR_EXPONENT]
    p = p[p > 0]
    t = np.log(np.arange(2, len(p) + 1) / np.arange(1, len(p)))
    return float((t * np.log(p[:-1] / p[1:])).sum() / (t * t).sum()) if len(p) > 1 else 1.0


def _n_of_zipf(exponent: float, mu: float, n_vocab: int) -> int:
    epsilon, n_vocab = exponent - 1, max(n_vocab, 2)
    # The limit of epsilon / (1 - n ** -epsilon) at 0, where the quotient is none.
    share = 1 / math.log(n_vocab) if abs(epsilon) < 1e-9 else epsilon / (1 - n_vocab**-epsilon)
    if exponent <= 0 or share <= 0:
        return n_vocab
    log_n = (math.log(share) + mu * math.log(2)) / exponent
    return max(1, int(math.exp(log_n))) if log_n < math.log(n_vocab) else n_vocab
