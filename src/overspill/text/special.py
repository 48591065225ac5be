"""Where special tokens stand in a text.

A text is first cut at the special tokens that it spells; what lies between goes to the model's own algorithm. Longer
spellings win over shorter ones wherever they stand (length in UTF-8 bytes, ties by lower id), earlier places over
later ones: the result of cutting out one spelling after the other, longest first, but found in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """Token `token_id` is spelled by `text[start:end]`."""

    token_id: int
    start: int
    end: int


@dataclass(frozen=True)
class Segment:
    """A part of a prompt. Special tokens are recognised where `is_markup`; elsewhere all is ordinary text."""

    text: str
    is_markup: bool


@dataclass(frozen=True, kw_only=True)
class SpecialTexts:
    """Spellings that text from outside must not turn into tokens, if it is to stay text.

    `control` never; `user_defined` (marks such as `</think>`) not where the template uses them as markup.
    """

    control: frozenset[str]
    user_defined: frozenset[str]


class SpecialFinder:
    """Finds the tokens of `ids` (text -> id) in texts; empty spellings are left out."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: i for text, i in ids.items() if text}
        self._n_bytes = {text: len(text.encode("utf-8", "replace")) for text in self._ids}
        self._lengths: dict[str, tuple[int, ...]] = {}
        by_head: dict[str, set[int]] = {}
        for text in self._ids:
            by_head.setdefault(text[:2], set()).add(len(text))
        self._lengths = {head: tuple(lengths) for head, lengths in by_head.items()}
        self._starts = _any_of({text[0] for text in self._ids})

    def find(self, text: str, accepts: Callable[[Hit], bool] = lambda hit: True) -> list[Hit]:
        """The chosen places, in order, without overlap. A place that `accepts` refuses does not exist at all."""
        spelled = [(spelling, hit) for spelling, hit in self._candidates(text) if accepts(hit)]
        spelled.sort(key=lambda found: (-self._n_bytes[found[0]], found[1].token_id, found[1].start))
        is_taken = bytearray(len(text))
        chosen = []
        for _, hit in spelled:
            if not any(is_taken[hit.start : hit.end]):
                is_taken[hit.start : hit.end] = b"\1" * (hit.end - hit.start)
                chosen.append(hit)
        return sorted(chosen, key=lambda hit: hit.start)

    def _candidates(self, text: str) -> list[tuple[str, Hit]]:
        if self._starts is None:
            return []
        found = []
        for match in self._starts.finditer(text):
            start = match.start()
            head = text[start : start + 2]
            for length in (*self._lengths.get(head, ()), *(self._lengths.get(head[0], ()) if len(head) > 1 else ())):
                spelling = text[start : start + length]
                if (token_id := self._ids.get(spelling)) is not None:
                    found.append((spelling, Hit(token_id, start, start + length)))
        return found


def _any_of(characters: set[str]) -> re.Pattern[str] | None:
    return re.compile("[" + "".join(map(re.escape, sorted(characters))) + "]") if characters else None
