"""The sampler against a plain implementation written from the definition of each step."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from overspill.engine.candidates import largest
from overspill.engine.params import SamplingParams
from overspill.engine.sampler import BadLogits, NoTokenLeft, Sampler

FLOAT_MAX = float(np.finfo(np.float32).max)


def params(**changes) -> SamplingParams:
    """Everything off but what is given."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplingParams(**(off | changes))


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def random_logits(n_vocab: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n_vocab).astype(np.float32) * 2


def plain_distribution(logits, p: SamplingParams, history) -> dict[int, float]:
    """The chain, one step after the other, over a list of (id, logit)."""
    bias = dict(p.logit_bias)
    window = Counter(history[len(history) - p.repeat_last_n :] if p.repeat_last_n else [])
    rows = []
    for i, x in enumerate(float(v) for v in logits):
        x += bias.get(i, 0.0)
        if window[i]:
            x = x / p.repeat_penalty if x > 0 else x * p.repeat_penalty
            x -= window[i] * p.frequency_penalty + p.presence_penalty
        if x > -math.inf:
            rows.append((i, x))
    rows.sort(key=lambda row: (-row[1], row[0]))
    if p.top_k:
        rows = rows[: p.top_k]
    weights = [math.exp(x - rows[0][1]) for _, x in rows]
    reached, n = 0.0, 0
    while n < len(rows) and (n == 0 or reached < p.top_p * sum(weights)):
        reached += weights[n]
        n += 1
    rows = rows[: n if p.top_p < 1 else None]
    if p.min_p:
        rows = [row for row in rows if row[1] >= rows[0][1] + math.log(p.min_p)]
    if p.temperature == 0:
        return {rows[0][0]: 1.0}
    weights = [math.exp((x - rows[0][1]) / p.temperature) for _, x in rows]
    return {i: w / sum(weights) for (i, _), w in zip(rows, weights, strict=True)}


CHAINS = {
    "plain": params(),
    "temperature 0.3": params(temperature=0.3),
    "temperature 3": params(temperature=3.0),
    "top_k 5": params(top_k=5),
    "top_k 1": params(top_k=1),
    "top_p 0.7": params(top_p=0.7),
    "top_p 0": params(top_p=0.0),
    "min_p 0.1": params(min_p=0.1),
    "min_p 1": params(min_p=1.0),
    "top_p then min_p": params(top_p=0.9, min_p=0.15),
    "top_k then top_p": params(top_k=6, top_p=0.8),
    "defaults": SamplingParams(),
    "bias": params(logit_bias=((0, 3.0), (1, -math.inf), (2, -1.5))),
    "penalties": params(repeat_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, repeat_last_n=8),
    "reward": params(repeat_penalty=0.5, frequency_penalty=-0.3),
    "all": SamplingParams(
        repeat_penalty=1.2, frequency_penalty=0.1, logit_bias=((3, 1.0),), top_k=10, top_p=0.9, min_p=0.02
    ),
}
HISTORY = [7, 7, 7, 9, 9, 1, 2, 3, 3, 3, 3, 4, 5]


@pytest.mark.parametrize("name", CHAINS)
def test_draws_follow_the_plain_distribution(name):
    """Chi-square at about five standard deviations; draws outside the support fail at once."""
    p, logits = CHAINS[name], random_logits(24, seed=3)
    expected = plain_distribution(logits, p, HISTORY)
    sampler, n_draws = Sampler(p, seed=11), 4000
    counts = Counter(sampler.sample(logits, HISTORY).id for _ in range(n_draws))
    assert counts.keys() <= expected.keys()
    rare = [i for i, prob in expected.items() if prob * n_draws < 5]
    cells = [(counts[i], prob * n_draws) for i, prob in expected.items() if i not in rare]
    if rare:
        cells.append((sum(counts[i] for i in rare), max(1.0, sum(expected[i] for i in rare) * n_draws)))
    chi_square, freedom = sum((seen - want) ** 2 / want for seen, want in cells), len(cells) - 1
    assert chi_square <= freedom + 5 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_the_support_is_exactly_that_of_the_plain_chain(seed):
    """With a high temperature (it comes last) every survivor of the cuts turns up."""
    rng = np.random.default_rng(seed)
    p = params(
        temperature=50.0,
        top_k=int(rng.integers(0, 8)),
        top_p=float(rng.choice([1.0, rng.uniform(0.3, 1)])),
        min_p=float(rng.choice([0.0, rng.uniform(0.01, 0.5)])),
        logit_bias=((int(rng.integers(12)), -math.inf),),
    )
    logits = random_logits(12, seed)
    sampler = Sampler(p, seed=1)
    seen = {sampler.sample(logits, ()).id for _ in range(400)}
    assert seen == plain_distribution(logits, p, []).keys()


