"""Damaged vocabularies: errors that name the key, and warnings."""

from __future__ import annotations

import logging

import pytest

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.text import Tokenizer
from tests.helpers.gguf_files import Document, numbers, string, strings, u32
from tests.helpers.text_vocab import (
    T,
    shared,
    spm_document,
    tiny,
    tiny_tokenizer,
    with_flags,
    with_ids,
)

SCORES = {"a": -1.0, "b": -2.0}


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
