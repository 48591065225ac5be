"""Anthropic's own client against the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from overspill.engine.params import SamplingParams
from tests.server.scripted import ANSWER, Says
from tests.server.served import Served

ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "Hot?"}], "max_tokens": 24}
GREEDY: Any = {**ASK, "extra_body": {"temperature": 0}}
TOOLS: Any = [{"name": "weather", "description": "d", "input_schema": {"type": "object"}}]
WITH_TOOLS: Any = {**GREEDY, "tools": TOOLS, "max_tokens": 200}


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def test_text(client: anthropic.Anthropic, served: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *ASK["messages"]]
    ids = served.llm.tokenizer.encode(served.host.template.render(messages))
    completion = served.llm.generate(ids, SamplingParams(temperature=0, max_tokens=24))
    expected, n_tokens = completion.text, len(completion.tokens)
    reason = {"stop": "end_turn", "length": "max_tokens"}[completion.finish_reason]
    message = client.messages.create(**GREEDY, system="Be brief.")
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [("text", expected)]
    assert message.stop_reason == reason
    n_cached = message.usage.cache_read_input_tokens or 0
    assert (message.usage.input_tokens + n_cached, message.usage.output_tokens) == (len(ids), n_tokens)
    with client.messages.stream(**GREEDY, system=[{"type": "text", "text": "Be brief."}]) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().stop_reason == reason
    assert client.messages.create(**GREEDY | {"max_tokens": 2}).stop_reason == "max_tokens"
    counted = client.messages.count_tokens(model="any", system="Be brief.", messages=ASK["messages"])
    assert counted.input_tokens == len(ids)


def test_stop_sequences(client: anthropic.Anthropic, says: Says) -> None:
    says("one two three")
    message = client.messages.create(**GREEDY, stop_sequences=["two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "two")
    assert [block.text for block in message.content if block.type == "text"] == ["one "]
    says("one")
    assert client.messages.create(**GREEDY).stop_reason == "end_turn"


def test_a_call(client: anthropic.Anthropic, says: Says) -> None:
    """Whole and streamed alike; then the tool's result goes back."""
    says(ANSWER)
    whole = client.messages.create(**WITH_TOOLS)
    says(ANSWER)
    with client.messages.stream(**WITH_TOOLS) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thoughts, text, call = message.content
        assert (thoughts.type, getattr(thoughts, "thinking", "")) == ("thinking", "Let me see.")
        assert (text.type, getattr(text, "text", "")) == ("text", "I ask.")
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Zürich"})
        assert message.stop_reason == "tool_use"
    says("Yes.")
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "30"}]}
    history: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**WITH_TOOLS | {"messages": history})
    assert [getattr(block, "text", "") for block in answer.content] == ["Yes."]


def test_bad_input(client: anthropic.Anthropic, served: Served) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for wrong in (
        {"messages": image},
        {"messages": []},
        {"max_tokens": -1},
        {"tools": [{"type": "bash", "name": "b"}]},
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            client.messages.create(**ASK | wrong)
        body: Any = refused.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    for wrong in ({}, {"messages": [{"role": "user", "content": 5}]}, {"messages": ASK["messages"]}):
        assert served.post("/v1/messages", **wrong).status_code == 400
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": "word " * 500}]})
