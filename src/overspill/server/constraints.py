"""What a request wants its answer to consist of: a grammar, a JSON schema, or calls of its tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody, SamplingFields
from overspill.text.constrain import Grammar, Grammars

_ANY_OBJECT = {"type": "object"}


def grammar_of(grammars: Grammars, body: SamplingFields) -> Grammar | None:
    """The grammar of `grammar`, `json_schema` or `response_format`; None where the answer is free.

    ApiError or UserError for what is no grammar or schema, and for fields that contradict each other.
    """
    schema = _schema_of(body)
    if body.grammar == "" and schema is None:
        return None
    if body.ignore_eos:
        raise ApiError(400, "Field 'ignore_eos': an answer that follows a grammar ends with it; leave one of them out")
    if isinstance(body, ChatBody) and body.offered_tools:
        raise ApiError(400, "Field 'tools': they and a grammar or schema exclude each other; leave one of them out")
    if body.grammar == "":
        assert schema is not None
        return grammars.json_schema(schema)
    if schema is not None and isinstance(body, ChatBody):
        raise ApiError(400, "Field 'grammar': it and a schema exclude each other; leave one of them out")
    return grammars.gbnf(body.grammar)


def _schema_of(body: SamplingFields) -> Mapping[str, Any] | str | None:
    asked = _of_response_format(body.response_format) if isinstance(body, ChatBody) else None
    if asked is not None:
        return asked
    schema = body.json_schema
    if schema is not None and not isinstance(schema, str | dict):
        raise ApiError(400, "Field 'json_schema': give a JSON schema, an object")
    return schema if schema != "" else None


def _of_response_format(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema", _ANY_OBJECT)
    elif kind == "json_schema":
        described = given.get("json_schema", given)
        schema = described.get("schema") if isinstance(described, Mapping) else None
    else:
        raise ApiError(400, f"Field 'response_format.type': give text, json_object or json_schema, not {kind!r:.40}")
    if not isinstance(schema, Mapping):
        raise ApiError(400, "Field 'response_format': it has no 'schema' that is an object")
    return schema
