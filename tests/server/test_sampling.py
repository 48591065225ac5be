"""Samplers through the server: what a field does to the answer, and what is told about it."""

from __future__ import annotations

from typing import Any

import pytest

from overspill.engine.params import DEFAULT_SAMPLERS
from overspill.text.breakers import breakers_of
from tests.server.served import Served

PROMPT = "Once upon a time"
SETTINGS: dict[str, Any] = {
    "dynatemp_range": 0.3,
    "dynatemp_exponent": 1.5,
    "typical_p": 0.9,
    "top_n_sigma": 2.0,
    "min_keep": 3,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 1,
    "dry_penalty_last_n": -1,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "samplers": ["top_k", "temperature"],
    "post_sampling_probs": True,
    "dry_sequence_breakers": ["a", "\n"],
}


def test_settings_are_used_and_reported(served: Served) -> None:
    told = served.ask("/completion", prompt=PROMPT, n_predict=2, **SETTINGS)["generation_settings"]
    assert {name: told[name] for name in SETTINGS} == SETTINGS
    plain = served.ask("/completion", prompt=PROMPT, n_predict=1)["generation_settings"]
    assert plain["samplers"] == list(DEFAULT_SAMPLERS)
    assert (plain["dry_base"], plain["mirostat_tau"], plain["typical_p"]) == (1.75, 5.0, 1.0)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (["top-k", "nucleus", "temp"], ["top_k", "top_p", "temperature"]),
        ("edskypmxt", list(DEFAULT_SAMPLERS)),
        ("tk", ["temperature", "top_k"]),
        ([], []),
    ],
)
def test_names_and_letters_of_samplers(served: Served, given: Any, want: list[str]) -> None:
    told = served.ask("/completion", prompt=PROMPT, n_predict=1, samplers=given)["generation_settings"]
    assert told["samplers"] == want


def test_dry_ends_a_loop(served: Served) -> None:
    """Three tokens that nearly always win make loops; with DRY no sequence of 4 tokens comes twice."""

    def repeated(**fields: Any) -> int:
        ask = {"prompt": PROMPT, "temperature": 0, "n_predict": 120, "ignore_eos": True, "return_tokens": True}
        ids = served.ask("/completion", **ask, logit_bias=[[i, 30] for i in (100, 101, 102)], **fields)["tokens"]
        fours = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
        return len(fours) - len(set(fours))

    breakers = {"dry_sequence_breakers": ["never written"], "dry_penalty_last_n": -1}
    assert repeated() > 0
    assert repeated(dry_multiplier=100.0, dry_allowed_length=2, **breakers) == 0


def test_probabilities_after_sampling(served: Served) -> None:
    answer = served.ask("/completion", prompt=PROMPT, n_predict=5, top_k=3, seed=1, n_probs=9, post_sampling_probs=True)
    for entry in answer["completion_probabilities"]:
        assert 1 <= len(entry["top_probs"]) <= 3
        assert sum(top["prob"] for top in entry["top_probs"]) == pytest.approx(1.0)
        assert entry["prob"] in [top["prob"] for top in entry["top_probs"]]
        assert "logprob" not in entry


def test_bans_that_leave_nothing_are_the_requests_own_fault(served: Served) -> None:
    everything = [[i, False] for i in range(served.llm.tokenizer.n_vocab)]
    response = served.post("/completion", prompt=PROMPT, n_predict=5, logit_bias=everything)
    assert response.status_code == 400
    assert "no token is left" in response.json()["error"]["message"]
    (event,) = [e for e in served.events("/completion", prompt=PROMPT, logit_bias=everything) if "error" in e]
    assert event["error"]["code"] == 400
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("word", ["\n", "e", "th", "the end"])
def test_breakers_are_the_sequences_that_spell_the_word(served: Served, word: str) -> None:
    tokenizer = served.llm.tokenizer
    found = breakers_of(tokenizer, word)
    for sequence in found:
        assert word.encode() in b"".join(tokenizer.piece(i, special=True) for i in sequence)
    holding = {i for i in range(tokenizer.n_vocab) if word.encode() in tokenizer.piece(i, special=True)}
    assert {sequence[0] for sequence in found if len(sequence) == 1} == holding
    spelled = tokenizer.encode(f"x{word}y", add_special=False)
    assert any(tuple(spelled[i : i + len(s)]) == s for s in found for i in range(len(spelled)))
