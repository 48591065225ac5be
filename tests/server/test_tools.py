"""Thoughts and calls of tools through OpenAI's client; the model says what a test wants it to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.scripted import ANSWER, ARGUMENTS, THOUGHTS, Says
from tests.server.served import Served

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "Hot?"}], "temperature": 0}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_call(client: openai.OpenAI, says: Says) -> None:
    says(ANSWER)
    choice = client.chat.completions.create(**ASK, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I ask."
    assert choice.message.reasoning_content == "Let me see."  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    says("It is.")
    history = [*ASK["messages"], choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "9"}]
    assert (
        client.chat.completions.create(**ASK | {"messages": history}, tools=TOOLS).choices[0].message.content
        == "It is."
    )


def test_a_streamed_call(client: openai.OpenAI, says: Says) -> None:
    says(ANSWER)
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**ASK, tools=TOOLS, stream=True)]
    assert "".join(c.delta.content or "" for c in choices) == "I ask."
    assert "".join(getattr(c.delta, "reasoning_content", None) or "" for c in choices) == "Let me see."
    calls = [call for c in choices for call in c.delta.tool_calls or []]
    assert calls[0].function is not None
    assert (calls[0].index, calls[0].function.name, bool(calls[0].id)) == (0, "weather", True)
    assert "".join(call.function.arguments or "" for call in calls if call.function) == ARGUMENTS
    assert choices[-1].finish_reason == "tool_calls"


def test_a_call_that_is_cut_off(client: openai.OpenAI, says: Says) -> None:
    for is_stream in (False, True):
        says(ANSWER)
        if is_stream:
            chunks = list(client.chat.completions.create(**ASK, tools=TOOLS, max_tokens=50, stream=True))
            assert chunks[-1].choices[0].finish_reason == "length"
            assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
        else:
            choice = client.chat.completions.create(**ASK, tools=TOOLS, max_tokens=50).choices[0]
            assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_without_tools_a_call_is_text(client: openai.OpenAI, says: Says) -> None:
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        says(ANSWER)
        message = client.chat.completions.create(**ASK, **extra).choices[0].message
        assert message.content == ANSWER.removeprefix(THOUGHTS)
    says(ANSWER)
    raw = client.chat.completions.create(**ASK, extra_body={"reasoning_format": "none"}).choices[0]
    assert raw.message.content == ANSWER
    assert raw.finish_reason == "stop"


def test_what_is_refused(client: openai.OpenAI, says: Says) -> None:
    for extra in ({"functions": [{"name": "f"}]}, {"stream": True, "logprobs": True}):
        with pytest.raises(openai.BadRequestError, match="not supported"):
            client.chat.completions.create(**ASK, tools=TOOLS, **extra)  # type: ignore[call-overload]
