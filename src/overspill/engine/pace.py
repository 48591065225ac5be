"""How many tokens of prompts may ride in a wave beside sequences that decode, so that these keep their pace.

A wave takes what its uploads take, and something for each token, neither of which is known before. So the bound feels
its way: after a wave that took too long it falls to what would have been in time, after waves with time to spare that
were full it grows. Pure Python; the caller measures.
"""

from __future__ import annotations

_GROWTH = 1.25
_SPARE = 0.8


class WavePace:
    """Keeps mixed waves within max_ms. n_wave: most tokens a wave has, where it begins."""

    def __init__(self, max_ms: float, n_wave: int) -> None:
        self._max_ms = max_ms
        self._n_wave = n_wave
        self._limit = float(n_wave)

    @property
    def n_tokens(self) -> int:
        """Most tokens of prompts for the next wave in which others decode."""
        return max(1, int(self._limit))

    def note(self, n_tokens: int, wall_ms: float) -> None:
        """A wave with so many tokens of prompts, in which others decoded, took so long."""
        if wall_ms > self._max_ms:
            self._limit = max(1.0, min(self._limit, n_tokens * self._max_ms / wall_ms))
        elif wall_ms < _SPARE * self._max_ms:
            grown = max(n_tokens * _GROWTH, n_tokens + 1)
            self._limit = min(float(self._n_wave), max(self._limit, grown))
