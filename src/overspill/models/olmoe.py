"""OLMoE: queries and keys normed over all heads at once; weights of experts are not made to sum to 1."""

from __future__ import annotations

import torch

from overspill.models.base import Block
from overspill.models.layers import norm_all_heads
from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder with normed queries and keys."""

    has_plain_heads = False

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_all_heads(block, q, k, self.hparams.rms_eps)
