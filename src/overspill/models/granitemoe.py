"""Granite MoE: Llama's attention, with factors on embeddings, attention, residuals and logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.models import llama
from overspill.models.base import Block, HParams
from overspill.models.specs.granitemoe import GraniteHParams


class Model(llama.Model):
    """Llama with factors."""

    has_plain_residual = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, GraniteHParams)
        self._granite = hparams

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return super().embed(ids, before) * self._granite.embedding_scale

    @property
    def attention_scale(self) -> float:
        return self._granite.attention_scale

    def after_attention(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        return y * self._granite.residual_scale

    def after_ffn(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        return y * self._granite.residual_scale

    def output(self, x: torch.Tensor) -> torch.Tensor:
        return super().output(x) / self._granite.logit_scale
