"""Calls that have to be made: whatever a model of random opinions writes is read as a call of one of the tools."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from overspill.gguf import open_gguf
from overspill.models.check import tokenizer_of
from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody
from overspill.server.reading import Arguments, Call, schemas_of
from overspill.server.reading_channels import ChannelReader
from overspill.server.reading_forms import _FORMS
from overspill.server.required_calls import calls_lark, required_tools
from overspill.text.constrain import Grammars
from overspill.text.tokenizer import Tokenizer
from tests.server.served import MODEL, Served

FORMS = {form.name: form for form in _FORMS}
REQUIRED = ["hermes", "llama", "mistral", "deepseek", "kimi", "qwen-coder", "glm", "minimax"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "exact": {"type": "boolean"},
                },
                "required": ["days", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop_it",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of(open_gguf(MODEL))


def written(lark: str, tokenizer: Tokenizer, seed: int) -> str:
    """By a model of random opinions, which ends where it can."""
    rng, matching, text = np.random.default_rng(seed), Grammars(tokenizer).lark(lark).start(), b""
    for _ in range(600):
        allowed = np.flatnonzero(matching.allowed(tokenizer.n_vocab))
        if any(i in tokenizer.eos_ids for i in allowed):
            return text.decode()
        token_id = int(rng.choice(allowed))
        matching.accept(token_id)
        text += tokenizer.piece(token_id)
    raise AssertionError(text)


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "stop_it":
        assert value == {}
        return
    assert name == "weather"
    assert {"days", "unit"} <= value.keys() <= {"days", "unit", "exact"}
    assert type(value["days"]) is int
    assert 1 <= value["days"] <= 9
    assert value["unit"] in ("C", "F")
    assert type(value.get("exact", True)) is bool


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", REQUIRED)
def test_what_the_grammar_writes_the_reader_reads(tokenizer: Tokenizer, form: str, seed: int) -> None:
    text = written(calls_lark(form, FUNCTIONS, has_several=False), tokenizer, seed)
    calls = FORMS[form].read(text, schemas_of(TOOLS))
    assert calls is not None, text
    assert len(calls) == 1
    check(*calls[0])


@pytest.mark.parametrize("seed", range(4))
def test_channels(tokenizer: Tokenizer, seed: int) -> None:
    """A grammar of calls alone: with thoughts before them, a random model would think for ever."""
    lark = calls_lark("channels", FUNCTIONS, has_several=False)
    text = written(lark.replace("start: (", "start: (/[^\\x{0}-\\x{10ffff}]/ "), tokenizer, seed)
    reader = ChannelReader(has_calls=True)
    parts = [*reader.push(text), *reader.finish()]
    name = next(p.name for p in parts if isinstance(p, Call))
    check(name, "".join(p.text for p in parts if isinstance(p, Arguments)))


def test_texts_between_tags_are_free(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string"}, "n": {}}, "required": ["code"]}
    tool = {"name": "f", "parameters": schema}
    text = (
        "<tool_call>\n<function=f>\n<parameter=code>\nif a < b:\n\tx = '</p>'\n</parameter>\n</function>\n</tool_call>"
    )
    matching = Grammars(tokenizer).lark(calls_lark("qwen-coder", [tool], has_several=False)).start()
    for token_id in tokenizer.encode(text, add_special=False, parse_special=False):
        assert matching.allows(token_id)
        matching.accept(token_id)
    assert all(matching.allows(i) for i in tokenizer.eos_ids)
    calls = FORMS["qwen-coder"].read(text, schemas_of([{"type": "function", "function": tool}]))
    assert calls is not None
    assert json.loads(calls[0].arguments) == {"code": "if a < b:\n\tx = '</p>'"}


def body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[{"role": "user", "content": "hi"}], **fields)


def test_which_tools_are_required() -> None:
    def names(choice: Any) -> list[str]:
        return [str(tool["name"]) for tool in required_tools(body(tools=TOOLS, tool_choice=choice))]

    assert names("auto") == names("none") == []
    assert names("required") == ["weather", "stop_it"]
    assert names({"type": "function", "function": {"name": "stop_it"}}) == ["stop_it"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": "often", "tools": TOOLS},
        {"tool_choice": {"type": "function"}, "tools": TOOLS},
        {"tool_choice": {"type": "function", "function": {"name": "nosuch"}}, "tools": TOOLS},
        {"tool_choice": "required", "tools": [{"type": "function"}]},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
    ],
)
def test_wrong_choices(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="tool") as caught:
        required_tools(body(**fields))
    assert caught.value.code == 400


def test_a_form_that_cannot_be_required() -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        calls_lark("lfm", FUNCTIONS, has_several=False)


def test_through_the_server(served: Served, says: Any) -> None:
    """The tiny model, under a template of tagged calls, would rather say anything else."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": SMALL}}]
    ask = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "temperature": 0, "max_tokens": 120}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        (answer,) = served.ask("/v1/chat/completions", **ask, tool_choice=choice)["choices"]
        assert answer["finish_reason"] == "tool_calls"
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "f"
        assert 1 <= json.loads(call["function"]["arguments"])["n"] <= 9
    free = served.ask("/v1/chat/completions", **ask)["choices"][0]
    assert free["finish_reason"] != "tool_calls"
    refused = served.post("/v1/chat/completions", **ask, tool_choice="required", ignore_eos=True)
    assert refused.status_code == 400
    assert served.post("/v1/chat/completions", **ask, tool_choice={"type": "x"}).status_code == 400


def test_anthropics_choices(served: Served, says: Any) -> None:
    ask = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 120,
        "tools": [{"name": "f", "input_schema": SMALL}],
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        answer = served.ask("/v1/messages", **ask, tool_choice=choice)
        assert answer["stop_reason"] == "tool_use"
        (block,) = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert 1 <= block["input"]["n"] <= 9
