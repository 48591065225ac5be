"""Answers that must follow a grammar or a JSON schema, by way of llguidance.

`Grammars` belongs to a vocabulary and compiles; a `Grammar` is compiled once and starts a `Matching` for each answer;
a `Matching` follows one answer token by token, a `Deferred` one from where its thoughts end. Control tokens are never
a part of such an answer, except that it may end where the grammar is complete.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.text.gbnf import lark_of
from overspill.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# llama.cpp's whitespace: models that may write more of it write it without end.
JSON_OPTIONS: Any = {"whitespace_pattern": r" |\n{1,2}[ \t]{0,20}", "coerce_one_of": True}

_MOST_BLANK = 2
_N_SEEN = 256


class Grammars:
    """Compiles grammars for a vocabulary. The library is loaded with the first one; may be used from any thread.

    shown_ids: control tokens that count as the text they spell.
    """

    def __init__(self, tokenizer: Tokenizer, shown_ids: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def gbnf(self, text: str) -> Grammar:
        """A grammar in llama.cpp's notation. UserError in one line if it is none."""
        return self.lark(lark_of(text))

    def lark(self, text: str) -> Grammar:
        """A grammar in llguidance's own notation."""
        return self._compiled("grammar", lambda: _matcher_class().grammar_from_lark(text))

    def json_schema(self, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema describes; of an empty schema, any object. UserError in one line for what is no schema,
        or asks for what cannot be held to while a text grows."""
        value = _parsed(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise UserError(f"json_schema: an object expected, {json.dumps(value)[:40]} found")
        text = json.dumps(dict(value) or {"type": "object"})
        make = _matcher_class().grammar_from_json_schema
        return self._compiled("json_schema", lambda: make(text, overrides=JSON_OPTIONS))

    def _compiled(self, name: str, make: Callable[[], str]) -> Grammar:
        table = self._vocabulary()
        try:
            matcher = _matcher_class()(table, make(), log_level=0)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: {_one_line(str(error))}") from None
        if matcher.is_error():
            raise UserError(f"{name}: {_one_line(matcher.get_error())}")
        return Grammar(matcher, self._tokenizer)

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._table is None:
                self._table = _vocabulary(self._tokenizer, self._shown_ids)
            return self._table


class Grammar:
    """A compiled grammar. name: what messages call it."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer) -> None:
        self._matcher = matcher
        self._end_ids = tokenizer.eos_ids

    def start(self) -> Matching:
        """A constraint for one answer."""
        return Matching(self._matcher.deep_copy(), self._end_ids)


class Matching:
    """How far one answer has come in its grammar; an engine's `Constraint`."""

    def __init__(self, matcher: LLMatcher, end_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_ids = end_ids

    def allows(self, token_id: int) -> bool:
        if token_id in self._end_ids:
            return bool(self._matcher.is_accepting())
        return not self._matcher.is_stopped() and self._matcher.validate_tokens([token_id]) == 1

    def allowed(self, n_vocab: int) -> NDArray[np.bool_]:
        allowed = np.zeros(n_vocab, dtype=np.bool_)
        if not self._matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            n = min(n_vocab, len(bits))
            allowed[:n] = bits[:n]
            self._check()
        allowed[list(self._end_ids)] = self._matcher.is_accepting()
        return allowed

    def accept(self, token_id: int) -> None:
        if token_id not in self._end_ids:
            self._matcher.consume_token(token_id)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise UserError(f"grammar: it cannot be followed any further: {_one_line(self._matcher.get_error())}")


class Deferred:
    """A constraint that holds from a point of the answer on; until then everything but its end is allowed.

    is_reached: whether a text, of which it sees the end with control tokens shown, has come to that point. Blank tokens
    between that point and what the constraint asks for are let through, a few of them: models put line breaks there.
    """

    def __init__(self, inner: Matching, tokenizer: Tokenizer, is_reached: Callable[[str], bool]) -> None:
        self._inner = inner
        self._tokenizer = tokenizer
        self._is_reached = is_reached
        self._before = b""
        self._n_blank = -1

    def allows(self, token_id: int) -> bool:
        if self._is_free:
            return token_id not in self._tokenizer.eos_ids
        return self._inner.allows(token_id) or self._is_let_through(token_id)

    def allowed(self, n_vocab: int) -> NDArray[np.bool_]:
        if not self._is_free:
            return self._inner.allowed(n_vocab)
        allowed = np.ones(n_vocab, dtype=np.bool_)
        allowed[list(self._tokenizer.eos_ids)] = False
        return allowed

    def accept(self, token_id: int) -> None:
        if self._is_free:
            self._before = self._before[-_N_SEEN:] + self._tokenizer.piece(token_id, special=True)
            if self._is_reached(self._before.decode("utf-8", "replace")):
                self._n_blank = 0
        elif self._is_let_through(token_id) and not self._inner.allows(token_id):
            self._n_blank += 1
        else:
            self._n_blank = _MOST_BLANK
            self._inner.accept(token_id)

    @property
    def _is_free(self) -> bool:
        return self._n_blank < 0

    def _is_let_through(self, token_id: int) -> bool:
        return self._n_blank < _MOST_BLANK and self._tokenizer.piece(token_id, special=True).isspace()


class _Vocabulary:
    """The tokens as llguidance takes them, and a last one of our own that means the end.

    The model's own end tokens stay out of it: there may be several, or none.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, shown_ids: frozenset[int]) -> None:
        ends = tokenizer.eos_ids
        pieces = (b"" if i in ends else tokenizer.piece(i, special=i in shown_ids) for i in range(tokenizer.n_vocab))
        self.tokens = [*pieces, b"<end>"]
        self.eos_token_id = tokenizer.n_vocab
        self.special_token_ids = [tokenizer.n_vocab]
        self._tokenizer = tokenizer
        self._ids = {piece: i for i, piece in enumerate(self.tokens[:-1]) if piece}
        self._n_longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Ids that spell exactly these bytes: the model's own choice, or, where that adds a space, the longest ones."""
        ids = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special=False, parse_special=False)
        return ids if b"".join(self.tokens[i] for i in ids) == text else list(self._longest(text))

    def _longest(self, text: bytes) -> Iterator[int]:
        at = 0
        while at < len(text):
            ends = range(min(at + self._n_longest, len(text)), at, -1)
            token_id = next((self._ids[text[at:end]] for end in ends if text[at:end] in self._ids), None)
            if token_id is None:
                return
            yield token_id
            at += len(self.tokens[token_id])


def _vocabulary(tokenizer: Tokenizer, shown_ids: frozenset[int]) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, shown_ids)), n_vocab=tokenizer.n_vocab + 1)


def _matcher_class() -> type[LLMatcher]:
    if find_spec("llguidance") is None:
        raise UserError("grammars and JSON schemas need llguidance: pip install 'overspill[grammar]'")
    from llguidance import LLMatcher

    return LLMatcher


def _parsed(schema: str) -> Any:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise UserError(f"json_schema: no JSON: {error}") from None


def _one_line(message: str) -> str:
    """The first lines of a message, joined, without the library's state."""
    lines = [" ".join(line.split()) for line in message.split("<state>")[0].splitlines()]
    return " ".join(line for line in lines if line)[:300]
