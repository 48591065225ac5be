"""Constrained answers through the server: they parse, whatever the tiny model would rather say."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.scripted import SOURCE, scripted
from tests.server.served import Served

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    value = json.loads(text)
    assert value.keys() == {"name", "n"}
    assert len(value["name"]) <= 6
    assert 1 <= value["n"] <= 99


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_schemas_in_chats(served: Served, fields: dict[str, Any], seed: int) -> None:
    answer = served.ask(CHAT, messages=[USER], seed=seed, temperature=1.5, **fields)
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_schemas_and_grammars_in_completions(served: Served, path: str) -> None:
    def text(**fields: Any) -> str:
        answer = served.ask(path, prompt="hello", **fields)
        return str(answer["content"] if path == "/completion" else answer["choices"][0]["text"])

    check(text(json_schema=SCHEMA))
    check(text(json_schema=SCHEMA, temperature=0))
    assert re.fullmatch("(yes|no){3}", text(grammar='root ::= ("yes" | "no"){3}'))
    assert text(grammar='root ::= "é" "ab"', json_schema={"type": "nosuch"}) == "éab", "the grammar goes first"
    assert isinstance(json.loads(text(json_schema={}, logit_bias=[["}", 20]], max_tokens=200)), dict)


def test_several_answers_and_streams(served: Served) -> None:
    grammar = 'root ::= [a-f]{4} "!"'
    whole = served.ask("/v1/completions", prompt="hello", n=2, seed=3, grammar=grammar)["choices"]
    streamed = served.events("/v1/completions", prompt="hello", n=2, seed=3, grammar=grammar)
    for choice in whole:
        assert re.fullmatch("[a-f]{4}!", choice["text"])
        pieces = [e["choices"][0] for e in streamed if e != "[DONE]" and e["choices"]]
        assert "".join(p["text"] for p in pieces if p["index"] == choice["index"]) == choice["text"]


def test_the_openai_client_parses_into_models(served: Served) -> None:
    class Person(BaseModel):
        n: int
        is_there: bool

    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    parsed = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "hi"}], response_format=Person, seed=2, temperature=1.0
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "root ::= nosuch"}, "nosuch"),
    ({"grammar": 5}, "grammar"),
    ({"json_schema": {"type": "nosuch"}}, "nosuch"),
    ({"json_schema": 5}, "json_schema"),
    ({"json_schema": "{"}, "json_schema"),
    ({"grammar": 'root ::= "a"', "ignore_eos": True}, "ignore_eos"),
]
WRONG_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "yaml"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nosuch"}}}}, "nosuch"),
    ({"response_format": 5}, "response_format"),
    ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", CHAT])
def test_what_is_no_grammar_or_schema_is_refused(served: Served, path: str) -> None:
    body = {"prompt": "a", "messages": [USER], "n_predict": 1}
    for fields, word in WRONG + (WRONG_CHAT if path == CHAT else []):
        for is_stream in (False, True):
            response = served.post(path, **body, **fields, stream=is_stream)
            assert response.status_code == 400, (fields, response.text)
            message = response.json()["error"]["message"]
            assert word in message
            assert "\n" not in message


def test_bans_that_contradict_a_grammar_are_the_requests_own_fault(served: Served) -> None:
    (token_id,) = served.ask("/tokenize", content="b")["tokens"]
    response = served.post("/completion", prompt="a", grammar='root ::= "b"', logit_bias=[[token_id, False]])
    assert response.status_code == 400
    assert "grammar" in response.json()["error"]["message"]
    assert served.client.get("/health").status_code == 200


def test_a_limit_cuts_a_constrained_answer(served: Served) -> None:
    answer = served.ask(CHAT, messages=[USER], json_schema=SCHEMA, max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_schema_holds_from_where_thoughts_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt opens a thought; the model thinks, and would then rather not write JSON."""
    thinking = SOURCE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    assert thinking != SOURCE
    scripted(served, monkeypatch, thinking)(
        "Let me see: {1}.\n</think>\n\n" + "I would rather talk about something else. " * 3
    )
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    answer = served.ask(CHAT, messages=[USER], json_schema=schema, temperature=0, max_tokens=100)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"].strip() == "Let me see: {1}."
    assert json.loads(choice["message"]["content"]) == {"a": 1}
