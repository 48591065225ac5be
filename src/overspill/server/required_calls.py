"""Grammars for answers that have to call a tool, in the form in which the model at hand writes calls.

The names are those of the tools, JSON arguments follow their schemas, and where arguments stand between tags the
required ones are all there, texts as they are. What is written by such a grammar is what the reader of that form reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody
from overspill.text.constrain import JSON_OPTIONS

Schema = Mapping[str, Any]
_ANALYSIS, _NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"


def required_tools(body: ChatBody) -> Sequence[Schema]:
    """The tools of which one has to be called; none where the model may choose. ApiError 400 for a wrong choice."""
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return ()
    named = choice.get("function") if isinstance(choice, dict) else None
    wanted = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(wanted, str):
        raise ApiError(400, "Field 'tool_choice': give auto, none, required, or an object that names a function")
    found = [f for f in map(_function, body.tools) if wanted is None or f["name"] == wanted]
    if not found:
        raise ApiError(400, f"Field 'tool_choice': {_shown(choice)} found, but there is no such tool in 'tools'")
    return found


def calls_lark(form: str, tools: Sequence[Schema], *, has_several: bool) -> str:
    """An answer of one call or, with has_several, more. form: the name of a `CallForm`, or `channels`.

    ApiError 400 for a form that cannot be required.
    """
    write = _FORMS.get(form)
    if write is None:
        raise ApiError(400, "Field 'tool_choice': calls cannot be required in the form of this model; give auto")
    lark = _Lark()
    opening, between, closing = _AROUND[form]
    calls = [write(lark, str(tool["name"]), tool.get("parameters") or {}) for tool in tools]
    one = f"({' | '.join(calls)})"
    more = f"({_text(between)} {one})*" if has_several else ""
    thoughts = (
        f"({_text(_ANALYSIS)} {lark.until('<|end|>')} {_text('<|start|>assistant')})?" if form == "channels" else ""
    )
    return "\n".join([f"start: {thoughts} {opening} {one} {more} {closing}", *lark.rules])


class _Lark:
    """Rules of a grammar as it grows."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def json(self, schema: Schema) -> str:
        """JSON by a schema."""
        return self._rule("", "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}))

    def arguments(self, schema: Schema) -> str:
        return self.json({"type": "object", **schema})

    def until(self, end: str) -> str:
        """Any text, to and with the first `end`."""
        return self._rule(f"[suffix={_text(end)}]", "/(?s:.*)/")

    def given(self, schema: Schema, part: Callable[[str, str], str]) -> str:
        """Arguments one by one, in their order; part: of a name and its value, to and with its end."""
        required = schema.get("required", ())
        parts = [(name, part(name, value)) for name, value in _properties(schema).items()]
        return " ".join(text if name in required else f"({text})?" for name, text in parts) or '""'

    def value(self, schema: Any, end: str) -> str:
        """A value without quotes, and what ends it."""
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            choices = schema.get("enum")
            if choices:
                return f"({' | '.join(_text(str(choice)) for choice in choices)}) {_text(end)}"
            return self.until(end)
        return f"{self.json(schema if isinstance(schema, Mapping) else {})} {_text(end)}"

    def _rule(self, attributes: str, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


def _properties(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    return properties if isinstance(properties, Mapping) else {}


def _text(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text) if text else '""'


def _function(tool: Mapping[str, Any]) -> Schema:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, "Field 'tools': each has a 'function' with a 'name'")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ApiError(400, "Field 'tools': 'parameters' is a JSON schema, an object")
    return function


def _shown(value: object) -> str:
    return str(value)[:60]


# --- forms: one call each


def _hermes(g: _Lark, name: str, schema: Schema) -> str:
    head = f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '
    return f"{_text(head)} {g.arguments(schema)} {_text('}' + chr(10) + '</tool_call>')}"


def _object(key: str) -> Callable[[_Lark, str, Schema], str]:
    def write(g: _Lark, name: str, schema: Schema) -> str:
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        return f'{_text(head)} {g.arguments(schema)} "}}"'

    return write


def _deepseek(g: _Lark, name: str, schema: Schema) -> str:
    head, end = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    return f"{_text(head)} {g.arguments(schema)} {_text(end)}"


def _kimi(g: _Lark, name: str, schema: Schema) -> str:
    head = f"<|tool_call_begin|>functions.{name}:"
    middle, end = "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    return f"{_text(head)} /[0-9]/ {_text(middle)} {g.arguments(schema)} {_text(end)}"


def _qwen_coder(g: _Lark, name: str, schema: Schema) -> str:
    def part(key: str, value: Any) -> str:
        return f"{_text(f'<parameter={key}>' + chr(10))} {g.value(value, chr(10) + '</parameter>' + chr(10))}"

    head, end = f"<tool_call>\n<function={name}>\n", "</function>\n</tool_call>"
    return f"{_text(head)} {g.given(schema, part)} {_text(end)}"


def _glm(g: _Lark, name: str, schema: Schema) -> str:
    def part(key: str, value: Any) -> str:
        return f"{_text(f'<arg_key>{key}</arg_key>{chr(10)}<arg_value>')} {g.value(value, '</arg_value>' + chr(10))}"

    return f"{_text(f'<tool_call>{name}' + chr(10))} {g.given(schema, part)} {_text('</tool_call>')}"


def _minimax(g: _Lark, name: str, schema: Schema) -> str:
    def part(key: str, value: Any) -> str:
        head = f'<parameter name="{key}">'
        return f"{_text(head)} {g.value(value, '</parameter>' + chr(10))}"

    head = f'<invoke name="{name}">\n'
    return f"{_text(head)} {g.given(schema, part)} {_text('</invoke>' + chr(10))}"


def _channels(g: _Lark, name: str, schema: Schema) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{_text(head)} {g.arguments(schema)}"


_FORMS: Mapping[str, Callable[[_Lark, str, Schema], str]] = {
    "hermes": _hermes,
    "llama": _object("parameters"),
    "mistral": _object("arguments"),
    "deepseek": _deepseek,
    "kimi": _kimi,
    "qwen-coder": _qwen_coder,
    "glm": _glm,
    "minimax": _minimax,
    "channels": _channels,
}
_NOTHING = '""'
_AROUND: Mapping[str, tuple[str, str, str]] = {
    "hermes": (_NOTHING, "\n", _NOTHING),
    "llama": (_NOTHING, "; ", _NOTHING),
    "mistral": (_text("[TOOL_CALLS]["), ", ", _text("]")),
    "deepseek": (_text("<｜tool▁calls▁begin｜>"), "", _text("<｜tool▁calls▁end｜>")),
    "kimi": (_text("<|tool_calls_section_begin|>"), "", _text("<|tool_calls_section_end|>")),
    "qwen-coder": (_NOTHING, "\n", _NOTHING),
    "glm": (_NOTHING, "\n", _NOTHING),
    "minimax": (_text("<minimax:tool_call>\n"), "", _text("</minimax:tool_call>")),
    "channels": (_NOTHING, "", _NOTHING),
}
