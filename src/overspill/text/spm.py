"""SentencePiece-style byte-pair encoding (`tokenizer.ggml.model` = llama): merges by the score of the joined token.

Spaces are written U+2581. Starting from single characters, the adjacent pair whose joined text is the token of the
highest score is joined first, the leftmost on ties, until no pair is a token. What is then no token is spelled byte by
byte. Control, unknown and byte tokens are never the result of a merge: text cannot become one of them.

A pair can only be joined if its characters at the seam stand side by side in some token, so a text is first cut at
every other seam, which changes nothing, and the parts (in practice words) are remembered.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import pairwise

from overspill.errors import UserError
from overspill.text.vocab import PREFIX, Kind, Vocab

_log = logging.getLogger(__name__)

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
N_REMEMBERED = 1 << 16
MAX_REMEMBERED_CHARS = 64


class ScoreEncoder:
    """`encode(text)` gives the ids of a text that holds no special tokens. Safe to call from several threads."""

    def __init__(self, vocab: Vocab, scores: Sequence[float]) -> None:
        if len(scores) < vocab.n_vocab:
            raise UserError(
                f"{PREFIX}scores has {len(scores)} values for {vocab.n_vocab} tokens of {PREFIX}tokens; "
                "convert the model again"
            )
        self._ids = vocab.spelled(vocab.of_kind(Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED))
        self._costs = {text: -scores[i] for text, i in self._ids.items()}
        self._byte_ids = [_byte_id(vocab, byte) for byte in range(256)]
        self._seams: set[str] = set()
        for text in self._ids:
            self._seams.update(map(str.__add__, text, text[1:]))
        self._remembered = lru_cache(N_REMEMBERED)(self._encode_part)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", SPACE)
        ids: list[int] = []
        for part in self._parts(text):
            ids.extend(self._remembered(part) if len(part) <= MAX_REMEMBERED_CHARS else self._encode_part(part))
        return ids

    def _parts(self, text: str) -> list[str]:
        seams = self._seams
        cuts = [i for i, pair in enumerate(map(str.__add__, text, text[1:]), 1) if pair not in seams]
        return [text[start:end] for start, end in pairwise((0, *cuts, len(text))) if end > start]

    def _encode_part(self, part: str) -> tuple[int, ...]:
        return tuple(i for symbol in _merge(part, self._costs) for i in self._spell(symbol))

    def _spell(self, symbol: str) -> Sequence[int]:
        if (token_id := self._ids.get(symbol)) is not None:
            return (token_id,)
        return [i for i in map(self._byte_ids.__getitem__, symbol.encode()) if i is not None]


def _byte_id(vocab: Vocab, byte: int) -> int | None:
    """The token of a byte: `<0xXX>`, the ASCII character, or the unknown token."""
    spellings = (f"<0x{byte:02X}>", chr(byte)) if byte < 0x80 else (f"<0x{byte:02X}>",)
    return next((vocab.ids[text] for text in spellings if text in vocab.ids), vocab.unknown_id)


def _merge(part: str, costs: dict[str, float]) -> list[str]:
    """The symbols of `part` after all merges. A heap entry is stale when either side has changed since."""
    symbols = list(part)
    after = [*range(1, len(symbols)), -1]
    before = list(range(-1, len(symbols) - 1))

    def offer(left: int, right: int) -> tuple[float, int, int, str] | None:
        joined = symbols[left] + symbols[right]
        cost = costs.get(joined)
        return None if cost is None else (cost, left, right, joined)

    heap = [entry for i in range(len(symbols) - 1) if (entry := offer(i, i + 1))]
    heapify(heap)
    while heap:
        _, left, right, joined = heappop(heap)
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
            continue
        symbols[left], symbols[right] = joined, ""
        after[left] = after[right]
        if after[left] >= 0:
            before[after[left]] = left
            if entry := offer(left, after[left]):
                heappush(heap, entry)
        if before[left] >= 0 and (entry := offer(before[left], left)):
            heappush(heap, entry)
    return [symbol for symbol in symbols if symbol]
