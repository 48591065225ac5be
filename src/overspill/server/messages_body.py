"""Anthropic's request, POST /v1/messages, as the chat request it means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from overspill.server.defaults import with_defaults
from overspill.server.errors import ApiError
from overspill.server.fields import Body, ChatBody, Flag, Number, Texts, Whole, parse_body

Block = dict[str, Any]


class MessageIn(Body):
    """One message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class MessagesBody(Body):
    """POST /v1/messages and /v1/messages/count_tokens (which needs no max_tokens)."""

    messages: list[MessageIn] = Field(min_length=1)
    max_tokens: Whole | None = Field(None, ge=0)
    system: str | list[Block] = ""
    stop_sequences: Texts = Field(default_factory=list)
    stream: Flag = False
    temperature: Number | None = None
    top_k: Whole | None = None
    top_p: Number | None = None
    tools: list[Block] = Field(default_factory=list)
    tool_choice: Block = Field(default_factory=dict)
    thinking: Block = Field(default_factory=dict)


def chat_body(body: MessagesBody, defaults: Mapping[str, Any]) -> ChatBody:
    """The same request in OpenAI's form, completed with the server's defaults.

    ApiError 400 for content of a kind that is not served.
    """
    values: dict[str, Any] = {
        "continue_final_message": _is_begun(body.messages),
        "messages": [*_system(body.system), *(m for message in body.messages for m in _messages(message))],
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "tools": [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "chat_template_kwargs": {"enable_thinking": False} if body.thinking.get("type") == "disabled" else None,
    }
    given = {key: value for key, value in values.items() if value is not None}
    return parse_body(ChatBody, with_defaults(ChatBody, given, defaults))


def _is_begun(messages: list[MessageIn]) -> bool:
    """Whether the last message is the beginning of the answer: an assistant's, of text alone."""
    last = messages[-1]
    if len(messages) < 2 or last.role != "assistant" or not last.content:
        return False
    return isinstance(last.content, str) or all(block.get("type") == "text" for block in last.content)


def _tool_choice(choice: Block) -> str | Block:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if kind == "any" else kind


def _system(system: str | list[Block]) -> list[Block]:
    text = system if isinstance(system, str) else "\n".join(_texts(system, "system"))
    return [{"role": "system", "content": text}] if text else []


def _messages(message: MessageIn) -> Iterator[Block]:
    """A message may hold results of tools, which are messages of their own elsewhere."""
    blocks = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    for block in blocks:
        if block.get("type") == "tool_result":
            content = block.get("content", "")
            text = content if isinstance(content, str) else "\n".join(_texts(content, "tool_result.content"))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}
    said = [block for block in blocks if block.get("type") != "tool_result"]
    if said or not blocks:
        texts = _texts(said, "messages.content")
        yield {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def _assistant(blocks: list[Block]) -> Block:
    said = [b for b in blocks if b.get("type") not in ("tool_use", "thinking", "redacted_thinking")]
    message: Block = {"role": "assistant", "content": "".join(_texts(said, "messages.content"))}
    if thoughts := [str(b.get("thinking", "")) for b in blocks if b.get("type") == "thinking"]:
        message["reasoning_content"] = "".join(thoughts)
    if calls := [_call(b) for b in blocks if b.get("type") == "tool_use"]:
        message["tool_calls"] = calls
    return message


def _call(block: Block) -> Block:
    arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
    function = {"name": str(block.get("name", "")), "arguments": arguments}
    return {"id": str(block.get("id", "")), "type": "function", "function": function}


def _tool(tool: Block) -> Block:
    if "input_schema" not in tool:
        raise ApiError(
            400, f"Field 'tools': {str(tool.get('type'))[:60]!r} is run by no one here; give an input_schema"
        )
    parameters = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": {key: value for key, value in parameters.items() if value is not None}}


def _texts(blocks: Any, where: str) -> list[str]:
    if not isinstance(blocks, list):
        raise ApiError(400, f"Field '{where}': give a text or a list of blocks")
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise ApiError(400, f"Field '{where}': a block of type {str(kind)[:60]!r} is not served, give text")
    return [block["text"] for block in blocks]
