"""Few combinations of many options, in which every pair of values of two options still occurs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

Row = tuple[object, ...]
_N_CANDIDATES = 600


def pairs_of(row: Row) -> set[tuple[int, object, int, object]]:
    """The pairs of values that a row covers."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering(options: Sequence[Sequence[object]], *, seed: int = 0) -> list[Row]:
    """Rows with one value per option; greedy: each new row is the best of some random ones that start with a gap."""
    rng = random.Random(seed)
    missing = {(i, a, j, b) for i, j in combinations(range(len(options)), 2) for a in options[i] for b in options[j]}
    rows: list[Row] = []
    while missing:
        gap = min(missing, key=repr)
        row = max((_around(gap, options, rng) for _ in range(_N_CANDIDATES)), key=lambda r: len(pairs_of(r) & missing))
        rows.append(row)
        missing -= pairs_of(row)
    return rows


def _around(gap: tuple[int, object, int, object], options: Sequence[Sequence[object]], rng: random.Random) -> Row:
    i, a, j, b = gap
    return tuple(a if k == i else b if k == j else rng.choice(values) for k, values in enumerate(options))
