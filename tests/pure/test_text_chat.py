"""Messages to prompts: ChatML, what templates take, what agents send (B29), one BOS (B28)."""

from __future__ import annotations

import copy
import json
from datetime import datetime

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from overspill.errors import UserError
from overspill.text import ChatTemplate, Tokenizer
from overspill.text.messages import Shape, normalise
from tests.helpers.chats import AGENT_CHATS, PARTS, PLAIN, TOOLS, agent, call, result, shared_templates, user
from tests.helpers.gguf_files import string
from tests.helpers.text_vocab import (
    CONTROL,
    bpe_document,
    keys_of,
    spm_document,
    tiny,
    with_flags,
    with_ids,
)

ANY = Shape(takes_text=True, takes_parts=False, takes_system=True, takes_developer=False, wants_objects=True)
NOON = datetime(2025, 7, 26, 12, 0)

# Templates in the manners of the families, written for these tests.
OBJECTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</call>"
    "{% endfor %};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
JSON_TEXT = OBJECTS.replace(
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}", "{{ c.function.arguments }}"
)
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
PARTS_ONLY = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}"
    "{% if p is string %}{{ raise_exception('no text') if m.role == 'user' else p }}{% else %}({{ p.text }})"
    "{% endif %}{% endfor %};{% endfor %}"
)
PARTS_TOO = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"
)


# --- the default template


def test_chatml():
    assert ChatTemplate().render(PLAIN) == (
        "<|im_start|>system\nYou are S.<|im_end|>\n<|im_start|>user\nFirst<|im_end|>\n"
        "<|im_start|>assistant\nAnswer<|im_end|>\n<|im_start|>user\nSecond<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate().render([user()], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_a_file_without_template_gets_chatml(tmp_path):
    template = ChatTemplate.from_keys(keys_of(tiny(), tmp_path))
    assert template.render([user()]) == ChatTemplate().render([user()])


def test_from_keys_reads_the_template_and_the_texts_of_bos_and_eos(tmp_path):
    document = with_ids(bpe_document({"<bos>": CONTROL, "<eos>": CONTROL}), bos=256, eos=257)
    document = document.with_key("tokenizer.chat_template", string("{{ bos_token }}|{{ eos_token }}"))
    assert ChatTemplate.from_keys(keys_of(document, tmp_path)).render([user()]) == "<bos>|<eos>"
    spm = spm_document({"a": 0.0}).with_key("tokenizer.chat_template", string("{{ bos_token }}|{{ eos_token }}"))
    assert ChatTemplate.from_keys(keys_of(spm, tmp_path)).render([user()]) == "<s>|</s>"
    out_of_range = with_ids(document, bos=9999)
    assert ChatTemplate.from_keys(keys_of(out_of_range, tmp_path)).render([user()]) == "|<eos>"


def test_the_template_for_tools_is_used_where_tools_are_given(tmp_path):
    document = tiny().with_key("tokenizer.chat_template", string("plain"))
    document = document.with_key("tokenizer.chat_template.tool_use", string("tools {{ tools | length }}"))
    template = ChatTemplate.from_keys(keys_of(document, tmp_path))
    assert template.render([user()]) == "plain"
    assert template.render([user()], tools=TOOLS) == "tools 1"
    assert template.render([user()], tools=[]) == "plain"
    assert template.source == "plain"


def test_a_template_that_does_not_compile_is_a_user_error(tmp_path):
    document = tiny().with_key("tokenizer.chat_template", string("a\n{% for %}"))
    with pytest.raises(UserError, match=r"^tokenizer.chat_template does not compile: line 2: "):
        ChatTemplate.from_keys(keys_of(document, tmp_path))


# --- variables


def test_variables():
    source = "{{ tools }} {{ add_generation_prompt }} {{ enable_thinking }} {{ date_string }} {{ datetime }}"
    template = ChatTemplate(source + " {{ strftime_now('%Y') }}", now=lambda: NOON)
    assert template.render([user()]) == "None True  26 Jul 2025 Jul 26 2025 2025"
    kwargs = {"enable_thinking": False, "date_string": "then"}
    rendered = template.render([user()], add_generation_prompt=False, template_kwargs=kwargs)
    assert rendered == "None False False then Jul 26 2025 2025"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_kwargs_cannot_replace_what_has_a_place_of_its_own(name):
    with pytest.raises(UserError, match=f"chat_template_kwargs has '{name}'"):
        ChatTemplate().render([user()], template_kwargs={name: []})


def test_the_callers_messages_and_tools_are_never_changed():
    source = "{% set _ = messages.append(1) %}{% set _ = messages[0].list.pop() %}{% set _ = tools.append(1) %}done"
    messages, tools = [user() | {"list": [1]}], copy.deepcopy(TOOLS)
    assert ChatTemplate(source).render(messages, tools=tools) == "done"
    assert (messages, tools) == ([user() | {"list": [1]}], TOOLS)


# --- what templates take


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (OBJECTS, ANY),
        (JSON_TEXT, Shape(**vars(ANY) | {"wants_objects": False})),
        (ALTERNATING, Shape(**vars(ANY) | {"takes_system": False, "wants_objects": False})),
        (PARTS_ONLY, Shape(**vars(ANY) | {"takes_text": False, "takes_parts": True, "wants_objects": False})),
        (PARTS_TOO, Shape(**vars(ANY) | {"takes_parts": True, "wants_objects": False})),
        ("developer" + OBJECTS, Shape(**vars(ANY) | {"takes_developer": True})),
    ],
)
def test_the_shape_of_a_template_is_found_by_trying(source, expected):
    assert ChatTemplate(source)._plain.shape == expected