@pytest.mark.parametrize("top_p", [0.01, 0.2, 0.5, 0.9, 0.99, 0.999999])
def test_a_nucleus_of_many_tokens_is_sorted_far_enough(top_p):
    """6000 tokens: the nucleus has from a few to nearly all of them."""
    logits = random_logits(6000, seed=4)
    p = params(top_p=top_p, temperature=2.0)
    nucleus = plain_distribution(logits, p, [])
    ids, chances = list(nucleus), np.cumsum(list(nucleus.values()))
    rng, sampler = np.random.Generator(np.random.PCG64(3)), Sampler(p, seed=3)
    wanted = [ids[np.searchsorted(chances, rng.random() * chances[-1])] for _ in range(30)]
    assert [sampler.sample(logits, ()).id for _ in range(30)] == wanted


@pytest.mark.parametrize("name", CHAINS)
def test_greedy_takes_the_best_after_bias_and_penalties(name):
    p = CHAINS[name]
    greedy = SamplingParams(
        temperature=0,
        logit_bias=p.logit_bias,
        repeat_penalty=p.repeat_penalty,
        repeat_last_n=p.repeat_last_n,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
    )
    for seed in range(20):
        logits = random_logits(24, seed)
        (want,) = plain_distribution(logits, greedy, HISTORY)
        assert Sampler(greedy, seed=0).sample(logits, HISTORY).id == want


def test_the_lowest_id_wins_ties():
    logits = logits_of(0, 2, 1, 2, 2)
    assert Sampler(params(temperature=0), seed=0).sample(logits, ()).id == 1
    sampler = Sampler(params(top_k=2), seed=0)
    assert {sampler.sample(logits, ()).id for _ in range(100)} == {1, 3}


@pytest.mark.parametrize("k", [1, 2, 3, 5, 99, 100, 1000])
@pytest.mark.parametrize(("n", "n_values"), [(100, 20), (6461, 20), (6461, 10**6), (6400, 2)])
def test_largest_orders_by_value_then_id(k, n, n_values):
    values = np.random.default_rng(0).integers(0, n_values, n).astype(np.float32)
    want = sorted(range(n), key=lambda i: (-values[i], i))[:k]
    assert largest(values, k).tolist() == want


def test_a_seed_gives_the_same_tokens_and_another_seed_others():
    logits = random_logits(1000, seed=5)

    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(), seed)
        return [sampler.sample(logits, ()).id for _ in range(40)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)


def test_a_seed_gives_these_tokens_for_ever():
    logits = (np.arange(64, dtype=np.float32) * 37 % 64) / 8
    sampler = Sampler(params(top_k=10), seed=1234)
    assert [sampler.sample(logits, ()).id for _ in range(10)] == [62, 57, 43, 38, 57, 19, 38, 57, 62, 38]


def test_the_window_of_penalties_ends_with_the_history():
    logits = logits_of(1.0, 1.5, -9.0)

    def greedy(repeat_last_n: int) -> int:
        p = params(temperature=0, presence_penalty=1.0, repeat_last_n=repeat_last_n)
        return Sampler(p, seed=0).sample(logits, [1, 2, 2, 2]).id

    assert [greedy(n) for n in (0, 1, 3, 4, 100)] == [1, 1, 1, 0, 0]


def test_logprobs_are_of_the_raw_logits():
    logits = random_logits(300, seed=9) * 5
    want = torch.log_softmax(torch.from_numpy(logits).double(), dim=0).numpy()
    p = SamplingParams(temperature=0.1, top_k=3, top_p=0.01, logit_bias=((5, 50.0),), repeat_penalty=1.3, n_probs=20)
    draw = Sampler(p, seed=2).sample(torch.from_numpy(logits), [5, 6])
    assert draw.id == 5
    assert draw.logprob == pytest.approx(want[5], abs=1e-5)
    assert [i for i, _ in draw.top] == np.argsort(-logits, kind="stable")[:20].tolist()
    assert [v for _, v in draw.top] == pytest.approx([want[i] for i, _ in draw.top], abs=1e-5)


