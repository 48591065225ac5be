"""Tools end to end with the templates of real models: what each writes for a call reaches both clients as that call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from overspill.llm import LLM
from tests.helpers.chats import AGENT_CHATS, shared_templates
from tests.server.scripted import Says, scripted
from tests.server.served import MODEL, Served, serving
from tests.server.test_reading import FORMS, TOOLS, written

ARGUMENTS: dict[str, Any] = {"text": "Zürich, 'a' \"b\"\n<x>", "n": -3, "list": [{"a": None}]}
USER = {"role": "user", "content": "Mark"}
NAMES = [name for name, form in FORMS.items() if (form and form != "lfm") or "oss" in name]
ANTHROPIC_TOOLS: Any = [
    {"name": tool["function"]["name"], "description": "d", "input_schema": tool["function"]["parameters"]}
    for tool in TOOLS
]

pytestmark = pytest.mark.skipif(not shared_templates(), reason="needs the templates of real models")


@pytest.fixture(scope="module")
def roomy() -> Iterator[Served]:
    """A server whose context holds the prompts of real templates; nothing is ever computed by its model."""
    with serving(open_llm=lambda _: LLM(MODEL, devices="cpu", n_ctx=16384, n_parallel=2, threads=1)) as served:
        yield served


@pytest.fixture(params=NAMES)
def source(request: pytest.FixtureRequest) -> str:
    return shared_templates()[request.param]


@pytest.fixture
def says(roomy: Served, source: str, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Makes the model say a text after its thoughts, where the prompt has opened them."""
    say = scripted(roomy, monkeypatch, source)
    prompt = roomy.host.template.render([USER], tools=TOOLS)
    thoughts = roomy.host.dialect.thoughts
    is_thinking = thoughts is not None and prompt.rstrip().endswith(thoughts.opening)
    return lambda text: say(f"hm{thoughts.closing}{text}" if thoughts and is_thinking else text)


def test_a_call_and_its_result(roomy: Served, source: str, says: Says) -> None:
    text = written(source, [ARGUMENTS])
    ask: Any = {"model": "any", "temperature": 0, "tools": TOOLS}
    with openai.OpenAI(base_url=roomy.url + "/v1", api_key="none", max_retries=0) as client:
        says(text)
        choice = client.chat.completions.create(messages=[USER], **ask).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert not choice.message.content
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("f", ARGUMENTS)

        says(text)
        deltas = [c.choices[0].delta for c in client.chat.completions.create(messages=[USER], stream=True, **ask)]
        parts = [part.function for delta in deltas for part in delta.tool_calls or [] if part.function]
        assert [part.name for part in parts if part.name] == ["f"]
        assert "".join(part.arguments or "" for part in parts) == call.function.arguments
        assert not any(delta.content for delta in deltas)

        says("Done.")
        result = {"role": "tool", "tool_call_id": call.id, "content": "fine"}
        history: Any = [USER, choice.message.model_dump(exclude_none=True), result]
        answer = client.chat.completions.create(messages=history, **ask).choices[0]
        thought = getattr(answer.message, "reasoning_content", None) or ""
        assert (answer.message.content or "") + thought in ("Done.", "Done.hm", "hm</think>Done.")


def test_a_call_for_anthropics_client(roomy: Served, source: str, says: Says) -> None:
    ask: Any = {"model": "any", "max_tokens": 4000, "messages": [USER], "tools": ANTHROPIC_TOOLS}
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as client:
        says(written(source, [ARGUMENTS]))
        whole = client.messages.create(**ask)
        says(written(source, [ARGUMENTS]))
        with client.messages.stream(**ask) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type != "thinking"]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("f", ARGUMENTS)


def test_a_call_that_is_cut_off_ends_by_its_length(roomy: Served, source: str, says: Says) -> None:
    text = written(source, [ARGUMENTS])
    n_tokens = len(roomy.llm.tokenizer.encode(text, add_special=False)) * 2 // 3
    ask: Any = {"messages": [USER], "tools": TOOLS, "max_tokens": n_tokens, "temperature": 0}
    says(text)
    choice = roomy.ask("/v1/chat/completions", **ask)["choices"][0]
    assert (choice["finish_reason"], choice["message"].get("tool_calls")) == ("length", None)
    assert choice["message"]["content"]
    says(text)
    chunks = [e["choices"][0] for e in roomy.events("/v1/chat/completions", **ask) if e != "[DONE]"]
    assert "".join(c["delta"].get("content") or "" for c in chunks) == choice["message"]["content"]
    assert chunks[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("name", list(FORMS))
def test_what_agents_send_gives_a_prompt_or_a_clear_error(
    roomy: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Bug kind B29: ordinary messages, every template; never a 5xx, and the server lives on."""
    scripted(roomy, monkeypatch, shared_templates()[name])
    n_prompts = 0
    for title, messages in AGENT_CHATS.items():
        for tools in ([], TOOLS):
            if tools and not roomy.host.dialect.has_calls:
                continue
            response = roomy.post("/apply-template", messages=messages, tools=tools)
            body = response.json()
            if response.status_code == 200:
                n_prompts += 1
                assert body["prompt"], title
            else:
                assert response.status_code == 400, (title, body)
                assert body["error"]["message"].startswith("chat template: "), title
                assert "\n" not in body["error"]["message"]
    assert n_prompts >= 8
    assert roomy.client.get("/health").status_code == 200
