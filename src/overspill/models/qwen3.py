"""Qwen3, dense: an RMS norm on each query and key head before rotation."""

from __future__ import annotations

import torch

from overspill.models.base import Block
from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder with normed heads."""

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.hparams.rms_eps
        return (
            block.ops.rms_norm(q, block.vector("attn_q_norm"), eps),
            block.ops.rms_norm(k, block.vector("attn_k_norm"), eps),
        )