@pytest.mark.parametrize(
    ("source", "messages", "prompt"),
    [
        (PARTS_TOO, [user(PARTS)], "user:onetwo;"),
        (PARTS_ONLY, [PLAIN[0], user("a"), user(PARTS)], "system:(You are S.);user:(a);user:(one)(two);"),
        (OBJECTS, [user(PARTS)], "[user]one\ntwo;[assistant]"),
        (OBJECTS, [{"role": "system", "content": PARTS}, user()], "[system]one\ntwo;[user]Hi;[assistant]"),
        (OBJECTS, [{"role": "developer", "content": "d"}, user()], "[system]d;[user]Hi;[assistant]"),
        ("developer" + OBJECTS, [{"role": "developer", "content": "d"}], "developer[developer]d;[assistant]"),
        (ALTERNATING, PLAIN, "<user>You are S.\nFirst<assistant>Answer<user>Second"),
        (ALTERNATING, [*PLAIN[1:3], PLAIN[0]], "<user>First<assistant>Answer<user>You are S."),
        (ALTERNATING, [PLAIN[0], *PLAIN], "<user>You are S.\nYou are S.\nFirst<assistant>Answer<user>Second"),
        (OBJECTS, [user(), {"role": "assistant", "content": None}], "[user]Hi;[assistant];[assistant]"),
        (OBJECTS, [call('{"city": "Paris"}')], "[assistant]<call>get_weather city=Paris</call>;[assistant]"),
        (OBJECTS, [call({"city": "Paris"})], "[assistant]<call>get_weather city=Paris</call>;[assistant]"),
        (OBJECTS, [call(None)], "[assistant]<call>get_weather</call>;[assistant]"),
        (OBJECTS, [call("")], "[assistant]<call>get_weather</call>;[assistant]"),
        (OBJECTS, [call("null")], "[assistant]<call>get_weather</call>;[assistant]"),
        (JSON_TEXT, [call({"é": 1})], '[assistant]<call>get_weather{"é": 1}</call>;[assistant]'),
        (JSON_TEXT, [call('{"a":1}')], '[assistant]<call>get_weather{"a":1}</call>;[assistant]'),
        (JSON_TEXT, [call('{"a')], '[assistant]<call>get_weather{"a</call>;[assistant]'),
        (JSON_TEXT, [call(None)], "[assistant]<call>get_weather{}</call>;[assistant]"),
        (JSON_TEXT, [call(" ")], "[assistant]<call>get_weather{}</call>;[assistant]"),
        (OBJECTS, [user() | {"tool_calls": []}], "[user]Hi;[assistant]"),
    ],
)
def test_messages_take_the_form_the_template_wants(source, messages, prompt):
    assert ChatTemplate(source).render(messages) == prompt


