"""How many tokens of prompts may ride in a wave beside sequences that decode, so that these keep their pace.

A wave takes what its uploads take, and something for each token, neither of which is known well before. So the bound
feels its way: after a wave that took too long it falls to what would have been in time, after waves with time to spare
that were full it grows. It does not fall below what a wave has room for in the time it takes anyhow: fewer tokens would
make prompts slower and nobody faster. Pure Python; the caller measures.
"""

from __future__ import annotations

_GROWTH = 1.25
_SPARE = 0.8


class WavePace:
    """Keeps waves that others decode in, or wait for, within max_ms.

    n_wave: most tokens a wave has. n_first: of prompts, in the first such wave. n_least: fewer make no wave shorter.
    """

    def __init__(self, max_ms: float, n_wave: int, *, n_first: int, n_least: int = 1) -> None:
        self._max_ms = max_ms
        self._n_wave = n_wave
        self._n_least = max(1, min(n_least, n_wave))
        self._limit = float(max(self._n_least, min(n_first, n_wave)))

    @property
    def n_tokens(self) -> int:
        """Most tokens of prompts for the next wave in which others decode."""
        return int(self._limit)

    def note(self, n_tokens: int, wall_ms: float) -> None:
        """A wave with so many tokens of prompts, in which others decoded, took so long."""
        if wall_ms > self._max_ms:
            self._limit = max(float(self._n_least), min(self._limit, n_tokens * self._max_ms / wall_ms))
        elif wall_ms < _SPARE * self._max_ms:
            grown = max(n_tokens * _GROWTH, n_tokens + 1)
            self._limit = min(float(self._n_wave), max(self._limit, grown))
