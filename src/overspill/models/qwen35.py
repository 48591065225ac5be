"""Qwen3.5, dense: Qwen3-Next's layers with a plain feed-forward; decay and strength have matrices of their own."""

from __future__ import annotations

import torch

from overspill.models import qwen3next
from overspill.models.base import Block
from overspill.models.layers import linears


class Model(qwen3next.Model):
    """Qwen3-Next whose value heads lie in another order."""

    def decay_and_strength(self, block: Block, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix for each."""
        a, b = linears(block, ("ssm_alpha", "ssm_beta"), normed)
        return a.float(), b.float()

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """Value head h has key head h modulo their number: the converter has put them so."""
        hp = self._hybrid.delta
        return x.repeat(1, 1, hp.n_heads // hp.n_key_heads, 1)
