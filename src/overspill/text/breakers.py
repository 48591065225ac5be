"""Texts that end a repetition, as the tokens that spell them.

A breaker may lie inside a token, or begin in one and end in those that follow. Source: llama.cpp's DRY sampler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from overspill.text.tokenizer import Tokenizer

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
_N_MOST_CHARS = 40
_N_MOST_TAIL = 20


@lru_cache(maxsize=32)
def breakers_of(tokenizer: Tokenizer, word: str) -> tuple[tuple[int, ...], ...]:
    """Sequences of ids that spell `word` (cut to 40 characters): one id that holds all of it, or one that ends with a
    beginning of it, followed by the ids of the rest."""
    spelled = word[:_N_MOST_CHARS].encode("utf-8", "replace")
    return tuple(sequence for i in range(tokenizer.n_vocab) for sequence in _from(tokenizer, i, spelled))


def _from(tokenizer: Tokenizer, token_id: int, word: bytes) -> Iterator[tuple[int, ...]]:
    piece = tokenizer.piece(token_id, special=True)
    if word in piece:
        yield (token_id,)
        return
    for n in range(min(len(word) - 1, len(piece)), 0, -1):
        if piece.endswith(word[:n]):
            rest = word[n:].decode("utf-8", "replace")
            tail = tokenizer.encode(rest, add_special=False, parse_special=False)
            yield (token_id, *tail[:_N_MOST_TAIL])
