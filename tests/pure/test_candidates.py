"""Each sampler against its definition: lists, loops and `math`, or numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from overspill.engine import candidates as cut
from overspill.engine.candidates import Candidates
from overspill.engine.mirostat import mirostat_1, mirostat_2, next_mu, zipf_exponent
from overspill.engine.repetition import by_head, dry, penalties, repetitions

HALVES = [0.5, 0.25, 0.125, 0.0625, 0.0625]


def of(probabilities, ids=None) -> Candidates:
    ids = range(len(probabilities)) if ids is None else ids
    return Candidates(np.array(list(ids)), np.log(np.array(probabilities, dtype=np.float64)))


def some(seed: int, n: int) -> Candidates:
    rng = np.random.default_rng(seed)
    return Candidates(rng.permutation(n), rng.standard_normal(n) * 2)


def shares(c: Candidates) -> dict[int, float]:
    """id -> probability, by the definition of softmax."""
    weights = {int(i): math.exp(x) for i, x in zip(c.ids, c.logits, strict=True)}
    return {i: w / sum(weights.values()) for i, w in weights.items()}


def ids(c: Candidates) -> list[int]:
    return c.ids.tolist()


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.75, 0.9, 0.999])
@pytest.mark.parametrize("min_keep", [0, 1, 7, 500])
def test_top_p(p, min_keep):
    c = some(3, 400)
    best_first = sorted(shares(c).items(), key=lambda item: -item[1])
    reached, want = 0.0, []
    for i, share in best_first:
        want.append(i)
        reached += share
        if reached >= p and len(want) >= min_keep:
            break
    assert ids(cut.top_p(c, p, min_keep)) == want


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("min_keep", [0, 5])
def test_min_p(p, min_keep):
    c = some(4, 60)
    chance = shares(c)
    want = {i for i, share in chance.items() if share >= p * max(chance.values()) * (1 - 1e-12)}
    if len(want) < min_keep:
        want = set(sorted(chance, key=lambda i: -chance[i])[:min_keep])
    assert set(ids(cut.min_p(c, p, min_keep))) == want


@pytest.mark.parametrize("n", [0.1, 1.0, 2.5])
def test_top_n_sigma_uses_the_deviation_of_the_whole_population(n):
    c = some(5, 50)
    values = c.logits.tolist()
    mean = sum(values) / len(values)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
    want = [i for i, x in zip(ids(c), values, strict=True) if x >= max(values) - n * sigma]
    assert ids(cut.top_n_sigma(c, n)) == want


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("min_keep", [0, 6])
def test_typical(p, min_keep):
    c = some(6, 40)
    chance = shares(c)
    entropy = -sum(x * math.log(x) for x in chance.values())
    reached, want = 0.0, []
    for i in sorted(chance, key=lambda i: abs(-math.log(chance[i]) - entropy)):
        want.append(i)
        reached += chance[i]
        if reached > p and len(want) >= min_keep:
            break
    assert ids(cut.typical(c, p, min_keep)) == want


def test_typical_may_drop_the_likeliest():
    """Entropy 1.875 bits ln 2; surprises 1, 2, 3, 4, 4 bits: 2 bits are the most typical, then 1."""
    assert ids(cut.typical(of(HALVES), 0.2)) == [1]
    assert ids(cut.typical(of(HALVES), 0.25)) == [1, 0]
    assert ids(cut.typical(of(HALVES), 0.80)) == [1, 0, 2]


def test_xtc_leaves_the_least_likely_of_those_above_the_threshold():
    assert ids(cut.xtc(of(HALVES), 0.1)) == [2, 3, 4]
    assert ids(cut.xtc(of(HALVES), 0.2)) == [1, 2, 3, 4]
    assert ids(cut.xtc(of(HALVES), 0.3)) == [0, 1, 2, 3, 4]  # one alone is kept
    assert ids(cut.xtc(of(HALVES[::-1]), 0.1)) == [2, 0, 1]  # 0.125 is at place 2; ties by id
    assert ids(cut.xtc(of(HALVES), 0.1, min_keep=3)) == [2, 3, 4]
    assert ids(cut.xtc(of(HALVES), 0.1, min_keep=4)) == [0, 1, 2, 3, 4]


def test_temperature():
    c = cut.temperature(of(HALVES), 0.5)
    squares = [p * p for p in HALVES]
    assert c.probabilities == pytest.approx([s / sum(squares) for s in squares])
    assert ids(cut.temperature(of([0.2, 0.4, 0.4]), 0)) == [1]
    assert np.isfinite(cut.temperature(of(HALVES), 1e-308).logits).all()


def test_dynamic_temperature():
    n = len(HALVES)
    assert cut.dynamic_temperature(of([1 / n] * n), 1.0, 0.4, 1.0) == pytest.approx(1.4)
    share = 1.875 * math.log(2) / math.log(5)
    assert cut.dynamic_temperature(of(HALVES), 1.0, 0.4, 1.0) == pytest.approx(0.6 + 0.8 * share)
    assert cut.dynamic_temperature(of(HALVES), 1.0, 0.4, 2.0) == pytest.approx(0.6 + 0.8 * share**2)
    assert cut.dynamic_temperature(of(HALVES), 0.3, 0.5, 1.0) == pytest.approx(0.8 * share)
    assert cut.dynamic_temperature(of([1.0]), 0.7, 0.5, 1.0) == 0.7


def test_a_draw_takes_the_first_whose_sum_reaches_the_number():
    """The rule of the reference: first index whose cumulative sum >= u * sum."""
    c = of([0.25, 0.5, 0.25])
    assert [cut.drawn(c, u) for u in (0.0, 0.2, 0.3, 0.7, 0.8, 0.999)] == [0, 0, 1, 1, 2, 2]


# --- looking back


def test_penalties_by_hand():
    c = Candidates(np.array([7, 3, 9, 1]), np.array([2.0, -1.0, 4.0, 0.5]))
    less = penalties(c, [3, 3, 7, 5, 5], repeat=2.0, presence=0.5, frequency=0.25)
    assert less.logits.tolist() == [2 / 2 - 0.75, -1 * 2 - 1.0, 4.0, 0.5]
    assert c.logits.tolist() == [2.0, -1.0, 4.0, 0.5]


def plain_repetitions(window: list[int], most: int) -> dict[int, int]:
    """For each token, the longest end of the window that occurs before, followed by it: by trying all."""
    found: dict[int, int] = {}
    for end in range(1, len(window)):  # the copy ends before `end`, the token stands at it
        for n in range(end + 1):
            if window[end - n : end] == window[len(window) - n :]:
                found[window[end]] = max(found.get(window[end], 0), min(n, most))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_repetitions_are_those_found_by_trying_all(seed):
    rng = np.random.default_rng(seed)
    window = rng.integers(0, 3, rng.integers(0, 30)).tolist()
    got = {i: n for i, n in repetitions(window, {}).items() if n}
    assert got == {i: n for i, n in plain_repetitions(window, len(window)).items() if n}


def test_no_repetition_reaches_across_a_breaker():
    window = [1, 2, 3, 9, 4, 5, 1, 2, 3, 9, 4]
    assert repetitions(window, {})[5] == 5
    assert repetitions(window, by_head(((9,),)))[5] == 1  # only the 4 comes after the last 9
    assert repetitions(window, by_head(((3, 9),)))[5] == 1  # two ids that break together
    assert repetitions(window, by_head(((3, 8),)))[5] == 5
    assert repetitions(window, by_head(((4,),)))[5] == 0


def test_dry_by_hand():
    """After 1 2 3 ... 1 2 3 the next is 4: a repetition of 3 tokens."""
    window = [1, 2, 3, 4, 8, 1, 2, 3]
    c = Candidates(np.array([4, 8, 5]), np.array([1.0, 1.0, 1.0]))
    assert dry(c, window, 0.8, 1.75, 2, {}).logits.tolist() == pytest.approx([1 - 0.8 * 1.75, 1, 1])
    assert dry(c, window, 0.8, 1.75, 3, {}).logits.tolist() == pytest.approx([1 - 0.8, 1, 1])
    assert dry(c, window, 0.8, 1.75, 4, {}).logits.tolist() == [1, 1, 1]
    assert dry(c, window, 0.8, 1.75, 2, by_head(((4,),))).logits.tolist() == [1, 1, 1]  # breakers go free


def test_dry_does_not_overflow():
    c = Candidates(np.array([0, 1]), np.array([0.0, 0.0]))
    lost = -dry(c, [0] * 2000, 1.0, 10.0, 2, {}).logits[0]
    assert lost == pytest.approx(1e38)  # the last power of ten that float32 has


# --- mirostat


def test_zipf_exponent_of_a_zipf_law():
    ranks = np.arange(1, 501)
    for s in (0.7, 1.0, 1.6):
        assert zipf_exponent(ranks**-s / (ranks**-s).sum()) == pytest.approx(s)


@pytest.mark.parametrize("s", [0.7, 1.3])
def test_mirostat_1_keeps_what_the_paper_says(s):
    """k = (eps 2^mu / (1 - N^-eps))^(1/s), equation 3 of the paper with the constant of its Theorem 2."""
    n = 1000
    ranks = np.arange(1, n + 1)
    c = of(ranks**-s / (ranks**-s).sum())
    for mu in (2.0, 4.0):
        eps = s - 1
        k = (eps * 2**mu / (1 - n**-eps)) ** (1 / s)
        assert ids(mirostat_1(c, mu, n)) == list(range(max(1, int(k + 1e-9))))
    assert len(mirostat_1(c, 100.0, n)) == n
    assert len(mirostat_1(c, -100.0, n)) == 1
    assert ids(mirostat_1(of([1.0]), 3.0, 1)) == [0]


def test_mirostat_2_keeps_surprises_up_to_mu():
    assert [len(mirostat_2(of(HALVES), mu)) for mu in (0.5, 1.001, 2.001, 3.001, 4.001)] == [1, 1, 2, 3, 5]


def test_mu_moves_against_the_error():
    """Surprise 3 bits where 5 were aimed at: mu grows by eta times 2."""
    assert next_mu(10.0, 0.125, tau=5.0, eta=0.1) == pytest.approx(10.2)


def test_mirostat_2_holds_its_target():
    """Over many draws of a wide distribution the mean surprise comes to the target."""
    from overspill.engine.params import SamplingParams
    from overspill.engine.sampler import Sampler

    rng = np.random.default_rng(0)
    sampler = Sampler(SamplingParams(mirostat=2, mirostat_tau=3.0, temperature=1.0), seed=5)
    surprises = []
    for _ in range(600):
        logits = (rng.standard_normal(2000) * 2).astype(np.float32)
        before = sampler._mu
        sampler.sample(logits, ())
        surprises.append(3.0 - (sampler._mu - before) / 0.1)
    assert sum(surprises[100:]) / 500 == pytest.approx(3.0, abs=0.15)
    assert all(a != b for a, b in pairwise(surprises[:10]))
