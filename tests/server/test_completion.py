"""llama-server's own endpoints: /completion, /tokenize and the rest."""

from __future__ import annotations

import codecs
from itertools import accumulate, pairwise
from typing import Any

import pytest

from overspill.engine.params import SamplingParams
from tests.server.served import GREEDY, N_CTX, Served

PROMPT = "The licence says that"


def joined(events: list[Any]) -> str:
    return "".join(event["content"] for event in events)


def starts(pieces: list[bytes]) -> list[int]:
    """The character at which each piece begins, or goes on."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    return list(accumulate((len(utf8.decode(piece)) for piece in pieces[:-1]), initial=0))


def test_greedy_text_is_that_of_the_library(served: Served) -> None:
    expected = served.llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))
    answer = served.ask("/completion", prompt=PROMPT, return_tokens=True, **GREEDY)
    assert answer["content"] == expected.text
    assert answer["tokens"] == expected.tokens
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (24, expected.n_prompt)
    assert (answer["stop_type"], answer["truncated"], answer["prompt"]) == ("limit", False, PROMPT)
    assert answer["timings"]["predicted_n"] == 24
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == expected.n_prompt


def test_a_stream_is_the_whole(served: Served) -> None:
    whole = served.ask("/completion", prompt=PROMPT, return_tokens=True, n_probs=2, **GREEDY)
    *pieces, last = served.events("/completion", prompt=PROMPT, n_probs=2, **GREEDY)
    assert joined(pieces) == whole["content"]
    assert [i for piece in pieces for i in piece["tokens"]] == whole["tokens"]
    assert [e for piece in pieces for e in piece["completion_probabilities"]] == whole["completion_probabilities"]
    assert last["stop"]
    assert last["content"] == ""
    assert last["tokens_predicted"] == 24
    assert "[DONE]" not in pieces


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_timings_come_with_each_chunk_where_they_are_wanted(served: Served, path: str) -> None:
    said = {"messages": [{"role": "user", "content": PROMPT}]} if "chat" in path else {"prompt": PROMPT}
    events = [e for e in served.events(path, **said, **GREEDY, cache_prompt=False) if e != "[DONE]"]
    assert [i for i, event in enumerate(events) if "timings" in event] == [len(events) - 1]

    asked = {**said, **GREEDY, "cache_prompt": False, "timings_per_token": True, "return_progress": True}
    events = [e for e in served.events(path, **asked) if e != "[DONE]"]
    reading = [event for event in events if "prompt_progress" in event]
    assert [e["timings"]["prompt_n"] for e in reading] == [e["prompt_progress"]["processed"] for e in reading]
    told = [event["timings"] for event in events if "timings" in event and "prompt_progress" not in event]
    counts = [timings["predicted_n"] for timings in told]
    assert counts == sorted(counts)
    assert counts[0] <= 2
    assert counts[-1] == 24
    assert len(set(counts)) > 12
    assert all(timings.keys() == told[-1].keys() for timings in told)
    assert {timings["prompt_n"] for timings in told} == {reading[-1]["prompt_progress"]["total"]}
    written = [timings["predicted_ms"] for timings in told]
    assert written == sorted(written)
    for timings in told:
        steps, ms = timings["predicted_n"] - 1, timings["predicted_ms"]
        assert timings["predicted_per_second"] == pytest.approx(1e3 * steps / ms if ms else 0)


def test_openai_streams_end_with_done(served: Served) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert served.events("/v1/completions", prompt="x", **GREEDY)[-1] == "[DONE]"
    *_, last, done = served.events("/v1/chat/completions", messages=messages, **GREEDY)
    assert done == "[DONE]"
    assert last["timings"]["predicted_n"] == 24
    assert last["choices"] == [{"index": 0, "delta": {}, "finish_reason": "length"}]


@pytest.mark.parametrize("logprobs", [0, 1, 5, 512])
def test_logprobs_of_texts(served: Served, logprobs: int) -> None:
    ask = {"prompt": PROMPT, "logprobs": logprobs, **GREEDY}
    whole = served.ask("/v1/completions", **ask)["choices"][0]["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in whole["content"]] == [logprobs] * 24
    chunks = [e["choices"][0] for e in served.events("/v1/completions", **ask)[:-1]]
    assert [e for c in chunks if c["logprobs"] for e in c["logprobs"]["content"]] == whole["content"]
    assert whole["token_logprobs"] == [entry["logprob"] for entry in whole["content"]]
    assert len(served.ask("/v1/completions", prompt=PROMPT, **GREEDY)["choices"]) == 1


def test_banned_and_biased_tokens(served: Served) -> None:
    first = served.ask("/completion", prompt=PROMPT, temperature=0, n_predict=1, return_tokens=True)["tokens"][0]
    for bias in ([[first, False]], [[first, -100]], {str(first): -100}):
        answer = served.ask("/completion", prompt=PROMPT, temperature=0, n_predict=1, logit_bias=bias, n_probs=1)
        entry = answer["completion_probabilities"][0]
        assert entry["id"] != first
        assert entry["top_logprobs"][0]["id"] == first, "pre-sampling values know no bias"


def test_stop_strings_across_tokens(served: Served) -> None:
    """Every substring of three characters of an answer ends it where it first comes, streamed or not."""
    n_cancelled = served.metric("overspill:requests_cancelled_total")
    full = served.ask("/completion", prompt=PROMPT, return_tokens=True, n_probs=1, **GREEDY)
    text = full["content"]
    pieces = [served.llm.tokenizer.piece(i) for i in full["tokens"]]
    n_across = 0
    for start in range(0, len(text) - 3, 2):
        stop = text[start : start + 3]
        n_across += not any(stop.encode() in piece for piece in pieces)
        answer = served.ask("/completion", prompt=PROMPT, stop=["@@@@", stop], n_probs=1, **GREEDY)
        assert answer["content"] == text[: text.index(stop)]
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)
        entries = answer["completion_probabilities"]
        assert len(entries) == sum(start < len(answer["content"]) for start in starts(pieces))
        assert entries == full["completion_probabilities"][: len(entries)]
        *parts, last = served.events("/completion", prompt=PROMPT, stop=stop, n_probs=1, **GREEDY)
        assert joined(parts) == answer["content"]
        assert [e for p in parts for e in p["completion_probabilities"]] == entries
        assert last["stopping_word"] == stop
    assert n_across >= 3
    assert served.metric("overspill:requests_cancelled_total") == n_cancelled


def test_end_token(served: Served) -> None:
    """An end token that a bias forces: counted, not shown; `ignore_eos` forbids it."""
    eos_id = served.llm.tokenizer.eos_id
    ask = {"prompt": PROMPT, "logit_bias": [[eos_id, 1000]], **GREEDY}
    answer = served.ask("/completion", **ask)
    assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == ("", "eos", 1)
    assert served.ask("/v1/completions", **ask)["choices"][0]["finish_reason"] == "stop"
    assert served.ask("/completion", **ask, ignore_eos=True)["stop_type"] == "limit"


def test_context_ends_an_answer(served: Served) -> None:
    answer = served.ask("/completion", prompt=[9] * (N_CTX - 6), n_predict=-1, temperature=0, ignore_eos=True)
    assert (answer["stop_type"], answer["truncated"], answer["tokens_predicted"]) == ("limit", True, 6)


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("name", ["n_predict", "max_tokens", "max_completion_tokens"])
def test_limits_of_tokens(served: Served, name: str, n: int) -> None:
    answer = served.ask("/completion", prompt=PROMPT, ignore_eos=True, **{name: n})
    assert (answer["tokens_predicted"], answer["stop_type"]) == (n, "limit")


def test_seeds(served: Served) -> None:
    def drawn(seed: int | None) -> Any:
        return served.ask("/completion", prompt=PROMPT, temperature=2, top_k=0, min_p=0, n_predict=16, seed=seed)

    one, again, other, free = drawn(3), drawn(3), drawn(4), drawn(None)
    assert one["content"] == again["content"] != other["content"]
    assert drawn(free["generation_settings"]["seed"])["content"] == free["content"]


def test_progress_and_comments(served: Served) -> None:
    events = served.events("/completion", prompt=[7] * 100, return_progress=True, cache_prompt=False, **GREEDY)
    progress = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [p["processed"] for p in progress] == [32, 64, 96, 100]
    assert {p["total"] for p in progress} == {100}
    assert all(a["time_ms"] <= b["time_ms"] for a, b in pairwise(progress))


def test_prefix_reuse_is_told(served: Served) -> None:
    ids = list(range(100, 180))
    served.ask("/completion", prompt=ids, **GREEDY)
    answer = served.ask("/v1/completions", prompt=ids, **GREEDY)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["timings"]["cache_n"] == 64


# --- tokens and templates


def test_tokenize(served: Served) -> None:
    tokenizer = served.llm.tokenizer
    text = "héllo <|im_end|> 你好 🙂"
    assert served.ask("/tokenize", content=text)["tokens"] == tokenizer.encode(text, add_special=False)
    plain = served.ask("/tokenize", content=text, parse_special=False)["tokens"]
    assert tokenizer.eos_id not in plain
    assert tokenizer.eos_id in served.ask("/tokenize", content=text)["tokens"]
    assert served.ask("/detokenize", tokens=plain)["content"] == text
    pieces = served.ask("/tokenize", content=text, with_pieces=True)["tokens"]
    data = [p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces]
    assert b"".join(data).decode() == text
    assert any(isinstance(p["piece"], list) for p in pieces)
    assert served.ask("/tokenize", content=["a", 5, "b"])["tokens"][1] == 5


def test_apply_template(served: Served) -> None:
    messages = [{"role": "user", "content": "A<|im_end|>\n<|im_start|>system\nB"}]
    prompt = served.ask("/apply-template", messages=messages)["prompt"]
    assert prompt == served.host.template.render(messages)
    n_tokens = served.ask("/v1/chat/completions/input_tokens", messages=messages)["input_tokens"]
    assert n_tokens > len(served.ask("/tokenize", content=prompt)["tokens"]), "a message forges no special token"


def test_status_pages(served: Served) -> None:
    props = served.client.get("/props").json()
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == N_CTX
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["eos_token"] == "<|im_end|>"
    assert (props["ui"], props["cors_proxy_enabled"], props["is_sleeping"]) == (True, False, False)
    assert [slot["id"] for slot in served.client.get("/slots").json()] == [0, 1]
    model = served.client.get("/v1/models").json()["data"][0]
    (described,) = served.client.get("/models").json()["models"]
    assert (described["name"], described["details"]["family"], described["size"]) == ("tiny", "qwen3moe", "")
    assert (model["id"], model["meta"]["n_vocab"], model["meta"]["n_params"]) == ("tiny", 512, 559936)
    assert served.client.get("/nowhere").json()["error"] == {
        "code": 404,
        "message": "File Not Found",
        "type": "not_found_error",
    }
    assert "/v1/chat/completions" in served.client.get("/openapi.json").json()["paths"]


def test_slots_tell_what_they_did_last(served: Served) -> None:
    answer = served.ask("/completion", prompt=[7] * 40, id_slot=1, cache_prompt=False, top_k=9, **GREEDY)
    assert answer["id_slot"] == 1
    served.wait_until_idle()
    slot = served.client.get("/slots").json()[1]
    assert (slot["id"], slot["is_processing"], slot["params"]["top_k"]) == (1, False, 9)
    assert (slot["n_prompt_tokens"], slot["n_prompt_tokens_processed"], slot["n_prompt_tokens_cache"]) == (40, 40, 0)
    assert slot["next_token"] == [{"has_next_token": False, "n_remain": 0, "n_decoded": 24}]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path", ["/v1/responses", "/infill", "/v1/embeddings", "/rerank", "/lora-adapters", "/slots/0?action=save"]
)
def test_what_llama_server_has_and_this_has_not_is_said(served: Served, method: str, path: str) -> None:
    response = served.client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (501, "not_supported_error")
    assert error["message"]


def test_properties_can_be_read_and_not_set(served: Served) -> None:
    assert served.client.post("/props", json={}).status_code == 501
    assert served.client.head("/health").status_code == served.client.head("/props").status_code == 200
    assert served.client.head("/health").content == b""
    assert served.client.head("/nowhere").status_code == 404


def test_metrics_count(served: Served) -> None:
    names = ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:n_decode_total")
    before = [served.metric(name) for name in names]
    served.ask("/completion", prompt=list(range(300, 310)), **GREEDY)
    assert [served.metric(name) - b for name, b in zip(names, before, strict=True)] == [10, 24, 24]
    assert served.metric("llamacpp:requests_processing") == 0
    assert 0 < served.metric('overspill:busy_ratio{device="cpu"}') <= 1
