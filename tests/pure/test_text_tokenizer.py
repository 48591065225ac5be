"""Special tokens, BOS and EOS, SentencePiece merges, decoding, damaged vocabularies."""

from __future__ import annotations

import logging
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.text import Segment, Tokenizer
from overspill.text.special import SpecialFinder
from tests.helpers.gguf_files import Document, numbers, string, strings, u32
from tests.helpers.text_vocab import (
    BYTE,
    CONTROL,
    DATA,
    NORMAL,
    SHARED,
    USER_DEFINED,
    T,
    bpe_document,
    keys_of,
    shared,
    spm_document,
    tiny,
    with_flags,
    with_ids,
)

CHAT = {"<bos>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "\n\n": USER_DEFINED}


@pytest.fixture
def build(tmp_path):
    return lambda document: Tokenizer.from_keys(keys_of(document, tmp_path))


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.piece(i, special=True).decode("utf-8", "backslashreplace") for i in ids]


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


@cache
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_keys(open_gguf(DATA / "tiny.gguf").keys)


# --- byte-level BPE


@settings(deadline=None, max_examples=300)
@given(st.text())
def test_decoding_what_was_encoded_gives_the_text(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


def test_lone_surrogates_become_replacement_characters_and_pairs_characters(build):
    tokenizer = build(bpe_document({}))
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "\N{GRINNING FACE}"


def test_merges_apply_by_rank_leftmost_first(build):
    tokenizer = build(bpe_document({}, merges=("b c", "a b", "a a", "aa aa")))
    assert spelled(tokenizer, tokenizer.encode("abc")) == ["a", "bc"]
    assert spelled(tokenizer, tokenizer.encode("abab")) == ["ab", "ab"]
    assert spelled(tokenizer, tokenizer.encode("aaaaa")) == ["aaaa", "a"]


def test_a_merge_listed_twice_keeps_its_first_rank(build):
    tokenizer = build(bpe_document({}, merges=("a b", "b c")).with_key(T + "merges", strings(["a b", "b c", "a b"])))
    assert spelled(tokenizer, tokenizer.encode("abc")) == ["ab", "c"]


def test_ignoring_merges_takes_whole_words_that_are_tokens(build):
    document = bpe_document({"abc": NORMAL}, pre="llama-bpe")
    assert spelled(build(document), build(document).encode("abc")) == ["abc"]
    plain = build(document.with_key(T + "pre", string("qwen2")))
    assert spelled(plain, plain.encode("abc")) == ["a", "b", "c"]


def test_a_vocabulary_without_some_bytes_warns_and_drops_them(build, caplog):
    document = Document().with_key("general.architecture", string("llama")).with_key(T + "model", string("gpt2"))
    document = document.with_key(T + "tokens", strings(["a", "b"])).with_key(T + "merges", strings([]))
    tokenizer = build(document.with_key(T + "pre", string("gpt-2")))
    assert tokenizer.decode(tokenizer.encode("abcab")) == "abab"
    assert "lacks 254 of the 256 bytes" in caplog.text


def test_byte_tokens_and_characters_outside_the_alphabet(build):
    tokenizer = build(bpe_document({"<0xE2>": BYTE, "▁x": NORMAL}))
    assert tokenizer.piece(256) == b"\xe2"
    assert tokenizer.piece(257) == "▁x".encode()


def test_no_spelling_of_a_control_token_gets_through_unparsed():
    paths = [DATA / "tiny.gguf"]
    if SHARED.exists():
        paths += sorted(SHARED.glob("vocab/ggml-vocab-*.gguf"))
    for path in paths:
        tokenizer = Tokenizer.from_keys(open_gguf(path).keys)
        for text in tokenizer.special_texts.control:
            ids = tokenizer.encode(f"{text} x{text}", add_special=False, parse_special=False)
            assert not any(tokenizer.is_special(i) and tokenizer.piece(i) == b"" for i in ids), (path.name, text)


# --- SentencePiece


SCORES = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -5.0, "bc": -4.5, "▁a": -6.0, "abc": -7.0, "▁▁": -8.0}


