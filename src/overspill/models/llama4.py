"""Llama 4, its text: chunked attention with rotation in three of four layers, full without it in the fourth; one expert
of many for each token, and a shared one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.cache.kv import KvCache
from overspill.models import llama
from overspill.models.base import Block, HParams, Routing, UbatchView
from overspill.models.layers import PutHeads, attend_cached
from overspill.models.specs.llama4 import Llama4HParams

_TEMPERATURE, _FLOOR = 0.1, 8192


class Model(llama.Model):
    """Llama with chunks, a temperature where there is no rotation, and experts that get a scaled input."""

    has_plain_heads = False
    has_plain_router = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, Llama4HParams)
        self._llama4 = hparams

    def rotate(
        self, i_layer: int, block: Block, q: torch.Tensor, k: torch.Tensor, view: UbatchView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated heads are normed afterwards; queries that are not grow with the logarithm of their position."""
        if not self._llama4.is_rotated(i_layer):
            return q * temperature(view.positions)[:, None, None], k
        q, k = super().rotate(i_layer, block, q, k, view)
        return (self._normed(q), self._normed(k)) if self._llama4.is_normed else (q, k)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.hparams.rms_eps)

    def attend_cells(self, i_layer: int, block: Block, put: PutHeads, cache: KvCache, view: UbatchView) -> torch.Tensor:
        chunk = self._llama4.chunk(i_layer)
        return attend_cached(block.ops, cache, view, put, scale=self.attention_scale, chunk=chunk)

    def pick(self, block: Block, normed: torch.Tensor) -> Routing:
        """The router's weight multiplies what goes into the expert, not what comes out."""
        routing = super().pick(block, normed)
        scaled = (routing.normed * routing.mix).to(routing.normed.dtype)
        return Routing(scaled, routing.ids, torch.ones_like(routing.mix))


def temperature(positions: torch.Tensor) -> torch.Tensor:
    """1 + 0.1 ln(floor((pos + 1) / 8192) + 1), float32 of the shape of `positions`."""
    return 1.0 + _TEMPERATURE * torch.log1p(torch.floor((positions + 1).float() / _FLOOR))
