"""Odd and wrong requests: 200 or an error the client can read, never a 5xx, and the server goes on as before."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.served import N_CTX, Served

COMPLETIONS = ("/completion", "/v1/completions")
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}

WRONG_PROMPTS: list[Any] = [
    None, [], [[]], ["a", []], {}, {"prompt_string": 3}, 5, True, [True], [-1], [512], [1.5], [[1, -1]], [None],
    [[["a"]]], {"prompt_string": "a", "multimodal_data": ["x"]}, [2**70],
]  # fmt: skip
GOOD_PROMPTS: list[Any] = ["a", [1, 2, 3], ["a", [1]], ["a", 1], [[1], [2]], {"prompt_string": "a"}, "\x00", "\ud800"]

WRONG_FIELDS: list[tuple[str, Any]] = [
    ("max_tokens", -2),
    ("max_tokens", "5"),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_tokens", [1]),
    ("n_predict", {}),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_k", "x"),
    ("repeat_penalty", 0),
    ("repeat_last_n", -1),
    ("presence_penalty", 10**400),
    ("n", 0),
    ("n", 3),
    ("n", -1),
    ("stop", 5),
    ("stop", [5]),
    ("stream", "yes"),
    ("seed", 2**64),
    ("seed", "x"),
    ("logit_bias", 5),
    ("logit_bias", [[1]]),
    ("logit_bias", [[512, 1]]),
    ("logit_bias", [[-1, 1]]),
    ("logit_bias", {"99999999999999999999": 1, "512": 1}),
    ("logit_bias", [[1, "x"]]),
    ("logit_bias", [[1, True]]),
    ("stream_options", []),
    ("mirostat", 3),
    ("mirostat_tau", "x"),
    ("dry_sequence_breakers", []),
    ("dry_sequence_breakers", [1]),
    ("dry_penalty_last_n", -2),
    ("samplers", 5),
    ("samplers", [5]),
    ("typical_p", "x"),
    ("xtc_threshold", []),
    ("post_sampling_probs", 1),
]
UNSERVED: list[tuple[str, Any]] = [
    ("samplers", ["temperature", "adaptive_p"]),
    ("samplers", "ki"),
    ("samplers", ["nosuch"]),
    ("grammar_lazy", True),
    ("lora", [{"id": 0, "scale": 1}]),
    ("n_indent", 2),
]
UNSERVED_CHAT: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("reasoning_budget_tokens", 5),
    ("functions", [{"name": "f"}]),
]
WRONG_MESSAGES: list[Any] = [
    None, [], {}, "hi", [5], [{}], [{"content": "x"}], [{"role": 5, "content": "x"}],
    [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url"}]}], [[USER]],
]  # fmt: skip
ODD_MESSAGES: list[Any] = [
    [{"role": "system", "content": "x"}] * 2,
    [USER, {"role": "assistant", "content": None, "tool_calls": []}, USER],
    [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "1",
        "function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": ""}],
    [{"role": "user"}],
    [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
]  # fmt: skip


@pytest.fixture(autouse=True)
def _goes_on(served: Served) -> Any:
    """The same answer before and after."""
    before = served.ask("/completion", prompt="hello", temperature=0, n_predict=6)["content"]
    yield
    assert served.ask("/completion", prompt="hello", temperature=0, n_predict=6)["content"] == before
    assert served.client.get("/health").status_code == 200


def assert_refused(response: httpx.Response, *words: str, code: int = 400) -> dict[str, Any]:
    assert response.status_code == code, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["code"] == code
    assert error["type"] in ("invalid_request_error", "exceed_context_size_error")
    assert "\n" not in error["message"]
    assert all(word in error["message"] for word in words), error["message"]
    return error


@pytest.mark.parametrize("path", COMPLETIONS)
def test_prompts(served: Served, path: str) -> None:
    for prompt in WRONG_PROMPTS:
        assert_refused(served.post(path, prompt=prompt, n_predict=1), "prompt")
        assert_refused(served.post(path, prompt=prompt, n_predict=1, stream=True), "prompt")
    for prompt in GOOD_PROMPTS:
        assert served.post(path, prompt=prompt, n_predict=1).status_code == 200, prompt
    assert_refused(served.post(path, prompt=""), "prompt")
    assert_refused(served.post(path, prompt=["a"] * 200, n_predict=1), "128")


@pytest.mark.parametrize("path", [*COMPLETIONS, CHAT])
def test_fields(served: Served, path: str) -> None:
    body = {"prompt": "a", "messages": [USER], "n_predict": 1}
    for name, value in WRONG_FIELDS:
        assert_refused(served.post(path, **body | {name: value}), name)
    for name, value in UNSERVED + (UNSERVED_CHAT if path == CHAT else []):
        assert_refused(served.post(path, **body | {name: value}), name, "not supported")
    harmless = {"unknown": {"a": [1]}, "grammar": "", "tools": [], "response_format": {"type": "text"}, "top_p": 7}
    clamped = {"temperature": -1, "top_k": -5, "min_p": -1, "seed": -1, "stop": None, "n": None, "stream_options": None}
    assert served.post(path, **body | harmless | clamped).status_code == 200
    assert served.post(path, **body | {"stop": ["", "\u00e9"], "max_tokens": 1e12, "seed": -5}).status_code == 200


def test_fields_of_one_endpoint(served: Served) -> None:
    body = {"prompt": "a", "messages": [USER], "n_predict": 1}
    for name, value in [("logprobs", -1), ("logprobs", True), ("suffix", "x"), ("best_of", 2)]:
        assert_refused(served.post("/v1/completions", **body | {name: value}), name)
    assert_refused(served.post("/v1/completions", **body, echo=True, logprobs=1), "echo")
    assert_refused(served.post("/v1/completions", **body, logprobs=513), "513")
    assert_refused(served.post("/completion", **body, n_probs=-1), "n_probs")
    for name, value in [("logprobs", 1), ("top_logprobs", 3), ("tools", "x"), ("chat_template_kwargs", 5)]:
        assert_refused(served.post(CHAT, **body | {name: value}), name)
    assert_refused(served.post(CHAT, **body, chat_template_kwargs={"messages": []}), "messages")


def test_messages(served: Served) -> None:
    for messages in WRONG_MESSAGES:
        for path in (CHAT, "/apply-template"):
            assert_refused(served.post(path, messages=messages, n_predict=1))
    for messages in ODD_MESSAGES:
        response = served.post(CHAT, messages=messages, n_predict=1)
        assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize("path", [*COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/apply-template"])
@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"5", b"null", b'{"a": NaN}', b'{"temperature": 1e999, "prompt": "a"}', b"\xff\xfe{}", b"{}{}",
     b"[" * 100_000, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b'"' + b"x" * 10],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_bodies(served: Served, path: str, data: bytes) -> None:
    assert_refused(served.client.post(path, content=data))


def test_content_type_does_not_matter(served: Served) -> None:
    for kind in ("application/x-www-form-urlencoded", "text/plain", "nonsense"):
        response = served.client.post(
            "/completion", content=b'{"prompt": "a", "n_predict": 1}', headers={"Content-Type": kind}
        )
        assert response.status_code == 200


def test_large_bodies(served: Served) -> None:
    error = assert_refused(served.post("/completion", prompt="word " * 200_000), "context")
    assert error["type"] == "exceed_context_size_error"
    assert error["n_ctx"] == N_CTX
    assert error["n_prompt_tokens"] > 100_000
    response = served.client.post("/completion", content=(b"x" * (1 << 20) for _ in range(70)))
    assert_refused(response, "larger", code=413)


def test_wrong_methods(served: Served) -> None:
    for method, path in [("GET", "/completion"), ("POST", "/health"), ("DELETE", "/v1/models")]:
        assert served.client.request(method, path).json()["error"]["code"] in (404, 405)


def test_tokens(served: Served) -> None:
    for content in (5.5, [True], [512], [[1]], {"a": 1}):
        assert_refused(served.post("/tokenize", content=content), "content")
    for tokens in ([512], [-1], ["a"], "abc", [[1]]):
        assert_refused(served.post("/detokenize", tokens=tokens), "tokens")
    assert served.ask("/tokenize", content="") == {"tokens": []}
    assert served.ask("/detokenize", tokens=[]) == {"content": ""}
