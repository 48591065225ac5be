"""Raw answers to thoughts, text and calls, however the text is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.server.dialect import Dialect
from overspill.server.reading import Arguments, Call, Part, Reader, Said, Thought, read_all
from tests.helpers.plain import SHARED

QWEN = '{% if tools %}<tool_call>\n{"name": 1, "arguments": 2}\n</tool_call>{% endif %}<think>\n</think>'
OSS = "<|channel|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'


def tags(prompt: str = "<|im_start|>assistant\n") -> Reader:
    return Dialect.of(QWEN).reader(prompt, has_tools=True, is_raw=False)


def thinking() -> Reader:
    return tags("<|im_start|>assistant\n<think>\n")


def channels() -> Reader:
    return Dialect.of(OSS).reader("<|start|>assistant", has_tools=True, is_raw=False)


def told(parts: list[Part]) -> list[Part]:
    """Neighbours of a kind joined."""
    whole: list[Part] = []
    for part in parts:
        last = whole[-1] if whole else None
        if isinstance(part, Call) or type(last) is not type(part):
            whole.append(part)
        else:
            assert not isinstance(last, Call | None)
            whole[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
    return whole


ANSWERS: list[tuple[Callable[[], Reader], str, list[Part]]] = [
    (tags, "", []),
    (tags, "  hello\n", [Said("  hello\n")]),
    (tags, "<think>\nhm\n\nso\n</think>\n\nhello ", [Thought("hm\n\nso"), Said("hello ")]),
    (tags, "\n<think></think>\n\nhello", [Said("hello")]),
    (tags, "a <think> b </think> c", [Said("a <think> b </think> c")]),
    (tags, "<thin", [Said("<thin")]),
    (tags, "<thing>", [Said("<thing>")]),
    (tags, "<think>cut off \n", [Thought("cut off")]),
    (thinking, "hm</think>hello", [Thought("hm"), Said("hello")]),
    (thinking, "hm <think> </thin", [Thought("hm <think> </thin")]),
    (tags, CALL, [Call("f"), Arguments('{"a": [1, "é"]}')]),
    (tags, f"I call:\n\n{CALL}\n{CALL}\n", [Said("I call:"), *2 * [Call("f"), Arguments('{"a": [1, "é"]}')], Said("")]),
    (thinking, f"hm\n</think>\n\n{CALL}", [Thought("hm"), Call("f"), Arguments('{"a": [1, "é"]}')]),
    (tags, f"a {CALL[:30]}", [Said(f"a {CALL[:30]}")]),
    (tags, "a <tool_call>{}</tool_call> b", [Said("a <tool_call>{}</tool_call> b")]),
    (tags, '<tool_call>{"name": "g"}</tool_call>', [Call("g"), Arguments("{}")]),
    (tags, '<tool_call>{"name": "g", "arguments": NaN}</tool_call>', [
        Said('<tool_call>{"name": "g", "arguments": NaN}</tool_call>')]),
    (channels, "<|channel|>final<|message|>hello", [Said("hello")]),
    (channels, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a < b",
        [Thought("hm"), Said("a < b")]),
    (channels, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}',
        [Call("f"), Arguments('{"a": 1}')]),
    (channels, '<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.g<|channel|>commentary json'
        "<|message|>{", [Thought("x"), Call("g"), Arguments("{")]),
    (channels, "<|channel|>fin", []),
    (channels, "<|channel|>final<|message|>a<|en", [Said("a<|en")]),
]  # fmt: skip


@pytest.mark.parametrize(("reader", "text", "parts"), ANSWERS)
def test_answers(reader: Callable[[], Reader], text: str, parts: list[Part]) -> None:
    expected = [part for part in parts if part != Said("")]
    assert told(read_all(reader(), text)) == expected
    one = reader()
    assert told([part for letter in text for part in one.push(letter)] + one.finish()) == expected


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "a", " ", "\n", "<", "</", "é"]
MARKS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "final", "analysis", " to=functions.f", "x", "<|", "<"]


@given(st.lists(st.sampled_from(PIECES + MARKS)), st.sampled_from([tags, thinking, channels]), st.randoms())
def test_cuts_change_nothing(pieces: list[str], make: Callable[[], Reader], random: object) -> None:
    text = "".join(pieces)
    one, parts = make(), []
    while text:
        n = random.randint(1, 9)  # type: ignore[attr-defined]
        parts += one.push(text[:n])
        text = text[n:]
    assert told(parts + one.finish()) == told(read_all(make(), "".join(pieces)))


@pytest.mark.skipif(not SHARED.exists(), reason="no shared fixtures: the templates of real models")
def test_dialects_of_real_templates() -> None:
    def dialect(name: str) -> tuple[bool, bool, bool]:
        found = Dialect.of((SHARED / "templates" / f"{name}.jinja").read_text())
        return found.has_channels, found.has_thoughts, found.has_calls

    assert dialect("Qwen-Qwen3-0.6B") == (False, True, True)
    assert dialect("Qwen-Qwen2.5-7B-Instruct") == (False, False, True)
    assert dialect("openai-gpt-oss-120b") == (True, False, True)
    assert dialect("GLM-4.6") == (False, True, False)
    assert dialect("Qwen3-Coder") == (False, False, False)
    assert dialect("meta-llama-Llama-3.3-70B-Instruct") == (False, False, False)