def test_arguments_cut_off_are_the_templates_to_refuse():
    with pytest.raises(UserError, match="chat template: 'str object' has no attribute 'items'"):
        ChatTemplate(OBJECTS).render(agent(call('{"city": "Par')))


def test_calls_without_the_function_level_are_understood():
    flat = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": 1}'}]}
    assert normalise([flat], ANY)[0]["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        (["x"], "messages[0] is no object"),
        ([user(), {"content": "x"}], "messages[1] is no object with a text `role`"),
        ([{"role": 1, "content": "x"}], "messages[0] is no object with a text `role`"),
        ([user(1)], "messages[0].content is neither text nor a list of parts"),
        ([user({"type": "text"})], "messages[0].content is neither text nor a list of parts"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0] is a part of type 'image_url'"),
        ([user([{"type": "text", "text": 1}])], "messages[0].content[0] is a part of type 'text'"),
        ([user(["x"])], "messages[0].content[0] is a part of type 'str'"),
        ([user() | {"tool_calls": "x"}], "messages[0].tool_calls is no list of objects"),
        ([user() | {"tool_calls": [1]}], "messages[0].tool_calls is no list of objects"),
        ([user() | {"extra": {1, 2}}], "messages[0].extra is of type set"),
        ([user() | {"extra": [{1: 2}]}], "messages[0].extra[0] is of type dict"),
    ],
)
def test_malformed_messages_are_named(messages, named):
    with pytest.raises(UserError) as caught:
        ChatTemplate().render(messages)
    assert str(caught.value).startswith(named)


def test_malformed_tools_and_kwargs_are_named():
    with pytest.raises(UserError, match="tools is no list of objects"):
        ChatTemplate().render([user()], tools=["x"])
    with pytest.raises(UserError, match=r"chat_template_kwargs\.a is of type object"):
        ChatTemplate().render([user()], template_kwargs={"a": object()})


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "x"]), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
            optional={"content": JSON_LIKE, "tool_calls": JSON_LIKE, "reasoning_content": JSON_LIKE, "name": JSON_LIKE},
        ),
        max_size=4,
    ),
    st.sampled_from([OBJECTS, JSON_TEXT, ALTERNATING, PARTS_ONLY, PARTS_TOO]),
)
def test_any_json_gives_a_prompt_or_a_user_error(messages, source):
    try:
        assert isinstance(template_of(source).render(messages), str)
    except UserError as error:
        assert len(str(error)) < 700  # noqa: PT017 - either outcome is right


def template_of(source: str, cache: dict[str, ChatTemplate] = {}) -> ChatTemplate:  # noqa: B006
    return cache.setdefault(source, ChatTemplate(source))


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [m] if c.id is defined or m.role == 'tool' %}"
    "{% set id = c.id if c.id is defined else m.tool_call_id %}{% if id | length != 9 %}{{ raise_exception('nine!') }}"
    "{% endif %}<{{ id }}>{% if c.function %}{{ c.function.arguments.key }}{% endif %}{% endfor %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{% if m.content and m.thinking %}{{ raise_exception('one of the two!') }}{% endif %}"
    "[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
)


def test_ids_of_calls_get_the_length_that_a_template_wants():
    def rendered(call_id: str) -> str:
        asking = call({"key": "v"})
        asking["tool_calls"][0]["id"] = call_id
        return ChatTemplate(NINE).render([user(), asking, result() | {"tool_call_id": call_id}])

    assert rendered("abc123def") == "<abc123def>v<abc123def>"
    for long in ("call_1", "call_2", "", "né"):
        before, value, after = rendered(long).replace(">", "<").split("<")[1:4]
        assert (before, value, len(before)) == (after, "v", 9)
    assert rendered("call_1") != rendered("call_2")


def test_thoughts_are_given_under_the_name_that_a_template_reads():
    thought = {"role": "assistant", "content": "", "reasoning_content": "hm"}
    template = ChatTemplate(THINKING)
    assert template.render([thought]) == "[hm|]"
    assert template.render([thought | {"content": "said", "tool_calls": call({})["tool_calls"]}]) == "[hm\nsaid|]"
    assert ChatTemplate("{{ messages[0].reasoning_content }}").render([thought]) == "hm"


def test_arguments_that_a_template_fails_at_are_named():
    with pytest.raises(UserError, match=r"messages\[1\].tool_calls\[0\].function.arguments is no JSON object"):
        ChatTemplate(OBJECTS).render([user(), call('{"city": "Par')])


