"""Fields that clients of llama-server and of OpenAI send, and what each of them does to the answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.scripted import Says
from tests.server.served import GREEDY, MANY, Served, event_data, held, wait_until

USER = {"role": "user", "content": "Is it so?"}
CHAT = "/v1/chat/completions"


def test_an_echoed_prompt_comes_before_the_answer(served: Served) -> None:
    prompts = ["import os", "The licence"]
    ask = {"prompt": prompts, **GREEDY}
    plain = [choice["text"] for choice in served.ask("/v1/completions", **ask)["choices"]]
    whole = served.ask("/v1/completions", echo=True, **ask)
    assert [choice["text"] for choice in whole["choices"]] == [p + t for p, t in zip(prompts, plain, strict=True)]
    assert whole["usage"]["completion_tokens"] == 2 * 24
    chunks = [e["choices"] for e in served.events("/v1/completions", echo=True, **ask) if e != "[DONE]"]
    for i, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
        assert "".join(c["text"] for (c,) in chunks if c["index"] == i) == prompt + text
    assert served.ask("/v1/completions", prompt="a", max_tokens=0, echo=True)["choices"][0]["text"] == "a"


def test_only_the_fields_that_are_asked_for(served: Served) -> None:
    fields = ["content", "timings/prompt_n", "generation_settings/top_k", "nosuch", "content/nosuch"]
    answer = served.ask("/completion", prompt="a", response_fields=fields, top_k=7, **GREEDY)
    assert sorted(answer) == ["content", "prompt_n", "top_k"]
    assert answer["top_k"] == 7
    last = served.events("/completion", prompt="a", response_fields=["stop", "tokens_predicted"], **GREEDY)[-1]
    assert last == {"stop": True, "tokens_predicted": 24}


def test_other_names_of_fields(served: Served) -> None:
    assert len(served.ask("/completion", prompt="a", n_cmpl=2, **GREEDY)) == 2
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        assert served.post(CHAT, messages=[USER], max_tokens=1, **{name: 0}).status_code == 200
        assert served.post(CHAT, messages=[USER], max_tokens=1, **{name: 9}).status_code == 400


def test_logprobs_by_llama_servers_name_at_every_endpoint(served: Served) -> None:
    ask = {"prompt": "a", "n_predict": 2, "temperature": 0}
    expected = served.ask("/completion", n_probs=2, **ask)["completion_probabilities"]
    assert [len(entry["top_logprobs"]) for entry in expected] == [2, 2]
    assert served.ask("/completion", logprobs=2, **ask)["completion_probabilities"] == expected
    assert served.ask("/v1/completions", n_probs=2, **ask)["choices"][0]["logprobs"]["content"] == expected
    chat = served.ask(CHAT, messages=[USER], max_tokens=2, n_probs=2)["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in chat] == [2, 2]
    assert "logprobs" not in served.ask(CHAT, messages=[USER], max_tokens=2)["choices"][0]


def slow_down(served: Served, monkeypatch: pytest.MonkeyPatch, wave_s: float) -> None:
    """Every wave takes so much longer."""
    engine = served.llm._engine
    run_wave = engine._run_wave

    def slow(wave: Any) -> Any:
        time.sleep(wave_s)
        return run_wave(wave)

    monkeypatch.setattr(engine, "_run_wave", slow)


def test_pings_as_often_as_a_client_wants(served: Served) -> None:
    """The server's own are 0.2 s apart."""
    n_pings = dict.fromkeys((None, 0.02, 60), 0)

    def listen(interval: float | None) -> None:
        body = {"prompt": "a", "n_predict": 1, "stream": True, "sse_ping_interval": interval}
        with served.client.stream("POST", "/completion", json=body) as response:
            for line in response.iter_lines():
                n_pings[interval] += line == ":"

    with held(served) as waves, ThreadPoolExecutor(3) as pool:
        listening = [pool.submit(listen, interval) for interval in n_pings]
        wait_until(lambda: n_pings[None] == 3)
        waves.release(MANY)
        for future in listening:
            future.result()
    assert n_pings[0.02] > n_pings[None]
    assert n_pings[60] == 0


