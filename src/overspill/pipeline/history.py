"""The tokens of every sequence by position, for embeddings that depend on the tokens before (`HParams.n_before`).

Kept on the host and written when a ubatch is issued, so it is ordered as waves are. A position's token stays right for
as long as its cells do: whoever starts again at a position overwrites what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from overspill.cache.cells import Segment

NO_TOKEN = -1


class TokenHistory:
    """Tokens of `n_slots` sequences of `n_cells` positions; nothing is kept where `n_before` is 0."""

    def __init__(self, n_before: int, *, n_slots: int, n_cells: int) -> None:
        self._n_before = n_before
        # Positions before the first stand in front, so that no look back leaves the row.
        n_columns = n_cells + n_before if n_before else 0
        self._tokens = torch.full((n_slots, n_columns), NO_TOKEN, dtype=torch.int32)

    def add(self, ids: Sequence[int], segments: Iterable[Segment]) -> torch.Tensor:
        """Keep a ubatch's tokens. Returns those before each, the nearest first, int32 `[T, n_before]`, -1 for none."""
        n = self._n_before
        if n == 0:
            return torch.empty(len(ids), 0, dtype=torch.int32)
        tokens = torch.tensor(ids, dtype=torch.int32)
        before, row = [], 0
        for segment in segments:
            kept, first = self._tokens[segment.slot], segment.first_pos + n
            kept[first : first + segment.n_tokens] = tokens[row : row + segment.n_tokens]
            before.append(kept[first - n : first + segment.n_tokens - 1].unfold(0, n, 1).flip(-1))
            row += segment.n_tokens
        return torch.cat(before)