# --- the templates of real models


def hugging_face(source: str) -> jinja2.Template:
    """The template in Jinja as Hugging Face sets it up, without any metering."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    environment.filters["from_json"] = json.loads

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: NOON.strftime(format)
    return environment.from_string(source)


def test_metering_changes_no_prompt_of_any_real_template():
    templates = shared_templates()
    if not templates:
        pytest.skip("needs the templates of real models, which are not part of the project")
    n_equal = 0
    for name, source in templates.items():
        template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", now=lambda: NOON)
        other = hugging_face(source)
        for messages, tools in ((PLAIN, None), (PLAIN, TOOLS), (agent(call({"city": "Paris"}, content="")), TOOLS)):
            normal = normalise(messages, template._plain.shape)
            variables = template._variables(tools, True, None)
            try:
                expected = other.render(messages=normal, **variables)
            except (jinja2.TemplateError, TypeError):
                continue
            assert template.render(messages, tools=tools) == expected, name
            n_equal += 1
    assert n_equal > 2 * len(templates)


def test_every_real_template_gives_prompts_or_refuses_in_its_own_words():
    templates = shared_templates()
    if not templates:
        pytest.skip("needs the templates of real models, which are not part of the project")
    refusals: dict[str, set[str]] = {}
    for name, source in templates.items():
        template = ChatTemplate(source, bos_text="<s>", eos_text="</s>", now=lambda: NOON)
        for title, messages in AGENT_CHATS.items():
            for tools in (None, TOOLS):
                try:
                    prompt = template.render(messages, tools=tools)
                except UserError as error:
                    assert str(error).startswith("chat template: "), (name, title)  # noqa: PT017
                    if (
                        title in ("arguments cut off", "arguments one brace", "arguments a list")
                        and "Hermes" not in name
                    ):
                        assert "messages[1].tool_calls[0].function.arguments is no" in str(error) or "gemma" in name  # noqa: PT017
                    refusals.setdefault(name, set()).add(title)
                else:
                    assert prompt, (name, title)
    easy_ones = ("content null beside calls", "arguments as object", "calls an empty list", "reasoning")
    for easy in (*easy_ones, "ids as OpenAI makes them", "reasoning beside calls"):
        refusing = [name for name, titles in refusals.items() if easy in titles]
        assert len(refusing) <= 2, (easy, refusing)


# --- exactly one BOS (B28)


def chat_ids(tokenizer: Tokenizer, template: ChatTemplate) -> list[int]:
    whole = tokenizer.encode(template.render([user()]))
    marked = tokenizer.encode_marked(template.render_marked([user()], special_texts=tokenizer.special_texts))
    assert whole == marked
    return whole


def test_a_template_that_prints_bos_and_a_tokenizer_that_adds_it_make_one(tmp_path):
    document = with_ids(bpe_document({"<bos>": CONTROL}), bos=256)
    with_bos = document.with_key("tokenizer.chat_template", string("{{ bos_token }}{{ messages[0].content }}"))
    without = document.with_key("tokenizer.chat_template", string("{{ messages[0].content }}"))
    counts = {}
    for prints, printing in ((True, with_bos), (False, without)):
        for adds in (True, False):
            keys = keys_of(with_flags(printing, add_bos_token=adds), tmp_path)
            counts[prints, adds] = chat_ids(Tokenizer.from_keys(keys), ChatTemplate.from_keys(keys)).count(256)
    assert counts == {(True, True): 1, (True, False): 1, (False, True): 1, (False, False): 0}


def test_a_prefix_of_two_special_tokens_stays_where_no_bos_is_added(tmp_path):
    document = with_ids(bpe_document({"[gMASK]": CONTROL, "<sop>": CONTROL}, pre="glm4"), bos=256)
    source = "[gMASK]<sop>{{ messages[0].content }}"
    keys = keys_of(
        with_flags(document, add_bos_token=False).with_key("tokenizer.chat_template", string(source)), tmp_path
    )
    ids = chat_ids(Tokenizer.from_keys(keys), ChatTemplate.from_keys(keys))
    assert ids[:2] == [256, 257]
    assert len(ids) == 4
