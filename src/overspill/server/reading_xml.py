"""Calls whose arguments stand between tags, one by one, without quotes.

What such an argument is follows from the tool's schema: a text stays as it is, anything else is JSON. Each function
takes a text from its opening mark to its closing mark and gives the calls in it, or None where it is not exactly of the
form.
"""

from __future__ import annotations

import json
import re
from typing import Any

from overspill.server.reading import Called, Schemas, json_text

_ASSIGNED = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>(.*)</function>(?:\s*</tool_call>)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL)
_PAIRED = re.compile(r"<tool_call>\s*([^\s<]+)(.*)</tool_call>", re.DOTALL)
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)
_DSML = "(?:｜DSML｜)?"
_BLOCK = re.compile(rf"<{_DSML}[\w:]+>(.*)</{_DSML}[\w:]+>", re.DOTALL)
_INVOKE = re.compile(
    rf"\s*<{_DSML}invoke name=\"?([^\">]+)\"?>(.*?)</{_DSML}invoke>(?=\s*(?:<{_DSML}invoke|\Z))", re.DOTALL
)
_PARAMETER = re.compile(
    rf"\s*<{_DSML}parameter name=\"?([^\">]+)\"?(?: string=\"(true|false)\")?>(.*?)</{_DSML}parameter>"
    rf"(?=\s*(?:<{_DSML}parameter|\Z))",
    re.DOTALL,
)
_PYTHON = {"True": True, "False": False, "None": None}


def assigned(text: str, schemas: Schemas) -> list[Called] | None:
    """Qwen3-Coder: `<function=NAME><parameter=KEY>value</parameter></function>`, in a `<tool_call>` or without."""
    match = _ASSIGNED.fullmatch(text)
    return _one(match, _ASSIGNMENT, schemas)


def paired(text: str, schemas: Schemas) -> list[Called] | None:
    """GLM: a name, then `<arg_key>KEY</arg_key><arg_value>value</arg_value>` for each argument."""
    match = _PAIRED.fullmatch(text)
    return _one(match, _PAIR, schemas)


def invoked(text: str, schemas: Schemas) -> list[Called] | None:
    """MiniMax and DeepSeek V3.2: a block of `<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>`."""
    block = _BLOCK.fullmatch(text)
    calls = [_invoked(m, schemas) for m in _consecutive(_INVOKE, block[1]) or []] if block else []
    good = [call for call in calls if call is not None]
    return good if good and len(good) == len(calls) else None


def _one(match: re.Match[str] | None, pair: re.Pattern[str], schemas: Schemas) -> list[Called] | None:
    """The call of a match that holds a name and pairs."""
    pairs = _consecutive(pair, match[2]) if match else None
    if match is None or pairs is None:
        return None
    called = _called(match[1].strip(), [(m[1].strip(), m[2]) for m in pairs], schemas)
    return None if called is None else [called]


def _invoked(invoke: re.Match[str], schemas: Schemas) -> Called | None:
    parameters = _consecutive(_PARAMETER, invoke[2])
    if parameters is None:
        return None
    types = {m[1]: {"type": "string"} for m in parameters if m[2] == "true"}
    return _called(invoke[1], [(m[1], m[3]) for m in parameters], {invoke[1]: {**schemas.get(invoke[1], {}), **types}})


def _called(name: str, pairs: list[tuple[str, str]], schemas: Schemas) -> Called | None:
    properties = schemas.get(name, {})
    text = json_text({key: _value(text, properties.get(key)) for key, text in pairs})
    return None if text is None else Called(name, text)


def _value(text: str, schema: Any) -> Any:
    """What a bare text means under a schema: texts as they are, JSON elsewhere; what is no JSON is a text."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    if text.strip() in _PYTHON:
        return _PYTHON[text.strip()]
    try:
        value = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return text
    is_text = json_text(value) is None or ("string" in kinds and not isinstance(value, dict | list | None))
    return text if is_text else value


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, list):
        return {str(one) for one in kind}
    if kind is None and isinstance(options := schema.get("enum"), list):
        return {"string"} if all(isinstance(option, str) for option in options) else set()
    unions = [option for key in ("anyOf", "oneOf") for option in schema.get(key, []) if isinstance(option, dict)]
    return {str(kind)} if kind is not None else {kind for option in unions for kind in _kinds(option)}


def _consecutive(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """Matches that follow each other from the beginning to the end; None if they do not reach it."""
    matches: list[re.Match[str]] = []
    end = 0
    while match := pattern.match(text, end):
        matches.append(match)
        end = match.end()
    return None if text[end:].strip() else matches
