"""Raw answers to thoughts, text and calls, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.server.dialect import Dialect
from overspill.server.reading import Arguments, Call, Part, Reader, Said, Thought, read_all
from overspill.text import ChatTemplate
from tests.helpers.chats import shared_templates, user

QWEN = '{% if tools %}<tool_call>\n{"name": 1, "arguments": 2}\n</tool_call>{% endif %}<think>\n</think>'
OSS = "<|channel|>"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "n": {"type": "integer"},
                    "is": {"type": "boolean"},
                    "list": {"type": "array"},
                    "either": {"anyOf": [{"type": "string"}, {"type": "number"}]},
                    "choice": {"enum": ["1", "2"]},
                },
            },
        },
    }
]


def reader_of(source: str, prompt: str = "<|im_start|>assistant\n") -> Reader:
    return Dialect.of(source).reader(prompt, tools=TOOLS, is_raw=False)


def tags() -> Reader:
    return reader_of(QWEN)


def thinking() -> Reader:
    return reader_of(QWEN, "<|im_start|>assistant\n<think>\n")


def bracketed() -> Reader:
    return reader_of("[TOOL_CALLS][THINK][/THINK]")


def channels() -> Reader:
    return reader_of(OSS, "<|start|>assistant")


def silent() -> Reader:
    """gpt-oss without tools."""
    return Dialect.of(OSS).reader("<|start|>assistant", tools=[], is_raw=False)


def coder() -> Reader:
    return reader_of("<function=<parameter=<tool_call>")


def glm() -> Reader:
    return reader_of("<tool_call><arg_key><arg_value></think>")


def minimax() -> Reader:
    return reader_of("<minimax:tool_call>")


def dsml() -> Reader:
    return reader_of("｜DSML｜ invoke")


def deepseek() -> Reader:
    return reader_of("<｜tool▁calls▁begin｜><｜tool▁sep｜>")


def kimi() -> Reader:
    return reader_of("<|tool_calls_section_begin|>")


def mistral() -> Reader:
    return reader_of("[TOOL_CALLS]")


def llama() -> Reader:
    return reader_of('<|start_header_id|>tools"parameters"')


def lfm() -> Reader:
    return reader_of("<|tool_list_start|>")


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


def called(**arguments: Any) -> list[Part]:
    return [Call("f"), Arguments(json.dumps(arguments, ensure_ascii=False))]


def deepseek_text(*calls: str) -> str:
    inner = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>\n" for call in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi_text(*arguments: str) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.f:{i}<|tool_call_argument_begin|>{one}<|tool_call_end|>"
        for i, one in enumerate(arguments)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def coder_text(inner: str) -> str:
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


# Whole calls: what a model of the form writes, and what it means.
CALLS: list[tuple[Callable[[], Reader], str, list[Part]]] = [
    (tags, CALL, [Call("f"), Arguments('{"a": [1, "é"]}')]),
    (tags, '<tool_call>{"name": "f", "arguments": "{\\"n\\":1}"}</tool_call>', [Call("f"), Arguments('{"n":1}')]),
    (tags, '<tool_call>{"name": "f", "arguments": {"text": "</tool_call>"}}</tool_call>', called(text="</tool_call>")),
    (coder, coder_text("<parameter=text>\n1\n</parameter>\n<parameter=n>\n1\n</parameter>\n"), called(text="1", n=1)),
    (coder, coder_text("<parameter=is>\nTrue\n</parameter>\n<parameter=list>\n[1, {}]\n</parameter>\n"),
        called(**{"is": True, "list": [1, {}]})),
    (coder, coder_text("<parameter=text>\na\n\n</parameter>\n</tool_call>\n\n</parameter>\n"),
        called(text="a\n\n</parameter>\n</tool_call>\n")),
    (coder, coder_text("<parameter=n>\nmany\n</parameter>\n<parameter=other>\nnull\n</parameter>\n"),
        called(n="many", other=None)),
    (coder, coder_text("<parameter=either>\n5\n</parameter>\n<parameter=choice>\n2\n</parameter>\n"),
        called(either="5", choice="2")),
    (coder, coder_text(""), called()),
    (coder, "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>", called(n=1)),
    (glm, "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>list</arg_key>\n"
        "<arg_value>[1]</arg_value>\n</tool_call>", called(text="{}", list=[1])),
    (glm, "<tool_call>f<arg_key>text</arg_key><arg_value> a\n</arg_value></tool_call>", called(text=" a\n")),
    (glm, "<tool_call>f</tool_call>", called()),
    (minimax, '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">a\n</parameter>\n</invoke>\n'
        '<invoke name="f">\n<parameter name="n">-2</parameter>\n</invoke>\n</minimax:tool_call>',
        [*called(text="a\n"), *called(n=-2)]),
    (dsml, '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="x" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="y" string="false">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        called(x="5", y=5)),
    (dsml, '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        called()),
    (deepseek,
        deepseek_text('function<｜tool▁sep｜>f\n```json\n{"n": 1}\n```', 'function<｜tool▁sep｜>f\n```json\n{}\n```'),
        [*called(n=1), *called()]),
    (deepseek, deepseek_text('f<｜tool▁sep｜>{"text": "```"}', "f<｜tool▁sep｜>{}"), [*called(text="```"), *called()]),
    (kimi, kimi_text('{"n": 1}', "{}"), [*called(n=1), *called()]),
    (mistral, '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}, "id": "123456789"}, {"name": "f", "arguments": {}}]',
        [*called(n=1), *called()]),
    (mistral, '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"n": 1}[TOOL_CALLS]f[ARGS]{}', [*called(n=1), *called()]),
    (llama, '{"name": "f", "parameters": {"n": 1}}', called(n=1)),
    (llama, '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}; {"name": "f", "parameters": {"n": 2}}',
        [*called(), *called(n=2)]),
    (lfm, "<|tool_call_start|>[f(text='a', list=[1, -2.5, None]), f()]<|tool_call_end|>",
        [*called(text="a", list=[1, -2.5, None]), *called()]),
    (channels, ' to=functions.f<|channel|>commentary json<|message|>{"n": 1}', called(n=1)),
    (channels, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}<|call|>', called(n=1)),
]  # fmt: skip

# Answers of other kinds, and what is no call after all.
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
    (thinking, f"hm {CALL}", [Thought(f"hm {CALL}")]),
    (tags, f"I call:\n\n{CALL}\n{CALL}\n", [Said("I call:"), *2 * [Call("f"), Arguments('{"a": [1, "é"]}')]]),
    (thinking, f"hm\n</think>\n\n{CALL}", [Thought("hm"), Call("f"), Arguments('{"a": [1, "é"]}')]),
    (tags, f"a {CALL[:30]}", [Said(f"a {CALL[:30]}")]),
    (tags, "a <tool_call>{}</tool_call> b", [Said("a <tool_call>{}</tool_call> b")]),
    (tags, f"a <tool_call>{{}}</tool_call> b\n{CALL}\nc",
        [Said("a <tool_call>{}</tool_call> b"), Call("f"), Arguments('{"a": [1, "é"]}'), Said("c")]),
    (tags, f"the tag <tool_call> means\n{CALL}",
        [Said("the tag <tool_call> means"), Call("f"), Arguments('{"a": [1, "é"]}')]),
    (tags, "<tool_call></tool_call>" * 40, [Said("<tool_call></tool_call>" * 40)]),
    (tags, '<tool_call>{"name": "g"}</tool_call>', [Call("g"), Arguments("{}")]),
    (tags, '<tool_call>{"name": "g", "arguments": [1]}</tool_call>', [
        Said('<tool_call>{"name": "g", "arguments": [1]}</tool_call>')]),
    (tags, '<tool_call>{"name": "g", "arguments": {"a": 1e999}}</tool_call>', [
        Said('<tool_call>{"name": "g", "arguments": {"a": 1e999}}</tool_call>')]),
    (tags, '<tool_call>{"name": "g", "arguments": NaN}</tool_call>', [
        Said('<tool_call>{"name": "g", "arguments": NaN}</tool_call>')]),
    (tags, '<tool_call>{"name": "g\\ud800"}</tool_call>', [Said('<tool_call>{"name": "g\\ud800"}</tool_call>')]),
    (coder, coder_text("<parameter=n>\n1e999\n</parameter>\n"), called(n="1e999")),
    (coder, coder_text("<parameter=n>\n" + "[" * 9999 + "\n</parameter>\n"), called(n="[" * 9999)),
    (coder, coder_text("odd <parameter=n>\n1\n</parameter>"), [Said(coder_text("odd <parameter=n>\n1\n</parameter>"))]),
    (glm, "<tool_call>f<arg_key>a</arg_key></tool_call>", [Said("<tool_call>f<arg_key>a</arg_key></tool_call>")]),
    (kimi, kimi_text('{"n": 1}', "{"), [Said(kimi_text('{"n": 1}', "{"))]),
    (deepseek, deepseek_text("f<｜tool▁sep｜>5"), [Said(deepseek_text("f<｜tool▁sep｜>5"))]),
    (mistral, 'a [TOOL_CALLS]f[ARGS]{"n"', [Said('a [TOOL_CALLS]f[ARGS]{"n"')]),
    (llama, 'See: {"name": "f", "parameters": {}}', [Said('See: {"name": "f", "parameters": {}}')]),
    (llama, '{"answer": 42}', [Said('{"answer": 42}')]),
    (llama, '{"a": {"name": "f"}} {', [Said('{"a": {"name": "f"}} {')]),
    (llama, "plain", [Said("plain")]),
    (lfm, "<|tool_call_start|>[f(1)]<|tool_call_end|>", [Said("<|tool_call_start|>[f(1)]<|tool_call_end|>")]),
    (lfm, "<|tool_call_start|>[f(a={1})]<|tool_call_end|>", [Said("<|tool_call_start|>[f(a={1})]<|tool_call_end|>")]),
    (lfm, "<|tool_call_start|>[f(a=g())]<|tool_call_end|>", [Said("<|tool_call_start|>[f(a=g())]<|tool_call_end|>")]),
    (bracketed, '[THINK]hm[/THINK]so[TOOL_CALLS]f[ARGS]{}', [Thought("hm"), Said("so"), *called()]),
    (channels, "<|channel|>final<|message|>hello", [Said("hello")]),
    (channels, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a < b",
        [Thought("hm"), Said("a < b")]),
    (channels, "<|channel|>analysis<|message|>x<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
        "<|message|>{}", [Thought("x"), *called()]),
    (channels, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        "<|constrain|>json<|message|>{}<|call|>", [Said("I look."), *called()]),
    (channels, "<|channel|>commentary to=functions.f json<|message|>{\"n\"",
        [Said("<|channel|>commentary to=functions.f json<|message|>{\"n\"")]),
    (channels, "<|channel|>fin", []),
    (channels, "<|channel|>final<|mess", []),
    (channels, "<|channel|>final<|message|>a<|en", [Said("a<|en")]),
    (channels, "Hello<|message|> there<|end|>", [Said("Hello<|message|> there")]),
    (channels, "<|channel|>final Hello there", [Said("<|channel|>final Hello there")]),
    (silent, "<|channel|>commentary to=functions.f json<|message|>{}", [Said("{}")]),
]  # fmt: skip


def in_two(make: Callable[[], Reader], text: str, i: int) -> list[Part]:
    one = make()
    return told([*one.push(text[:i]), *one.push(text[i:]), *one.finish()])


@pytest.mark.parametrize(("make", "text", "parts"), CALLS + ANSWERS)
def test_answers(make: Callable[[], Reader], text: str, parts: list[Part]) -> None:
    assert told(read_all(make(), text)) == parts
    one = make()
    assert told([part for letter in text for part in one.push(letter)] + one.finish()) == parts
    if len(text) < 1000:
        assert all(in_two(make, text, i) == parts for i in range(len(text)))


@pytest.mark.parametrize(("make", "text", "parts"), CALLS)
def test_a_call_that_is_cut_off_is_text(make: Callable[[], Reader], text: str, parts: list[Part]) -> None:
    """At every place: what was written is said, none of it lost, and no call is made of it, but for calls before."""
    for i in range(len(text)):
        found = told(read_all(make(), text[:i]))
        said = "".join(part.text for part in found if isinstance(part, Said))
        calls = [part for part in found if not isinstance(part, Said)]
        assert calls == parts[: len(calls)]
        if make is channels:
            assert said in (text[:i], "")
            assert "<|message|>" not in text[:i] or said == text[:i] or calls == parts
        elif not calls:
            assert said == text[:i], i


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"}', "a", " ", "\n", "<", "</", "é"]
MARKS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "final", "analysis", " to=functions.f", "x", "<|", "<"]
MORE = ["<function=f>", "</function>", "<parameter=n>", "</parameter>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "{}", ";"]
MAKERS = [tags, thinking, channels, silent, coder, glm, mistral, llama, minimax, bracketed]


@given(st.lists(st.sampled_from(PIECES + MARKS + MORE)), st.sampled_from(MAKERS), st.randoms())
def test_cuts_change_nothing(pieces: list[str], make: Callable[[], Reader], random: object) -> None:
    text = "".join(pieces)
    one, parts = make(), []
    while text:
        n = random.randint(1, 9)  # type: ignore[attr-defined]
        parts += one.push(text[:n])
        text = text[n:]
    assert told(parts + one.finish()) == told(read_all(make(), "".join(pieces)))


@given(st.lists(st.sampled_from(PIECES + MORE)), st.sampled_from([coder, glm, mistral, llama, minimax, deepseek, kimi]))
def test_nothing_is_lost_where_nothing_is_called(pieces: list[str], make: Callable[[], Reader]) -> None:
    text = "".join(piece for piece in pieces if "think" not in piece)
    found = told(read_all(make(), text))
    assert found == ([Said(text)] if text else []) or any(isinstance(part, Call) for part in found)


# --- the templates of real models

FORMS = {
    "GLM-4.6": "glm",
    "GLM-4.7-Flash": "glm",
    "HuggingFaceTB-SmolLM3-3B": None,
    "Kimi-K2-Instruct": "kimi",
    "Kimi-K2-Thinking": "kimi",
    "LFM2-8B-A1B": "lfm",
    "MiniMax-M2": "minimax",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen-coder",
    "Qwen3.5-4B": "qwen-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-V3.2": "dsml",
    "deepseek-ai-DeepSeek-V4": "dsml",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "dsml",
    "google-gemma-2-2b-it": None,
    "ibm-granite-granite-4.0": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama",
    "meta-llama-Llama-3.3-70B-Instruct": "llama",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "moonshotai-Kimi-K2": "kimi",
    "openai-gpt-oss-120b": None,
}
THOUGHTLESS = (
    "2.5",
    "gemma",
    "granite",
    "llama-",
    "Llama",
    "istral",
    "LFM",
    "Coder",
    "Kimi-K2-Instruct",
    "moonshot",
    "oss",
)
VALUES: list[dict[str, Any]] = [
    {},
    {"text": "Zürich\n\n 'a' \"b\" \\ </x>", "n": -3},
    {"text": "5", "is": True, "list": [1, {"a": [None, "b"]}], "either": "x"},
]
needs_templates = pytest.mark.skipif(not shared_templates(), reason="needs the templates of real models")


@needs_templates
def test_the_dialects_of_real_templates() -> None:
    found = {name: Dialect.of(source) for name, source in shared_templates().items()}
    assert {name: dialect.calls.name if dialect.calls else None for name, dialect in found.items()} == FORMS
    assert [name for name, dialect in found.items() if dialect.has_channels] == ["openai-gpt-oss-120b"]
    thoughtless = {name for name, dialect in found.items() if dialect.thoughts is None}
    assert thoughtless == {name for name in found if any(part in name for part in THOUGHTLESS)}


def written(source: str, calls: list[dict[str, Any]]) -> str:
    """How the template itself writes calls that a model has made: what such a model was trained to write."""
    template = ChatTemplate(source, bos_text="<s>", eos_text="</s>")
    entries = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for i, arguments in enumerate(calls)
    ]
    history = [user("Mark"), {"role": "assistant", "content": "", "tool_calls": entries}]
    after = template.render(history, tools=TOOLS, add_generation_prompt=False).rpartition("Mark")[2]
    openings = list(form.openings) if (form := Dialect.of(source).calls) else [" to=functions"]
    starts = [at for opening in openings if (at := after.find(opening)) >= 0]
    text = after[min(starts) :]
    if form and (closing := form.openings[next(o for o in openings if text.startswith(o))]):
        return text[: text.rfind(closing) + len(closing)]
    return text.removesuffix("</s>").removesuffix("<|eot_id|>")


@needs_templates
def test_what_real_templates_write_for_calls_is_read_as_those_calls() -> None:
    n_read = 0
    for name, source in shared_templates().items():
        dialect = Dialect.of(source)
        if not dialect.has_calls or name.startswith("LFM"):  # whose template does not write calls
            continue
        takes_one = "llama-Llama" in name or "oss" in name
        for calls in [[values] for values in VALUES] + ([] if takes_one else [VALUES]):
            text = written(source, calls)
            expected = [part for values in calls for part in called(**values)]
            for cut in (1, 7, len(text)):
                one = dialect.reader("", tools=TOOLS, is_raw=False)
                parts = [part for i in range(0, len(text), cut) for part in one.push(text[i : i + cut])]
                assert told(parts + one.finish()) == expected, (name, text)
            n_read += 1
    assert n_read == 23 * 4 - 3


@needs_templates
def test_thinking_is_turned_on_and_off_by_the_request() -> None:
    """Where the prompt opens the thoughts, an answer without any mark is thought; where it closes them, it is said."""
    kinds: dict[str, list[str]] = {}
    for name, source in shared_templates().items():
        template, dialect = ChatTemplate(source), Dialect.of(source)
        for is_on in (True, False):
            prompt = template.render([user()], tools=TOOLS, template_kwargs={"enable_thinking": is_on})
            (part,) = read_all(dialect.reader(prompt, tools=TOOLS, is_raw=False), "words")
            kinds.setdefault(name, []).append(type(part).__name__)
    assert all(off == "Said" for name, (_, off) in kinds.items() if name != "MiniMax-M2")  # which always thinks
    assert {name for name, (on, _) in kinds.items() if on == "Thought"} == {
        "GLM-4.7-Flash",
        "MiniMax-M2",
        "Qwen-QwQ-32B",
        "Qwen3.5-4B",
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "deepseek-ai-DeepSeek-V3.1",
        "deepseek-ai-DeepSeek-V3.2",
        "deepseek-ai-DeepSeek-V4",
        "deepseek-ai-DeepSeek-V4-Flash-0731",
    }
