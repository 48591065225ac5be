"""How a letter lies in pinned memory: what whoever sends and whoever receives must agree on.

A letter is up to `MAX_PARTS` tensors of 32-bit words. Their boxes stand one behind the other, each from a multiple of
`ALIGNMENT` words on. Every `PIECE` words of a part have a flag, so that the pieces travel independently of each other;
all parts have as many flags as the longest. A flag is an int64 with `FLAG_STRIDE` numbers of room: those who look at
different flags do not meet.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_PARTS = 4
PIECE = 1024
ALIGNMENT = 4
FLAG_STRIDE = 16


def room(n_words: int) -> int:
    """Words that a part of so many takes in a box."""
    return -(-n_words // ALIGNMENT) * ALIGNMENT


def n_pieces(part_words: Sequence[int]) -> int:
    """Flags that each part has."""
    return max(1, -(-max(part_words) // PIECE))
