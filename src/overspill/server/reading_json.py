"""Calls whose arguments are JSON (or, in one family, Python literals) between marks.

Each function takes a text from its opening mark to its closing mark (or the answer's end) and gives the calls in it, or
None where it is not exactly of the form.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any, NoReturn

from overspill.server.reading import Called, Schemas, json_text

_TAGGED = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
_SEPARATED = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([^\n<]+)(?:\n```json\n|<｜tool▁sep｜>)(.*?)"
    r"(?:\n```)?<｜tool▁call▁end｜>\s*(?=<｜tool▁call)",
    re.DOTALL,
)
_SECTIONED = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?:functions\.)?([^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>(.*?)"
    r"<\|tool_call_end\|>\s*(?=<\|tool_call)",
    re.DOTALL,
)
_LISTED = re.compile(r"\[TOOL_CALLS\]\s*([^\s\[\]{}]+?)\s*(?:\[CALL_ID\]\w*)?\[ARGS\]\s*", re.DOTALL)
_LIST = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])\s*", re.DOTALL)
_BARE = re.compile(r"(?:<\|python_tag\|>)?\s*(\{.*\})\s*", re.DOTALL)
_PYTHONIC = re.compile(r"<\|tool_call_start\|>\s*(\[.*\])\s*<\|tool_call_end\|>", re.DOTALL)


def tagged(text: str, schemas: Schemas) -> list[Called] | None:
    """Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    match = _TAGGED.fullmatch(text)
    return _all([_named(_loaded(match[1]))]) if match else None


def separated(text: str, schemas: Schemas) -> list[Called] | None:
    """DeepSeek V3 and R1 (`function`, a separator, the name, JSON in a fence) and V3.1 (name, separator, JSON)."""
    body = text.removeprefix("<｜tool▁calls▁begin｜>")
    matches = _consecutive(_SEPARATED, body)
    calls = [_spelled(m[1].strip(), m[2]) for m in matches]
    return _all(calls) if _end(matches) == len(body) - len("<｜tool▁calls▁end｜>") else None


def sectioned(text: str, schemas: Schemas) -> list[Called] | None:
    """Kimi: a section of calls, each with an id `functions.NAME:N` and JSON."""
    body = text.removeprefix("<|tool_calls_section_begin|>")
    matches = _consecutive(_SECTIONED, body)
    calls = [_spelled(m[1], m[2]) for m in matches]
    return _all(calls) if _end(matches) == len(body) - len("<|tool_calls_section_end|>") else None


def listed(text: str, schemas: Schemas) -> list[Called] | None:
    """Mistral: `[TOOL_CALLS][{"name", "arguments"}, ...]`, or a name and `[ARGS]` before each object."""
    if match := _LIST.fullmatch(text):
        items = _loaded(match[1])
        return _all([_named(item) for item in items]) if isinstance(items, list) else None
    calls: list[Called | None] = []
    start = 0
    while match := _LISTED.match(text, start):
        value, start = _first_value(text, match.end())
        calls.append(_object(match[1], value))
        start += len(text[start:]) - len(text[start:].lstrip())
    return _all(calls) if start == len(text) else None


def bare(text: str, schemas: Schemas) -> list[Called] | None:
    """Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several of these with `;` between them."""
    match = _BARE.fullmatch(text)
    calls: list[Called | None] = []
    rest = match[1] if match else ""
    while rest:
        value, end = _first_value(rest, 0)
        calls.append(_named(value))
        rest = rest[end:].strip()
        if rest and not rest.startswith(";"):
            return None
        rest = rest.removeprefix(";").strip()
    return _all(calls)


def pythonic(text: str, schemas: Schemas) -> list[Called] | None:
    """LFM2: a Python list of calls, `[f(city="Paris", days=2)]`."""
    match = _PYTHONIC.fullmatch(text)
    try:
        tree = ast.parse(match[1], mode="eval").body if match else None
        return _all([_python_call(node) for node in tree.elts]) if isinstance(tree, ast.List) else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def is_object(text: str) -> bool:
    """Whether a text spells a JSON object."""
    return isinstance(_loaded(text), dict)


def _python_call(node: ast.expr) -> Called | None:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        return None
    arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return _object(ast.unparse(node.func), arguments)


def _named(call: Any) -> Called | None:
    """An object with a name and arguments, which some models call parameters."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or json_text(call["name"]) is None:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return _spelled(call["name"], arguments)
    return _object(call["name"], arguments)


def _spelled(name: str, arguments: str) -> Called | None:
    """A call whose arguments are JSON text, which is kept as the model wrote it."""
    return Called(name, arguments.strip()) if is_object(arguments) else None


def _object(name: str, arguments: Any) -> Called | None:
    if not isinstance(arguments, dict) or (text := json_text(arguments)) is None:
        return None
    return Called(name, text)


def _all(calls: list[Called | None]) -> list[Called] | None:
    """The calls, if there are some and each is one."""
    good = [call for call in calls if call is not None and call.name]
    return good if good and len(good) == len(calls) else None


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Matches that follow each other from the beginning."""
    matches: list[re.Match[str]] = []
    while match := pattern.match(text, _end(matches)):
        matches.append(match)
    return matches


def _end(matches: list[re.Match[str]]) -> int:
    return matches[-1].end() if matches else 0


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _first_value(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends; None if there is none."""
    try:
        return json.JSONDecoder(parse_constant=_refuse).raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, len(text)


def _refuse(value: object) -> NoReturn:
    raise ValueError(str(value))