def test_all_alternatives_sum_to_one_and_are_finite():
    logits = random_logits(50, seed=1)
    logits[10:20] = -np.inf
    top = Sampler(params(n_probs=50), seed=0).sample(logits, ()).top
    assert len(top) == 50
    assert sum(math.exp(v) for _, v in top) == pytest.approx(1.0, abs=1e-6)
    assert [v for i, v in top if 10 <= i < 20] == [-FLOAT_MAX] * 10


def test_no_alternatives_unless_asked():
    assert Sampler(params(), seed=0).sample(random_logits(9, 0), ()).top == ()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_none_raise(bad, temperature):
    logits = random_logits(100, seed=0)
    logits[42] = bad
    with pytest.raises(BadLogits, match="1 of 100 logits are NaN" if math.isnan(bad) else r"1 are \+inf"):
        Sampler(params(temperature=temperature), seed=0).sample(logits, ())


def test_a_nan_with_the_sign_bit_raises_too():
    logits = random_logits(100, seed=0)
    logits.view(np.uint32)[42] = 0xFFC00000
    with pytest.raises(BadLogits, match="NaN"):
        Sampler(params(), seed=0).sample(logits, ())


def test_minus_infinity_is_a_token_that_never_comes():
    logits = logits_of(-np.inf, 0.0, -np.inf, 0.0)
    sampler = Sampler(params(repeat_penalty=1.5, frequency_penalty=-5.0), seed=0)
    assert {sampler.sample(logits, [0, 0, 2]).id for _ in range(100)} == {1, 3}


def test_nothing_but_minus_infinity_raises():
    with pytest.raises(BadLogits, match="all 4 logits are -inf"):
        Sampler(params(), seed=0).sample(np.full(4, -np.inf, np.float32), ())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_all_that_is_left_raises(temperature):
    p = params(temperature=temperature, logit_bias=((1, -math.inf),))
    with pytest.raises(NoTokenLeft, match="no token is left"):
        Sampler(p, seed=0, banned_ids=frozenset({0})).sample(logits_of(1.0, 2.0, -np.inf), ())


@pytest.mark.parametrize(
    "p",
    [
        params(temperature=1e-300),
        params(temperature=1e300),
        params(logit_bias=((1, 1e300),)),
        params(logit_bias=((1, -1e300),)),
        params(repeat_penalty=1e-300),
        params(repeat_penalty=1e300),
        params(top_k=10**12, top_p=0.999999, min_p=1e-300),
    ],
)
def test_extreme_but_valid_settings_give_a_token(p):
    for largest_logit in (1.0, FLOAT_MAX):
        logits = logits_of(-largest_logit, largest_logit, 0.5, -FLOAT_MAX)
        assert 0 <= Sampler(p, seed=0).sample(logits, [0, 1, 2]).id < 4


def test_the_logits_given_are_left_as_they_are():
    logits = random_logits(50, seed=1)
    before = logits.copy()
    p = SamplingParams(repeat_penalty=2.0, logit_bias=((1, 5.0), (2, -math.inf)), n_probs=3)
    Sampler(p, seed=0).sample(logits, [1, 2, 3])
    assert np.array_equal(logits, before)


# --- the chain


def support(p: SamplingParams, logits, history=(), n_draws: int = 600) -> set[int]:
    sampler = Sampler(p, seed=1)
    return {sampler.sample(logits, history).id for _ in range(n_draws)}


def test_samplers_run_in_the_order_given():
    """At temperature 3 first, 80 % takes more tokens than at temperature 1."""
    logits = logits_of(*np.log([0.6, 0.2, 0.1, 0.05, 0.05]))
    cubes = np.array([0.6, 0.2, 0.1, 0.05, 0.05]) ** (1 / 3)
    reached = np.cumsum(cubes / cubes.sum())
    n_hot = int((reached < 0.75).sum()) + 1
    assert support(params(top_p=0.75, temperature=3.0), logits) == {0, 1}
    hot_first = params(top_p=0.75, temperature=3.0, samplers=("temperature", "top_p"))
    assert support(hot_first, logits) == set(range(n_hot))
    assert n_hot > 2


