"""Flags of the server are what requests mean that say nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from overspill.server.settings import ServerSettings
from tests.server.served import Served, serving

DEFAULTS = {"temperature": 0.0, "n_predict": 3, "top_k": 7, "json_schema": '{"type": "object"}', "samplers": "kt"}


@pytest.fixture(scope="module")
def set_up() -> Iterator[Served]:
    with serving(ServerSettings(port=0, name="tiny", ping_s=0.2, defaults=DEFAULTS)) as served:
        yield served


def test_defaults_are_told_and_used(set_up: Served) -> None:
    told = set_up.client.get("/props").json()["default_generation_settings"]["params"]
    assert (told["temperature"], told["top_k"], told["n_predict"]) == (0.0, 7, 3)
    answer = set_up.ask("/completion", prompt="hello")
    assert answer["content"].startswith("{")
    assert answer["tokens_predicted"] <= 3
    assert answer["generation_settings"]["samplers"] == ["top_k", "temperature"]
    message = set_up.ask("/v1/messages", messages=[{"role": "user", "content": "hi"}], max_tokens=9)
    assert message["content"][0]["text"].startswith("{")
    assert message["usage"]["output_tokens"] > 3


def test_there_may_be_no_page_and_stops_may_be_given_to_all() -> None:
    with serving(ServerSettings(port=0, name="tiny", has_page=False, defaults={"stop": ["e"]})) as served:
        assert served.client.get("/").status_code == served.client.get("/page/page.js").status_code == 404
        assert served.client.get("/status").status_code == 200
        ask = {"prompt": "The licence", "temperature": 0, "n_predict": 24}
        free = served.ask("/completion", stop=["nothing of the kind"], **ask)["content"]
        assert "e" in free
        for stop in ({}, {"stop": []}):
            assert served.ask("/completion", **stop, **ask)["content"] == free[: free.index("e")]


def test_requests_say_otherwise(set_up: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "temperature": 1, "seed": 1}
    answer = set_up.ask("/v1/chat/completions", **chat, response_format={"type": "json_object", "schema": schema})
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    text = set_up.ask("/completion", prompt="hello", grammar='root ::= "no"', n_predict=9)
    assert text["content"] == "no"
    assert text["generation_settings"]["temperature"] == 0
