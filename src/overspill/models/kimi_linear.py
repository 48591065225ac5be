"""Kimi-Linear: Kimi Delta Attention, whose decay is each channel's own, in most layers (arXiv:2510.26692); latent
attention without positions in the others; experts as in DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from overspill.cache.kv import KvCache
from overspill.models import deepseek2
from overspill.models.base import Block, HParams, UbatchView
from overspill.models.layers import linear, linears
from overspill.models.recurrent import PER_CHANNEL, mix_tokens
from overspill.models.specs.kimi_linear import KimiHParams
from overspill.quant.dequant import dequantize

_PARTS = ("q", "k", "v")


class Model(deepseek2.Model):
    """Latent attention, or the delta rule."""

    has_plain_projections = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, KimiHParams)
        self._kimi = hparams

    def attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """`[T, D]` -> `[T, H * A]`, of attention or of the delta rule."""
        if self._kimi.is_recurrent[i_layer]:
            return self._delta(block, normed, cache, view)
        return super().attention(i_layer, block, normed, cache, view)

    def _delta(self, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor:
        hp = self._kimi
        qkv = torch.cat(linears(block, [f"attn_{part}" for part in _PARTS], normed), -1).float()
        taps = torch.cat([dequantize(block.matrix(f"ssm_conv1d_{part}")) for part in _PARTS])
        decay, gate, beta = linears(block, ("ssm_f_a", "ssm_g_a", "ssm_beta"), normed)
        decay, gate = linear(block, "ssm_f_b", decay), linear(block, "ssm_g_b", gate)
        dt = block.bias("ssm_dt")
        assert dt is not None
        step = F.softplus(decay.float() + dt).unflatten(-1, (hp.delta.n_heads, -1))
        g, beta = step * block.values("ssm_a")[:, None], torch.sigmoid(beta.float())[..., None]
        y = mix_tokens(block.ops, hp.delta, view, (qkv, g, beta), cache.state, taps, PER_CHANNEL, eps=hp.rms_eps)
        y = block.ops.rms_norm(y, block.vector("ssm_norm"), hp.rms_eps).flatten(1)
        return y * torch.sigmoid(gate)
