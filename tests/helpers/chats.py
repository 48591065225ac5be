"""Conversations and templates for tests."""

from __future__ import annotations

from typing import Any

from tests.helpers.text_vocab import SHARED

Chat = list[dict[str, Any]]

PLAIN: Chat = [
    {"role": "system", "content": "You are S."},
    {"role": "user", "content": "First"},
    {"role": "assistant", "content": "Answer"},
    {"role": "user", "content": "Second"},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a place",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def call(arguments: Any, **message: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "abc123def", "type": "function", "function": function}],
    } | message


def result(content: Any = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "abc123def", "name": "get_weather", "content": content}


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def agent(message: dict[str, Any]) -> Chat:
    return [user(), message, result(), {"role": "assistant", "content": "Sunny."}, user("Thanks")]


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]

# What agents really send (bug kind B29); each must give a prompt or the template's own refusal.
AGENT_CHATS: dict[str, Chat] = {
    "content null beside calls": agent(call('{"city": "Paris"}', content=None)),
    "content missing beside calls": agent(call('{"city": "Paris"}')),
    "content empty beside calls": agent(call('{"city": "Paris"}', content="")),
    "text beside calls": agent(call('{"city": "Paris"}', content="Let me look.")),
    "arguments as object": agent(call({"city": "Paris"}, content=None)),
    "arguments cut off": agent(call('{"city": "Par', content=None)),
    "arguments one brace": agent(call("{", content=None)),
    "arguments empty": agent(call("", content=None)),
    "arguments null": agent(call(None, content=None)),
    "arguments empty object": agent(call({}, content=None)),
    "arguments a list": agent(call("[1, 2]", content=None)),
    "calls an empty list": [user(), {"role": "assistant", "content": "Hello", "tool_calls": []}, user("More")],
    "calls null": [user(), {"role": "assistant", "content": "Hello", "tool_calls": None}, user("More")],
    "nothing at all": [user(), {"role": "assistant"}, user("More")],
    "content as parts": [{"role": "system", "content": PARTS}, user(PARTS)],
    "result as parts": [user(), call({"city": "Paris"}), result(PARTS)],
    "ids as OpenAI makes them": [
        user(),
        call({"city": "Paris"})
        | {"tool_calls": [call({})["tool_calls"][0] | {"id": "call_9f86d081884c7d659a2feaa0c55ad015"}]},
        result() | {"tool_call_id": "call_9f86d081884c7d659a2feaa0c55ad015"},
    ],
    "result before call": [user(), result(), call({"city": "Paris"}, content=None)],
    "two system messages": [PLAIN[0], {"role": "system", "content": "More rules."}, user()],
    "roles do not alternate": [user("a"), user("b"), PLAIN[2], PLAIN[2]],
    "reasoning": [user(), PLAIN[2] | {"reasoning_content": "I thought."}, user("More")],
    "reasoning null": [user(), PLAIN[2] | {"reasoning_content": None, "name": None}, user("More")],
    "reasoning beside calls": agent(call({"city": "Paris"}, content=None, reasoning_content="I thought.")),
    "developer": [{"role": "developer", "content": "Rules."}, user()],
    "role unknown": [{"role": "narrator", "content": "Once."}, user()],
    "assistant first": [PLAIN[2], user()],
    "ends with assistant": [user(), PLAIN[2]],
}


def shared_templates() -> dict[str, str]:
    """Name -> source of the templates next to the project; none where they are absent."""
    return {path.stem: path.read_text() for path in sorted((SHARED / "templates").glob("*.jinja"))}
