"""What servers of other projects were reported to get wrong: clients that leave, full contexts, logprobs of few tokens.

Other files have the plain cases; these are the combinations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.server.settings import ServerSettings
from tests.server.served import GREEDY, MODEL, N_CTX, Served, serving, wait_until

# --- a client leaves in the middle of a prompt that three devices work on


def open_three(_: Any = None) -> LLM:
    """Host experts, and delays everywhere: the long prompt takes seconds."""
    sizes = {"n_ctx": 8192, "n_ubatch": 16, "n_wave": 256, "prefix_reuse": "whole-ubatches"}
    return LLM(MODEL, devices="virtual:3", cpu_moe=True, policy="all", threads=1, chaos_seed=7, **sizes)


@pytest.fixture(scope="module")
def three() -> Iterator[Served]:
    with serving(open_llm=open_three) as served:
        yield served


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_leaves_a_long_prompt_on_three_devices(three: Served, is_stream: bool) -> None:
    """Most of the prompt is not computed, and nothing of the abandoned wave lands in the cells of the next prompt."""
    with LLM(MODEL, devices="none", threads=1, n_ctx=4096, n_ubatch=16) as plain:
        expected = plain.generate("The licence", greedy()).text
    names = ("overspill:requests_cancelled_total", "llamacpp:prompt_tokens_total")
    before, n_waves = [three.metric(name) for name in names], three.llm.status.n_waves
    prompt = [(11 * i + 5) % 480 for i in range(8000)]
    with three.asking("/completion", prompt=prompt, n_predict=5, stream=is_stream):
        wait_until(lambda: three.llm.status.n_waves > n_waves)
    wait_until(lambda: three.metric(names[0]) == before[0] + 1)
    assert not three.llm.status.slots[0].is_busy
    computed = three.metric(names[1]) - before[1]
    assert 0 < computed < 7000, "it was computed to the end, for nobody"
    assert three.ask("/completion", prompt="The licence", **GREEDY)["content"] == expected


def greedy() -> SamplingParams:

    return SamplingParams(temperature=0, max_tokens=GREEDY["max_tokens"])


def test_silence_is_shorter_than_the_shortest_patience_of_clients() -> None:
    assert ServerSettings().ping_s <= 15


# --- contexts that are full


@pytest.mark.parametrize("n_prompt", [N_CTX, N_CTX + 1, 3 * N_CTX])
def test_a_prompt_that_does_not_fit_costs_no_wave(served: Served, n_prompt: int) -> None:
    n_waves = served.llm.status.n_waves
    for path in ("/completion", "/v1/completions"):
        response = served.post(path, prompt=[5] * n_prompt, max_tokens=1)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "exceed_context_size_error")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_prompt, N_CTX)
    assert served.llm.status.n_waves == n_waves


@pytest.mark.parametrize(("n_prompt", "n_left"), [(N_CTX - 1, 1), (250, 6)])
def test_an_answer_ends_with_the_context(served: Served, n_prompt: int, n_left: int) -> None:
    ask = {"prompt": [5] * n_prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    choice = served.ask("/v1/completions", **ask)
    assert (choice["choices"][0]["finish_reason"], choice["usage"]["completion_tokens"]) == ("length", n_left)
    assert served.ask("/completion", **ask)["truncated"]


def open_four(_: Any = None) -> LLM:
    sizes = {"n_ctx": 1024, "n_parallel": 4, "n_ubatch": 16, "n_wave": 64, "prefix_reuse": "whole-ubatches"}
    return LLM(MODEL, devices="cpu", threads=1, **sizes)


def test_one_request_that_runs_out_of_context_ends_no_other() -> None:
    """Four slots of 256 cells: answers that want 400 end at their own slot's end, the short ones as if alone."""
    with serving(open_llm=open_four) as four:
        asks: list[dict[str, Any]] = [
            {"prompt": [10 + i] * 100, "n_predict": 300 if i % 2 else 30, "temperature": 0, "ignore_eos": True}
            for i in range(4)
        ]
        alone = [four.ask("/completion", cache_prompt=False, **ask) for ask in asks]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda ask: four.ask("/completion", cache_prompt=False, **ask), asks))
        assert [a["content"] for a in together] == [a["content"] for a in alone]
        assert [a["tokens_predicted"] for a in together] == [30, 156, 30, 156]
        assert [a["truncated"] for a in together] == [False, True, False, True]


# --- logprobs

NARROW: list[dict[str, Any]] = [
    {"top_p": 0.01},
    {"top_k": 1},
    {"min_p": 1.0},
    {"grammar": 'root ::= "yes" | "no"'},
    {"logit_bias": [[i, False] for i in range(6, 480)]},
]


@pytest.mark.parametrize("fields", NARROW, ids=lambda f: next(iter(f)))
@pytest.mark.parametrize("has_post", [False, True])
def test_logprobs_where_few_tokens_are_left(served: Served, fields: dict[str, Any], has_post: bool) -> None:
    """Strict JSON, probabilities that add up to 1 at most, the token itself always told; streamed as whole."""
    ask = {"prompt": "The licence", "n_predict": 3, "seed": 1, "n_probs": 20, "post_sampling_probs": has_post}
    whole = served.ask("/completion", **ask | fields)["completion_probabilities"]
    *pieces, _ = served.events("/completion", **ask | fields)
    assert [e for piece in pieces for e in piece["completion_probabilities"]] == whole
    assert whole
    for entry in whole:
        top = entry["top_probs"] if has_post else entry["top_logprobs"]
        chances = [t["prob"] if has_post else math.exp(t["logprob"]) for t in top]
        assert sum(chances) <= 1 + 1e-4
        assert chances == sorted(chances, reverse=True)
        own = entry["prob"] if has_post else math.exp(entry["logprob"])
        assert 0 <= own <= 1
        listed = {t["id"]: c for t, c in zip(top, chances, strict=True)}
        assert listed.get(entry["id"], own) == pytest.approx(own)


@pytest.mark.parametrize("n_top", [0, 1, 5, 20, 21, 512])
def test_any_number_of_alternatives(served: Served, n_top: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": n_top}
    choice = served.ask("/v1/chat/completions", **body, max_tokens=2, temperature=0)["choices"][0]
    assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [n_top] * 2
    refused = served.post("/v1/chat/completions", **body | {"top_logprobs": 513})
    assert refused.status_code == 400
    assert "512" in refused.json()["error"]["message"]


def test_logprobs_of_requests_that_share_waves(served: Served) -> None:
    """Rows of several requests lie between each other in a wave, and each is told its own."""
    asks = [{"prompt": [20 + i] * (5 + 9 * i), "n_probs": 4, **GREEDY, "n_predict": 12} for i in range(6)]
    alone = [served.ask("/completion", **ask)["completion_probabilities"] for ask in asks]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda ask: served.ask("/completion", **ask)["completion_probabilities"], asks))
    assert together == alone


# --- after all of it


def test_the_server_is_as_good_as_new(served: Served) -> None:
    with LLM(MODEL, devices="none", threads=1, n_ctx=256, n_ubatch=16) as fresh:
        expected = fresh.generate("The licence", greedy()).text
    for data in (b"", b"{", b"\xff", b"[1]", b'{"prompt": []}', b'{"prompt": [-1]}', b'{"messages": []}'):
        for path in ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages"):
            assert served.client.post(path, content=data).status_code == 400
    assert served.ask("/completion", prompt="The licence", **GREEDY)["content"] == expected
