"""What requests mean that leave a field out: the flags that the server was started with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overspill.engine.sampler_names import samplers_of
from overspill.errors import UserError
from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody, SamplingFields, parse_body
from overspill.text.gbnf import lark_of


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """UserError naming the field if no request could have these values."""
    try:
        body = parse_body(ChatBody, {"messages": [{"role": "user", "content": ""}], **defaults})
    except ApiError as error:
        raise UserError(error.message) from None
    samplers_of(body.samplers)
    if body.grammar:
        lark_of(body.grammar)


def with_defaults(kind: type[Any], values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A body's values, completed. A grammar of the flags yields to any that the request brings along; no stop strings
    are as good as none given."""
    if not issubclass(kind, SamplingFields):
        return values
    own = {"grammar", "json_schema", "response_format", "tools"}
    brings_own = any(values.get(name) not in (None, "", []) for name in own)
    limits = {"n_predict"} if {"max_tokens", "max_completion_tokens"} & values.keys() else set()
    left_out = (own if brings_own else set()) | limits
    given = {name: value for name, value in values.items() if name != "stop" or value != []}
    return {name: value for name, value in defaults.items() if name not in left_out} | given
