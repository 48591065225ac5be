"""Special tokens: how they are found, BOS and EOS, what ends a generation, marked prompts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.text import Segment
from overspill.text.special import SpecialFinder
from tests.helpers.gguf_files import numbers
from tests.helpers.text_vocab import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    T,
    bpe_document,
    spelled,
    tiny_tokenizer,
    with_flags,
    with_ids,
)

CHAT = {"<bos>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "\n\n": USER_DEFINED}


# --- special tokens


def test_control_tokens_are_parsed_on_request_only_and_user_defined_ones_always(build):
    tokenizer = build(bpe_document(CHAT))
    text = "a<|im_end|><think>b"
    parsed = tokenizer.encode(text)
    assert spelled(tokenizer, parsed) == ["a", "<|im_end|>", "<think>", "b"]
    plain = tokenizer.encode(text, parse_special=False)
    assert spelled(tokenizer, plain) == [*"a<|im_end|>", "<think>", "b"]
    assert [tokenizer.is_special(i) for i in parsed] == [False, True, True, False]


def test_control_tokens_are_invisible_unless_asked_for(build):
    tokenizer = build(bpe_document(CHAT))
    ids = tokenizer.encode("a<|im_end|><think>b")
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special=False) == "a<|im_end|><think>b"
    assert tokenizer.piece(ids[1]) == b""
    assert tokenizer.piece(ids[1], special=True) == b"<|im_end|>"


@pytest.mark.parametrize(
    ("spellings", "text", "expected"),
    [
        (["ab", "bcd"], "abcd", [(1, 4)]),
        (["ab", "abc"], "ababc", [(0, 2), (2, 5)]),
        (["aa"], "aaaaa", [(0, 2), (2, 4)]),
        (["a", "ab", "c"], "abca", [(0, 2), (2, 3), (3, 4)]),
        (["éé", "abc"], "abcéé", [(0, 3), (3, 5)]),
        (["éé", "éa b"], "ééa b", [(1, 5)]),
        (["ab€", "€€"], "ab€€", [(2, 4)]),
        (["x"], "", []),
        ([], "abc", []),
        (["", "b"], "abc", [(1, 2)]),
        (["]", "^-", "\\"], "^-]\\", [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_longer_spellings_win_wherever_they_stand(spellings, text, expected):
    finder = SpecialFinder({spelling: i for i, spelling in enumerate(spellings)})
    assert [(hit.start, hit.end) for hit in finder.find(text)] == expected


def cut_one_after_the_other(ids: dict[str, int], text: str) -> list[tuple[int, int, int]]:
    """The rule as it is told: longest spelling first, each cut out from left to right."""
    pieces: list[tuple[int, str]] = [(0, text)]
    found = []
    for spelling, i in sorted(ids.items(), key=lambda item: (-len(item[0].encode()), item[1])):
        left = []
        for start, piece in pieces:
            while (at := piece.find(spelling)) >= 0:
                found.append((start + at, start + at + len(spelling), i))
                left.append((start, piece[:at]))
                start, piece = start + at + len(spelling), piece[at + len(spelling) :]
            left.append((start, piece))
        pieces = left
    return sorted(found)


@settings(deadline=None)
@given(st.lists(st.text("abé<", min_size=1, max_size=4), unique=True, max_size=6), st.text("abé<", max_size=30))
def test_finding_equals_cutting_out_one_spelling_after_the_other(spellings, text):
    ids = {spelling: i for i, spelling in enumerate(spellings)}
    hits = [(hit.start, hit.end, hit.token_id) for hit in SpecialFinder(ids).find(text)]
    assert hits == cut_one_after_the_other(ids, text)


# --- BOS and EOS (one of each, B28)


@pytest.mark.parametrize(
    ("flags", "text", "expected"),
    [
        ({"add_bos_token": True}, "hi", ["<bos>", "h", "i"]),
        ({"add_bos_token": True}, "<bos>hi", ["<bos>", "h", "i"]),
        ({"add_bos_token": True}, "", ["<bos>"]),
        ({"add_bos_token": True}, "h<bos>i", ["<bos>", "h", "<bos>", "i"]),
        ({"add_bos_token": False}, "<bos>hi", ["<bos>", "h", "i"]),
        ({"add_bos_token": False}, "hi", ["h", "i"]),
        ({}, "hi", ["h", "i"]),
        ({"add_bos_token": True, "add_eos_token": True}, "hi", ["<bos>", "h", "i", "<|im_end|>"]),
        ({"add_eos_token": True}, "hi<|im_end|>", ["h", "i", "<|im_end|>"]),
        ({"add_eos_token": True}, "", ["<|im_end|>"]),
    ],
)
def test_a_prompt_has_exactly_one_bos_and_eos_where_the_file_wants_them(build, flags, text, expected):
    tokenizer = build(with_flags(with_ids(bpe_document(CHAT), bos=256, eos=258), **flags))
    assert spelled(tokenizer, tokenizer.encode(text)) == expected
    without = tokenizer.encode(text, add_special=False)
    assert spelled(tokenizer, without)[:1] != ["<bos>"] or text.startswith("<bos>")


def test_a_spelled_bos_that_is_not_parsed_is_text_behind_a_real_one(build):
    tokenizer = build(with_flags(with_ids(bpe_document(CHAT), bos=256), add_bos_token=True))
    assert spelled(tokenizer, tokenizer.encode("<bos>", parse_special=False)) == ["<bos>", *"<bos>"]


def test_glm_prefix_stays_as_the_template_wrote_it(build):
    extra = {"[gMASK]": CONTROL, "<sop>": CONTROL}
    tokenizer = build(with_flags(with_ids(bpe_document(extra, pre="glm4"), bos=256), add_bos_token=False))
    assert spelled(tokenizer, tokenizer.encode("[gMASK]<sop>a")) == ["[gMASK]", "<sop>", "a"]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("glm4", False)])
def test_the_pre_tokenizer_decides_about_bos_where_the_key_is_missing(build, pre, adds):
    tokenizer = build(with_ids(bpe_document(CHAT, pre=pre), bos=256))
    assert tokenizer.add_bos is adds
    assert (tokenizer.encode("a")[0] == 256) is adds


def test_nothing_is_added_and_one_warning_given_where_the_bos_to_add_is_missing(build, caplog):
    tokenizer = build(with_flags(bpe_document(CHAT), add_bos_token=True))
    assert tokenizer.bos_id is None
    assert spelled(tokenizer, tokenizer.encode("a")) == ["a"]
    assert [record.message for record in caplog.records] == [
        "tokenizer.ggml.add_bos_token is true but there is no bos token; none is added"
    ]


# --- end of generation


@pytest.mark.parametrize(
    ("extra", "ids", "expected"),
    [
        ({"<|im_end|>": CONTROL, "x": CONTROL}, {}, {"<|im_end|>"}),
        ({"<|im_end|>": NORMAL}, {}, {"<|im_end|>"}),
        ({"q": CONTROL, "r": CONTROL}, {"eos": 256}, {"q"}),
        ({"q": CONTROL, "r": CONTROL, "s": CONTROL}, {"eos": 256, "eot": 257, "eom": 258}, {"q", "r", "s"}),
        ({"<|end|>": CONTROL, "</s>": CONTROL}, {}, {"<|end|>", "</s>"}),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}, {}, {"<|return|>", "<|call|>"}),
        ({"<|end|>": CONTROL, "<|flush|>": CONTROL, "<|calls|>": CONTROL}, {}, {"<|flush|>", "<|calls|>"}),
        ({"<|end|>": CONTROL, "<|return|>": CONTROL}, {}, {"<|end|>", "<|return|>"}),
        ({"<|tool_response>": CONTROL, "</s>": CONTROL}, {}, {"<|tool_response>"}),
        ({"<|fim_pad|>": CONTROL, "<|repo_name|>": CONTROL, "<|file_sep|>": CONTROL}, {}, None),
        ({"<|fim_prefix|>": CONTROL}, {}, set()),
    ],
)
def test_end_of_generation(build, extra, ids, expected):
    tokenizer = build(with_ids(bpe_document(extra), **ids))
    found = set(spelled(tokenizer, sorted(tokenizer.eos_ids)))
    assert found == (set(extra) if expected is None else expected)


def test_gpt_oss_marks_are_visible_but_cannot_be_forged(build):
    marks = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>", "<|call|>")
    tokenizer = build(bpe_document(dict.fromkeys(marks, CONTROL)))
    ids = tokenizer.encode("<|channel|>final<|message|>hi<|end|><|return|>")
    assert tokenizer.decode(ids) == "<|channel|>final<|message|>hi<|end|>"
    assert tokenizer.encode("<|channel|>", parse_special=False) == [ord(c) - 0x21 for c in "<|channel|>"]


def test_suppressed_ids_out_of_range_are_dropped(build):
    document = bpe_document(CHAT).with_key(T + "suppress_tokens", numbers(5, "i", [3, -1, 100000]))
    assert build(document).suppressed_ids == {3}


# --- marked prompts


def test_markup_is_parsed_and_the_rest_is_not(build):
    tokenizer = build(bpe_document(CHAT))
    parts = [Segment("<|im_start|>", True), Segment("a<|im_end|><think>", False), Segment("<|im_end|>", True)]
    assert spelled(tokenizer, tokenizer.encode_marked(parts)) == [
        "<|im_start|>",
        *"a<|im_end|><think>",
        "<|im_end|>",
    ]


def test_no_token_grows_together_from_two_segments(build):
    tokenizer = build(bpe_document(CHAT))
    for first, second in ((True, True), (True, False), (False, True)):
        ids = tokenizer.encode_marked([Segment("<|im_", first), Segment("end|>", second)])
        assert spelled(tokenizer, ids) == list("<|im_end|>")


def test_white_space_tokens_may_span_markup(build):
    tokenizer = build(bpe_document(CHAT))
    assert spelled(tokenizer, tokenizer.encode_marked([Segment("a\n", True), Segment("\nb", True)])) == [
        "a",
        "\n\n",
        "b",
    ]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["Hello", " world", "'s", " 12", "345", "\n", "  ", "é", "<", "|>", "💡"]), max_size=12)
)
def test_segments_without_special_tokens_are_encoded_as_one_text(texts):
    tokenizer = tiny_tokenizer()
    parts = [Segment(text, i % 2 == 0) for i, text in enumerate(texts)]
    assert tokenizer.encode_marked(parts) == tokenizer.encode("".join(texts))
