"""Gemma 3: windows in five of six layers, norms before and after each half of a layer, GELU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from overspill.models import qwen3
from overspill.models.base import Block, HParams
from overspill.models.layers import linear
from overspill.models.specs.gemma3 import GemmaHParams


class Model(qwen3.Model):
    """Qwen3's attention with windows, and norms after each half of a layer."""

    has_plain_residual = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, GemmaHParams)
        self._gemma = hparams

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return super().embed(ids, before) * math.sqrt(self.hparams.n_embd)

    @property
    def attention_scale(self) -> float:
        return self._gemma.attention_scale

    def after_attention(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        return block.ops.rms_norm(y, block.vector("post_attention_norm"), self.hparams.rms_eps)

    def after_ffn(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        return block.ops.rms_norm(y, block.vector("post_ffw_norm"), self.hparams.rms_eps)

    def dense(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        gate, up = linear(block, "ffn_gate", normed), linear(block, "ffn_up", normed)
        return linear(block, "ffn_down", F.gelu(gate, approximate="tanh") * up)

    def output(self, x: torch.Tensor) -> torch.Tensor:
        logits, cap = super().output(x), self._gemma.softcap
        return logits if cap == 0.0 else cap * torch.tanh(logits / cap)