def merged_step_by_step(text: str, scores: dict[str, float]) -> list[str]:
    """The rule as it is told: join the pair with the best score, the leftmost on ties."""
    symbols = list(text)
    while pairs := [(-scores[a + b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in scores]:  # noqa: B905, RUF007
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    return symbols


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(st.text("abc▁", min_size=2, max_size=4), st.integers(-3, 0).map(float), max_size=12),
    st.text("abc ", max_size=24),
)
def test_spm_merges_by_score(scores, text):
    from overspill.text.spm import ScoreEncoder
    from overspill.text.vocab import Vocab

    texts = [*dict.fromkeys((*"abc▁", *scores))]
    scores = dict.fromkeys("abc▁", -9.0) | scores
    vocab = Vocab(
        texts=texts,
        kinds=[NORMAL] * len(texts),
        ids={text: i for i, text in enumerate(texts)},
        bos_id=None,
        eos_id=None,
        unknown_id=None,
        add_bos=False,
        add_eos=False,
        eog_ids=frozenset(),
        shown_ids=frozenset(),
        suppressed_ids=frozenset(),
    )
    ids = ScoreEncoder(vocab, [scores[t] for t in texts]).encode(text)
    assert [texts[i] for i in ids] == merged_step_by_step(text.replace(" ", "▁"), scores)


def test_spm_adds_a_space_in_front_and_takes_it_off_again(build):
    tokenizer = build(spm_document(SCORES))
    assert spelled(tokenizer, tokenizer.encode("abc")) == ["<s>", " a", "bc"]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in ("abc", " abc", "", "  ")] == ["abc", " abc", "", "  "]
    assert tokenizer.encode("") == [1]


def test_spm_without_the_space(build):
    tokenizer = build(with_flags(spm_document(SCORES), add_space_prefix=False))
    assert spelled(tokenizer, tokenizer.encode("ab c")) == ["<s>", "ab", " ", "c"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_spm_adds_the_space_after_each_special_token(build):
    tokenizer = build(spm_document(SCORES, {"[X]": USER_DEFINED}))
    assert spelled(tokenizer, tokenizer.encode("b[X]b</s>")) == ["<s>", " ", "b", "[X]", " ", "b", "</s>"]


def test_spm_spells_unknown_characters_as_bytes(build):
    tokenizer = build(spm_document(SCORES))
    ids = tokenizer.encode("aé")
    assert ids == [1, *tokenizer.encode("a")[1:], 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(ids) == "aé"
    assert tokenizer.piece(3 + 0xC3) == b"\xc3"


def test_spm_text_never_becomes_a_control_or_byte_token(build):
    scores = SCORES | dict.fromkeys(("<", "s", ">", "<s", "0", "x", "A", "<0", "<0x", "<0xA", "A>"), 0.0)
    tokenizer = build(spm_document(scores))
    for text in ("<s>", "<0xAA>", "</s>"):
        ids = tokenizer.encode(text, add_special=False, parse_special=False)
        assert not any(tokenizer.is_special(i) for i in ids)
        assert tokenizer.decode(ids) == text


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_spm_decoding_what_was_encoded_gives_the_text(text):
    tokenizer = spm_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text.replace("▁", " ")


@cache
def spm_tokenizer() -> Tokenizer:
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.from_keys(keys_of(spm_document(SCORES), Path(folder)))


def test_equal_scores_of_the_real_gemma_kind_merge_leftmost_first(build):
    tokenizer = build(with_flags(spm_document({"a": 0.0, "aa": 0.0}), add_space_prefix=False))
    assert spelled(tokenizer, tokenizer.encode("aaaaa", add_special=False)) == ["aa", "aa", "a"]


# --- damaged files


def without(key: str) -> Document:
    return tiny().without_keys(lambda name: name == T + key)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (lambda: without("model"), "tokenizer.ggml.model"),
        (lambda: without("tokens"), "tokenizer.ggml.tokens"),
        (lambda: without("merges"), "tokenizer.ggml.merges"),
        (lambda: tiny().with_key(T + "model", string("quantum")), "'quantum'"),
        (lambda: tiny().with_key(T + "pre", string("never-heard-of-it")), "'never-heard-of-it'"),
        (lambda: tiny().with_key(T + "tokens", numbers(4, "I", [1, 2])), "tokenizer.ggml.tokens"),
        (lambda: tiny().with_key(T + "tokens", strings([])), "tokenizer.ggml.tokens is empty"),
        (lambda: tiny().with_key(T + "tokens", strings(["a", "b"])), "(vocabulary size 2)"),
        (lambda: tiny().with_key(T + "token_type", numbers(5, "i", [1])), "tokenizer.ggml.token_type has 1 values"),
        (lambda: tiny().with_key(T + "token_type", string("x")), "tokenizer.ggml.token_type"),
        (lambda: tiny().with_key(T + "merges", strings(["ab"])), "tokenizer.ggml.merges holds 'ab'"),
        (lambda: tiny().with_key(T + "merges", strings(["a zzzz"])), "needs the token 'zzzz'"),
        (lambda: tiny().with_key(T + "bos_token_id", string("1")), "tokenizer.ggml.bos_token_id"),
        (lambda: tiny().with_key(T + "add_bos_token", u32(1)), "tokenizer.ggml.add_bos_token"),
        (lambda: spm_document(SCORES).with_key(T + "scores", numbers(6, "f", [0.0])), "tokenizer.ggml.scores has 1"),
        (lambda: spm_document(SCORES).with_key(T + "scores", string("x")), "tokenizer.ggml.scores"),
    ],
)
def test_damaged_vocabularies_are_user_errors_that_name_the_key(build, document, named):
    with pytest.raises(UserError) as caught:
        build(document())
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ids_out_of_range_are_ignored_with_a_warning(build, caplog):
    tokenizer = build(with_ids(tiny(), eos=100000, bos=2404))
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.n_vocab) == (None, None, 2404)
    assert tokenizer.eos_ids == {2400, 2402}
    assert "tokenizer.ggml.eos_token_id is 100000 but there are 2404 tokens; the key is ignored" in caplog.messages


