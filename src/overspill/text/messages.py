"""Chat messages as clients send them, brought into the form that a template understands.

Clients differ in what they send (content as text, parts or null; arguments of calls as JSON text or objects) and
templates in what they take. What a template takes is found by trying it on small conversations (`probe_shape`).
The result is always a copy: a template cannot change the caller's messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.errors import UserError

Message = dict[str, Any]
_NEEDLE = "Xq7needle"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a template takes: user content as text or as parts, system messages, call arguments as objects, the role
    `developer`, only ids of calls that have nine characters, thoughts under `thinking` (else `reasoning_content`)."""

    takes_text: bool
    takes_parts: bool
    takes_system: bool
    takes_developer: bool
    wants_objects: bool
    wants_short_ids: bool = False
    takes_thinking: bool = False


def probe_shape(source: str, render: Callable[[list[Message]], str]) -> Shape:
    """The shape of the template `source`, which `render` renders."""

    def attempt(*messages: Message) -> str:
        try:
            return render(list(messages))
        except UserError:
            return ""

    def said(text: str, role: str = "user") -> Message:
        return {"role": role, "content": text if takes_text else _parts((text,))}

    as_text = attempt({"role": "user", "content": _NEEDLE})
    as_parts = attempt({"role": "user", "content": _parts((_NEEDLE,))})
    takes_text = _NEEDLE in as_text or _NEEDLE not in as_parts
    with_system = attempt(said(_NEEDLE, "system"), said("hello"))
    with_object = attempt(said("hello"), *_call_with({"key": _NEEDLE}))
    with_long_id = attempt(said("hello"), *_call_with({"key": _NEEDLE}, call_id="call_0000000000"))
    call, result = _call_with({})
    with_thoughts = attempt(said("hello"), call | {"thinking": _NEEDLE}, result)
    return Shape(
        takes_text=takes_text,
        takes_parts=as_parts == as_text if _NEEDLE in as_text else not takes_text,
        takes_system=_NEEDLE in with_system,
        takes_developer="developer" in source,
        wants_objects=_NEEDLE in with_object and "{'key'" not in with_object,
        wants_short_ids=_NEEDLE in with_object and with_long_id == "",
        takes_thinking=_NEEDLE in with_thoughts,
    )


def _parts(texts: Sequence[str]) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _call_with(arguments: object, call_id: str = "call00001") -> tuple[Message, Message]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "result"}
    return {"role": "assistant", "content": "", "tool_calls": [call]}, result


def normalise(messages: Sequence[Mapping[str, Any]], shape: Shape) -> list[Message]:
    """Copies of `messages` in the form of `shape`. `UserError` names the message that is malformed."""
    if not messages:
        raise UserError("messages is empty; send at least one message")
    normal = [_normal(message, f"messages[{i}]", shape) for i, message in enumerate(messages)]
    return normal if shape.takes_system else _without_system(normal)


def odd_arguments(messages: Sequence[Message], shape: Shape) -> str | None:
    """Where the first call is whose arguments are not the JSON object that the template wants; None if all are."""
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", [])):
            if shape.wants_objects and not isinstance(call.get("function", call).get("arguments"), dict):
                return f"messages[{i}].tool_calls[{j}].function.arguments"
    return None


def copied(value: Any, where: str) -> Any:
    """A copy of JSON-like data; anything else is a `UserError`."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: copied(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copied(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise UserError(f"{where} is of type {type(value).__name__}, which JSON does not have")


def _normal(message: Any, where: str, shape: Shape) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{where} is no object with a text `role`")
    normal: Message = {key: copied(value, f"{where}.{key}") for key, value in message.items() if value is not None}
    if normal["role"] == "developer" and not shape.takes_developer:
        normal["role"] = "system"
    normal["content"] = _content(normal.get("content", ""), f"{where}.content", shape, normal["role"] == "user")
    calls = normal.pop("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{where}.tool_calls is no list of objects")
    if calls:
        normal["tool_calls"] = [_call(call, shape) for call in calls]
    if shape.wants_short_ids and isinstance(call_id := normal.get("tool_call_id"), str):
        normal["tool_call_id"] = _short_id(call_id)
    return _with_thinking(normal) if shape.takes_thinking and "reasoning_content" in normal else normal


def _with_thinking(message: Message) -> Message:
    """Thoughts under the other name. Beside a call, what was said joins them: such templates take one of the two."""
    thinking, content = message["reasoning_content"], message["content"]
    renamed = {key: value for key, value in message.items() if key != "reasoning_content"}
    if "tool_calls" not in message or not content:
        return renamed | {"thinking": thinking}
    return renamed | {"thinking": f"{thinking}\n{content}", "content": ""}


def _short_id(call_id: str) -> str:
    """Nine letters and digits that stand for an id; one that is so already stays."""
    is_short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    return call_id if is_short else hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]


def _content(content: Any, where: str, shape: Shape, is_user: bool) -> str | list[Message]:
    """Text, or parts where the template takes nothing else or the client sent them for a user."""
    if isinstance(content, list):
        texts = [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    elif isinstance(content, str):
        texts = [content]
    else:
        raise UserError(f"{where} is neither text nor a list of parts")
    if not shape.takes_text or (is_user and shape.takes_parts and isinstance(content, list)):
        return _parts(texts)
    return "\n".join(texts)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise UserError(f"{where} is a part of type {str(kind)[:60]!r}; only parts of type 'text' are understood")


def _call(call: Message, shape: Shape) -> Message:
    """A tool call with arguments in the template's form; in OpenAI's form they are under `function`."""
    if shape.wants_short_ids and isinstance(call_id := call.get("id"), str):
        call = call | {"id": _short_id(call_id)}
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], shape)}
    return _with_arguments(call, shape)


def _with_arguments(function: Message, shape: Shape) -> Message:
    arguments = _object(function.get("arguments")) if shape.wants_objects else _json_text(function.get("arguments"))
    return function | {"arguments": arguments}


def _json_text(arguments: Any) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    return "{}" if arguments is None or isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _object(arguments: Any) -> Any:
    """The object that JSON text stands for, {} for nothing; text cut off in the middle stays text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return {} if parsed is None else parsed if isinstance(parsed, dict) else arguments


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Each system message put in front of the text of the next one; at the end it becomes a user's."""
    merged: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        else:
            merged.append(_prefixed(message, waiting))
            waiting = []
    return [*merged, {"role": "user", "content": "\n".join(waiting)}] if waiting else merged


def _prefixed(message: Message, texts: Sequence[str]) -> Message:
    if not texts:
        return message
    content = message["content"]
    if isinstance(content, list):
        return message | {"content": [*_parts(texts), *content]}
    return message | {"content": "\n".join((*texts, content))}
