"""Sampling parameters check themselves; timings count as llama-server does."""

from __future__ import annotations

import math

import pytest

from overspill.engine.params import SamplingParams
from overspill.engine.request import Timings
from overspill.errors import UserError

NAN, INF = math.nan, math.inf


def test_defaults_are_those_of_llama_server():
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p) == (0.8, 40, 0.95, 0.05)
    assert (p.repeat_penalty, p.repeat_last_n, p.presence_penalty, p.frequency_penalty) == (1.0, 64, 0.0, 0.0)
    assert (p.seed, p.max_tokens, p.stop_ids, p.ignore_eos, p.logit_bias, p.n_probs) == (
        None,
        -1,
        frozenset(),
        False,
        (),
        0,
    )


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[("temperature", v) for v in (NAN, INF, -0.1, "1", None, True, 10**400)],
        *[("top_p", v) for v in (NAN, -0.01, 1.01)],
        *[("min_p", v) for v in (NAN, -0.01, 1.01)],
        *[("repeat_penalty", v) for v in (0, 0.0, -1.0, INF, NAN)],
        *[("presence_penalty", v) for v in (NAN, INF, -1e9)],
        *[("frequency_penalty", v) for v in (NAN, -INF, 1e9)],
        *[("top_k", v) for v in (-1, 1.0, True, "5", None)],
        *[("repeat_last_n", v) for v in (-1, 2.5)],
        *[("max_tokens", v) for v in (-2, 1e12, "5", None, False)],
        *[("n_probs", v) for v in (-1, 0.0)],
        *[("seed", v) for v in (-1, 2**64, 1.5)],
        ("stop_ids", frozenset({-1})),
        ("logit_bias", ((-1, 1.0),)),
        *[("logit_bias", ((3, v),)) for v in (NAN, INF, "x")],
    ],
)
def test_a_bad_value_is_refused_by_name_in_one_line(name, bad):
    with pytest.raises(UserError, match=name) as caught:
        SamplingParams(**{name: bad})
    assert "\n" not in str(caught.value)
    assert "give" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("temperature", 0),
        ("temperature", 1e-300),
        ("top_p", 0),
        ("top_k", 10**12),
        ("max_tokens", 10**12),
        ("seed", 2**64 - 1),
        ("logit_bias", ((3, -INF), (4, -100), (5, 2.5))),
    ],
)
def test_an_odd_but_meaningful_value_is_kept(name, good):
    assert getattr(SamplingParams(**{name: good}), name) == good


def test_rates_count_the_steps_after_the_first_token():
    t = Timings(cache_n=5, prompt_n=10, prompt_ms=20.0, predicted_n=5, predicted_ms=8.0)
    assert (t.prompt_per_token_ms, t.prompt_per_second) == (2.0, 500.0)
    assert (t.predicted_per_token_ms, t.predicted_per_second) == (2.0, 500.0)


@pytest.mark.parametrize("predicted_n", [0, 1])
def test_a_rate_without_steps_is_zero(predicted_n):
    t = Timings(predicted_n=predicted_n)
    assert t.prompt_per_token_ms == t.prompt_per_second == 0
    assert t.predicted_per_token_ms == t.predicted_per_second == 0
