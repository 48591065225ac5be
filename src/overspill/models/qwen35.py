"""Qwen3.5, dense: Qwen3-Next's layers with a plain feed-forward; decay and strength have matrices of their own."""

from __future__ import annotations

import torch

from overspill.models import qwen3next
from overspill.models.base import Block
from overspill.models.layers import linears


class Model(qwen3next.Model):
    """Qwen3-Next with other names for some products."""

    def decay_and_strength(self, block: Block, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix for each."""
        a, b = linears(block, ("ssm_alpha", "ssm_beta"), normed)
        return a.float(), b.float()
