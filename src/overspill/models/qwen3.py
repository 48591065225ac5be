"""Qwen3, dense: an RMS norm on each query and key head before rotation."""

from __future__ import annotations

import torch

from overspill.models.base import Block
from overspill.models.layers import norm_each_head
from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder with normed heads."""

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_each_head(block, q, k, self.hparams.rms_eps)
