"""A toy model for the engine: the logits of a row are a hash of the ids in the cells up to it.

It keeps cells per slot as a cache would, so a wrong position, a stale cell or a leak from another sequence changes the
text or raises. It checks the shape of every wave it is given.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch

from overspill.pipeline.wave import Ubatch, Wave


def hash_logits(history: Sequence[int], n_vocab: int) -> np.ndarray:
    """[V] float32, a function of the history alone."""
    seed = zlib.crc32(np.array(history, dtype=np.int64).tobytes())
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(n_vocab, dtype=np.float32) * 3


class HashModel:
    """`run_wave` for an Engine. fault(history, logits_V) may change the logits or raise; waves: all that were run."""

    def __init__(
        self,
        *,
        n_vocab: int,
        n_ctx_slot: int,
        n_slots: int,
        n_ubatch: int,
        n_wave: int,
        fault: Callable[[list[int], np.ndarray], None] = lambda history, logits_V: None,
    ) -> None:
        self.sizes = {
            "n_vocab": n_vocab,
            "n_ctx_slot": n_ctx_slot,
            "n_slots": n_slots,
            "n_ubatch": n_ubatch,
            "n_wave": n_wave,
        }
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.fault = fault
        self.waves: list[Wave] = []

    def run_wave(self, wave: Wave) -> list[torch.Tensor]:
        assert 0 < wave.n_tokens <= self.sizes["n_wave"]
        self.waves.append(wave)
        return [self._run_ubatch(ubatch) for ubatch in wave.ubatches]

    def _run_ubatch(self, ubatch: Ubatch) -> torch.Tensor:
        assert ubatch.n_tokens <= self.sizes["n_ubatch"]
        histories = list(self._histories(ubatch))
        rows = [self._logits(histories[row]) for row in ubatch.output_rows]
        return torch.from_numpy(np.array(rows, dtype=np.float32).reshape(len(rows), self.sizes["n_vocab"]))

    def _histories(self, ubatch: Ubatch):
        ids = iter(ubatch.ids)
        for segment in ubatch.segments:
            cells = self.cells[segment.slot]
            assert len(cells) >= segment.first_pos, "a gap in the cells"
            del cells[segment.first_pos :]
            for _ in range(segment.n_tokens):
                cells.append(next(ids))
                yield list(cells)
            assert len(cells) < self.sizes["n_ctx_slot"], "more cells than a slot can need"

    def _logits(self, history: list[int]) -> np.ndarray:
        logits_V = hash_logits(history, self.sizes["n_vocab"])
        self.fault(history, logits_V)
        return logits_V