def test_a_missing_pre_tokenizer_name_warns_and_cuts_by_the_default(build, caplog):
    with caplog.at_level(logging.WARNING):
        tokenizer = build(without("pre"))
    assert "tokenizer.ggml.pre is missing" in caplog.text
    default = build(tiny().with_key(T + "pre", string("default")))
    assert tokenizer.encode("a,b 12345") == default.encode("a,b 12345")


def test_texts_twice_in_the_vocabulary_use_the_lower_id(build, caplog):
    document = spm_document({"a": -1.0}).with_key(T + "tokens", strings(["<unk>", "<s>", "</s>", "a", "a"]))
    document = document.with_key(T + "token_type", numbers(5, "i", [2, 3, 3, 1, 1]))
    tokenizer = build(with_flags(document.with_key(T + "scores", numbers(6, "f", [0.0] * 5)), add_space_prefix=False))
    assert tokenizer.encode("a") == [1, 3]
    assert "holds 1 texts twice" in caplog.text


@pytest.mark.parametrize("i", [-1, 2404, 1 << 40])
def test_an_id_out_of_range_cannot_be_decoded(i):
    with pytest.raises(UserError, match="out of range: the vocabulary has 2404 tokens"):
        tiny_tokenizer().decode([i])


def test_malformed_files_of_the_fixtures():
    folder = shared("files")
    expected = {
        "missing-tokenizer": "tokenizer",
        "unknown-tokenizer-model": "quantum",
        "unknown-tokenizer-pre": "never-heard-of-it",
        "tokens-wrong-type": "tokenizer.ggml.tokens",
        "tokens-too-few": "vocabulary size",
    }
    for name, word in expected.items():
        with pytest.raises(UserError, match=word):
            Tokenizer.from_keys(open_gguf(folder / f"{name}.gguf").keys)