def test_a_sampler_that_is_not_listed_does_nothing():
    logits = random_logits(20, seed=2)
    p = params(temperature=0.0, top_k=3, repeat_penalty=9.0, samplers=("top_k",))
    want = set(np.argsort(-logits)[:3].tolist())
    assert support(p, logits, list(want)) == want


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_xtc_and_typical_may_take_the_best_token_away_at_any_temperature(temperature):
    logits = logits_of(*np.log([0.5, 0.25, 0.125, 0.0625, 0.0625]))
    without_best = params(temperature=temperature, xtc_probability=1.0, xtc_threshold=0.2)
    assert 0 not in support(without_best, logits)
    assert support(params(temperature=temperature, typical_p=0.2), logits) == {1}


def test_xtc_strikes_as_often_as_it_is_asked_to():
    logits = logits_of(*np.log([0.5, 0.38, 0.12]))
    sampler = Sampler(params(temperature=0.0, xtc_probability=0.3), seed=4)
    draws = Counter(sampler.sample(logits, ()).id for _ in range(4000))
    assert draws[2] == pytest.approx(0.3 * 4000, abs=5 * math.sqrt(4000 * 0.3 * 0.7))
    assert draws[0] + draws[2] == 4000


def test_dry_acts_on_greedy_choices_and_looks_as_far_back_as_it_is_told():
    logits = logits_of(0, 0, 0, 0, 1.0, 0.9)
    history = [1, 2, 3, 4, 0, 0, 1, 2, 3]

    def greedy(n: int) -> int:
        p = params(temperature=0, dry_multiplier=1.0, dry_penalty_last_n=n)
        return Sampler(p, seed=0).sample(logits, history).id

    assert [greedy(n) for n in (0, 7, 8, 9, -1)] == [4, 4, 5, 5, 5]  # 7 tokens hold 3 -> 4 alone


def test_mirostat_replaces_the_other_samplers():
    logits = random_logits(20, seed=2)
    assert len(support(params(top_k=1, mirostat=2, mirostat_tau=20.0), logits, n_draws=2000)) > 15
    assert len(support(params(top_k=0, mirostat=2, mirostat_tau=0.0), logits)) == 1


def test_probabilities_after_sampling():
    logits = random_logits(30, seed=8)
    p = params(top_k=4, temperature=0.7, n_probs=10, post_sampling_probs=True)
    want = plain_distribution(logits, p, [])
    draw = Sampler(p, seed=3).sample(logits, ())
    assert {i: math.exp(v) for i, v in draw.top} == pytest.approx(want)
    assert math.exp(draw.logprob) == pytest.approx(want[draw.id])
    assert [i for i, _ in draw.top] == list(want)
    greedy = SamplingParams(temperature=0, n_probs=10, post_sampling_probs=True)
    draw = Sampler(greedy, seed=3).sample(logits, ())
    assert draw.top == ((draw.id, 0.0),)


# --- constraints


class Only:
    """Allows some ids, and remembers what it was asked."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.accepted, self.n_masks = ids, [], 0

    def allows(self, token_id: int) -> bool:
        return token_id in self.ids

    def allowed(self, n_vocab: int) -> np.ndarray:
        self.n_masks += 1
        return np.isin(np.arange(n_vocab), self.ids)

    def accept(self, token_id: int) -> None:
        assert token_id in self.ids
        self.accepted.append(token_id)


def test_a_constraint_is_obeyed_and_told():
    """The chance of a token: its own, and its share of that of all that is forbidden, as in llama.cpp."""
    logits, only = logits_of(*np.log([0.5, 0.2, 0.2, 0.1])), Only(1, 3)
    sampler, n_draws = Sampler(params(), seed=6, constraint=only), 6000
    draws = Counter(sampler.sample(logits, ()).id for _ in range(n_draws))
    want = 0.2 + 0.7 * (0.2 / 0.3)
    assert draws[1] / n_draws == pytest.approx(want, abs=5 * math.sqrt(want * (1 - want) / n_draws))
    assert draws[1] + draws[3] == n_draws == len(only.accepted)
    assert only.n_masks < n_draws


def test_a_constraint_holds_for_greedy_choices_and_small_cuts_too():
    logits = random_logits(100, seed=1)
    worst = int(logits.argmin())
    assert Sampler(params(temperature=0), seed=0, constraint=Only(worst)).sample(logits, ()).id == worst
    assert Sampler(params(top_k=1), seed=0, constraint=Only(worst)).sample(logits, ()).id == worst


def test_a_constraint_and_bans_that_leave_nothing():
    p = params(logit_bias=((2, -math.inf),))
    with pytest.raises(NoTokenLeft, match="a grammar"):
        Sampler(p, seed=0, constraint=Only(2)).sample(random_logits(5, 0), ())