def test_a_limit_of_time_acts_once_there_is_a_line(served: Served, says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one two three four five six\nseven eight nine ten eleven twelve"
    ask = {"prompt": "a", "n_predict": 200, "temperature": 0}

    def say_slowly() -> None:
        says(text)
        slow_down(served, monkeypatch, 0.03)

    say_slowly()
    assert served.ask("/completion", **ask)["content"] == text
    say_slowly()
    late = served.ask("/completion", t_max_predict_ms=1, **ask)
    assert late["content"] == "one two three four five six\n"
    assert (late["stop_type"], late["truncated"]) == ("limit", True)
    say_slowly()
    assert served.ask("/completion", t_max_predict_ms=60_000, **ask)["content"] == text
    say_slowly()
    with served.client.stream("POST", CHAT, json={"messages": [USER], "stream": True, "t_max_predict_ms": 1}) as r:
        events = [event_data(line) for line in r.iter_lines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


# --- answers that have begun


def test_the_last_message_is_gone_on_from(served: Served) -> None:
    begun = [USER, {"role": "assistant", "content": "Well, <|im_end|>"}]
    prompt = served.ask("/apply-template", messages=begun, continue_final_message=True)["prompt"]
    assert prompt == served.ask("/apply-template", messages=[USER])["prompt"] + "Well, <|im_end|>"
    plain = [USER, {"role": "assistant", "content": "Well, "}]
    rendered = served.ask("/apply-template", messages=plain, continue_final_message=True)["prompt"]
    expected = served.ask("/completion", prompt=rendered, **GREEDY)
    parts = [{"type": "text", "text": "Well, "}]
    for messages in (plain, [USER, {"role": "assistant", "content": parts}]):
        answer = served.ask(CHAT, messages=messages, continue_final_message=True, **GREEDY)
        assert answer["choices"][0]["message"]["content"] == expected["content"]
        assert answer["usage"]["prompt_tokens"] == expected["tokens_evaluated"]


def test_the_beginning_is_told_where_that_is_wanted(served: Served) -> None:
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    ask = {"messages": begun, "continue_final_message": True, **GREEDY}
    rest = served.ask(CHAT, **ask)["choices"][0]["message"]["content"]
    assert served.ask(CHAT, echo=True, **ask)["choices"][0]["message"]["content"] == "Well, " + rest
    deltas = [e["choices"][0]["delta"] for e in served.events(CHAT, echo=True, **ask) if e != "[DONE]"]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Well, " + rest
    plain = served.ask(CHAT, echo=True, messages=[USER], **GREEDY)
    assert plain["choices"] == served.ask(CHAT, messages=[USER], **GREEDY)["choices"]


def test_anthropics_clients_begin_answers_without_saying_so(served: Served) -> None:
    begun = [USER, {"role": "assistant", "content": "Well, "}]
    expected = served.ask(CHAT, messages=begun, continue_final_message=True, **GREEDY)
    answer = served.ask("/v1/messages", messages=begun, model="any", **GREEDY)
    assert answer["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    n_tokens = served.ask("/v1/messages/count_tokens", messages=begun, model="any")["input_tokens"]
    assert n_tokens == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, USER],
        [{"role": "assistant", "content": "a"}],
        [USER, {"role": "assistant", "content": ""}],
        [USER, {"role": "assistant", "content": [{"type": "image_url"}]}],
        [USER, {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
    ],
)
def test_what_is_no_beginning_is_refused(served: Served, messages: list[Any]) -> None:
    response = served.post(CHAT, messages=messages, continue_final_message=True)
    assert response.status_code == 400
    assert "continue_final_message" in response.json()["error"]["message"]
