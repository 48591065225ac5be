"""Grammars against recognisers written for each: regular expressions, and functions where there is recursion."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.models.check import tokenizer_of
from overspill.text.constrain import Deferred, Grammar, Grammars
from overspill.text.tokenizer import Tokenizer
from tests.helpers.plain import DATA
from tests.helpers.text_vocab import shared


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tiny BPE vocabulary; it has all 256 bytes."""
    return tokenizer_of(open_gguf(DATA / "models" / "qwen3moe.gguf"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    return {p[0]: i for i in range(tokenizer.n_vocab) if len(p := tokenizer.piece(i)) == 1}


def accepts(grammar: Grammar, tokenizer: Tokenizer, text: str) -> bool:
    """Token by token, a byte each, then an end token."""
    matching, ids = grammar.start(), byte_ids(tokenizer)
    for byte in text.encode():
        if not matching.allows(ids[byte]):
            return False
        matching.accept(ids[byte])
    return all(matching.allows(i) for i in tokenizer.eos_ids)


def nested(text: str) -> bool:
    """Balanced parentheses around lower-case letters before a z."""
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return re.fullmatch("[az]+z", text) is not None


CASES: list[tuple[str, str, str | Callable[[str], bool]]] = [
    ('root ::= word "z"\nword ::= [a-z]+', "az(", "[a-z]+z"),
    ('root ::= "(" root ")" | [a-z]+ "z"', "az()", nested),
    ('root ::= "if" "!" | [a-z]+ "?"', "if!?", r"if!|[a-z]+\?"),
    ("root ::= [^ab] . [a-] ", "abc-\n", r"(?s:[^ab].[a-])"),
    ('root ::= "a"{2} "b"{1,} "c"{0,2} "a"{0}', "abc", "aab+c{0,2}"),
    ('root ::= ("a" |\n "b")* # a remark\n  \nother ::= root', "ab", "[ab]*"),
    ('root ::= "" | "a" x?\nx ::= [b\\]]', "ab]", r"a[b\]]?|"),
    ('root ::= "\\x41" [\\u00e9\\u03b1-\\u03b3] "\\n"', "Aéβ\n", "A[éα-γ]\n"),
    ('root ::= a-b\na-b ::= "a" b_c | "b"\nb_c ::= a-b', "ab", "a*b"),
    ('root ::= root "a" | "b"', "ab", "ba*"),
]


@pytest.mark.parametrize(("gbnf", "alphabet", "want"), CASES, ids=[case[0][:20] for case in CASES])
def test_the_language_is_exactly_that_of_the_grammar(
    grammars: Grammars, tokenizer: Tokenizer, gbnf: str, alphabet: str, want: str | Callable[[str], bool]
) -> None:
    """All texts of up to 5 characters of an alphabet."""
    is_in = want if callable(want) else lambda text: re.fullmatch(want, text) is not None
    grammar = grammars.gbnf(gbnf)
    texts = ["".join(t) for n in range(6) for t in itertools.product(alphabet, repeat=n)]
    wrong = [text for text in texts if accepts(grammar, tokenizer, text) != is_in(text)]
    assert not wrong
    assert any(is_in(text) for text in texts)


@pytest.mark.parametrize(
    ("gbnf", "words"),
    [
        ("", "no rule 'root'"),
        ('other ::= "a"', "no rule 'root'"),
        ("root ::= nosuch", "line 1: rule 'nosuch'"),
        ('root ::= "a', "line 1"),
        ('root ::= "a\nb"', "line 1"),
        ("root = a", "'::=' expected"),
        ('root ::= ("a"', "')' expected"),
        ('root ::= "a")', "end of the line"),
        ("root ::= [b-a]", "goes up"),
        ("root ::= [a", "line 1"),
        ('root ::= "\\q"', "escape"),
        ('root ::= "\\ud800"', "no such character"),
        ('root ::= "a"{3,2}', "counts up"),
        ('root ::= "a"{99999}', "at most 2000"),
        ('root ::= "a"{x}', "repetition"),
        ("root ::= <think>", "angle brackets"),
        ("root ::= *", "name of a rule"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "deeper"),
        ('\nroot ::= "a" |\n  !', "line 3"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(grammars: Grammars, gbnf: str, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)) as caught:
        grammars.gbnf(gbnf)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nosuch"},
        {"$ref": "#/a"},
        {"$ref": "http://example.com/x"},
        {"not": {}},
        {"anyOf": []},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "("},
        {"properties": 5},
        "{",
        "[1]",
        "5",
    ],
)
def test_what_is_no_schema_is_refused_in_one_line(grammars: Grammars, schema: object) -> None:
    with pytest.raises(UserError, match="json_schema") as caught:
        grammars.json_schema(schema)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def random_answer(grammar: Grammar, tokenizer: Tokenizer, seed: int, n_most: int = 400) -> str | None:
    """What a model of random opinions writes; None if it comes to no end."""
    rng, matching, text = np.random.default_rng(seed), grammar.start(), b""
    for _ in range(n_most):
        allowed = matching.allowed(tokenizer.n_vocab + 7)
        assert not allowed[tokenizer.n_vocab :].any()
        ends = [i for i in tokenizer.eos_ids if allowed[i]]
        if ends and rng.random() < 0.5:
            return text.decode()
        token_id = int(rng.choice([i for i in np.flatnonzero(allowed) if i not in tokenizer.eos_ids] or ends))
        assert matching.allows(token_id)
        if token_id in tokenizer.eos_ids:
            return text.decode()
        matching.accept(token_id)
        text += tokenizer.piece(token_id)
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "n": {"type": "integer", "minimum": 3, "maximum": 17},
        "kind": {"enum": ["a", "b", None]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "n", "kind", "list"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(20))
def test_answers_follow_their_schema(grammars: Grammars, tokenizer: Tokenizer, seed: int) -> None:
    text = random_answer(grammars.json_schema(SCHEMA), tokenizer, seed)
    assert text is not None
    value = json.loads(text)
    assert value.keys() == {"name", "n", "kind", "list"}
    assert len(value["name"]) <= 8
    assert type(value["n"]) is int
    assert 3 <= value["n"] <= 17
    assert value["kind"] in ("a", "b", None)
    assert len(value["list"]) <= 3
    assert all(type(item) is bool for item in value["list"])


def test_an_empty_schema_is_any_object(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for schema in ({}, "{}"):
        grammar = grammars.json_schema(schema)
        assert accepts(grammar, tokenizer, '{"a": [1, {"b": null}]}')
        assert not accepts(grammar, tokenizer, "[1]")


def test_masks_and_single_tokens_agree(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Whatever a mask allows is allowed alone; what comes after may be forced, so a mask may hold less."""
    matching = grammars.gbnf('root ::= [a-m]+ ("no" | "yes") [^a]*').start()
    for byte in b"cab":
        allowed = matching.allowed(tokenizer.n_vocab)
        alone = np.array([matching.allows(i) for i in range(tokenizer.n_vocab)])
        assert np.array_equal(allowed, alone)
        matching.accept(byte_ids(tokenizer)[byte])


def test_answers_do_not_share_their_state(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar, ids = grammars.gbnf('root ::= "ab"'), byte_ids(tokenizer)
    first, second = grammar.start(), grammar.start()
    first.accept(ids[ord("a")])
    assert first.allows(ids[ord("b")])
    assert not second.allows(ids[ord("b")])


def test_control_tokens_are_no_part_of_an_answer(grammars: Grammars, tokenizer: Tokenizer) -> None:
    allowed = grammars.gbnf("root ::= . .*").start().allowed(tokenizer.n_vocab)
    assert not any(allowed[i] for i in range(tokenizer.n_vocab) if not tokenizer.piece(i))


@pytest.mark.parametrize("name", ["ggml-vocab-llama-spm.gguf", "ggml-vocab-qwen2.gguf"])
def test_vocabularies_of_real_models(name: str) -> None:
    """One whose tokenizer adds a space to a text, and one of 151,936 tokens."""
    tokenizer = tokenizer_of(open_gguf(shared(f"vocab/{name}")))
    text = random_answer(Grammars(tokenizer).json_schema(SCHEMA), tokenizer, 1)
    assert text is not None
    assert json.loads(text).keys() == {"name", "n", "kind", "list"}


def test_a_constraint_after_thoughts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar, ids = grammars.gbnf('root ::= "a"'), byte_ids(tokenizer)
    deferred = Deferred(grammar.start(), tokenizer, lambda text: "</t>" in text)
    for byte in b"what? </t":
        assert deferred.allows(ids[byte])
        assert deferred.allowed(tokenizer.n_vocab)[ids[byte]]
        assert not any(deferred.allows(i) for i in tokenizer.eos_ids)
        deferred.accept(ids[byte])
    deferred.accept(ids[ord(">")])
    assert not deferred.allows(ids[ord("b")])
    for byte in b"\n\na":
        assert deferred.allows(ids[byte])
        deferred.accept(ids[byte])
    assert not deferred.allows(ids[ord("\n")])
    assert all(deferred.allows(i) for i in tokenizer.eos_ids)
