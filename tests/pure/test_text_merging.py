"""Merging bytes and characters into tokens, and decoding: byte-level BPE and SentencePiece."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.gguf import open_gguf
from overspill.text import Tokenizer
from tests.helpers.gguf_files import Document, string, strings
from tests.helpers.text_vocab import (
    BYTE,
    DATA,
    NORMAL,
    SHARED,
    USER_DEFINED,
    T,
    bpe_document,
    keys_of,
    spelled,
    spm_document,
    tiny_tokenizer,
    with_flags,
)

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


def test_missing_bytes_are_told_once_for_each_file(tmp_path, caplog):
    document = Document().with_key("general.architecture", string("llama")).with_key(T + "model", string("gpt2"))
    document = document.with_key(T + "tokens", strings(["a", "b"])).with_key(T + "merges", strings([]))
    files = [keys_of(document.with_key(T + "pre", string("gpt-2")), tmp_path) for _ in range(2)]
    for keys in (files[0], files[1], files[0]):
        Tokenizer.from_keys(keys)
    told = [r.getMessage() for r in caplog.records if "256 bytes" in r.getMessage()]
    assert [message.split(": ")[0] for message in told] == [keys.file for keys in files]


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
