"""Qwen3-Next: three of four layers with the gated delta rule, the fourth with gated attention; experts, one shared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from overspill.cache.kv import KvCache
from overspill.models.base import Block, HParams, UbatchView
from overspill.models.layers import PutHeads, linear, linears
from overspill.models.recurrent import PER_HEAD, mix_tokens
from overspill.models.specs.qwen3next import FFN_NORM
from overspill.models.specs.recurrent import DeltaHParams
from overspill.models.transformer import Transformer
from overspill.quant.dequant import dequantize


class Model(Transformer):
    """The plain decoder, its attention gated, or replaced by the delta rule."""

    has_plain_projections = False

    ffn_norm = FFN_NORM

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, DeltaHParams)
        self._hybrid = hparams

    def attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """`[T, D]` -> `[T, H * A]`, of attention or of the delta rule."""
        mix = self._delta if self._hybrid.is_recurrent[i_layer] else self._gated_attention
        return mix(i_layer, block, normed, cache, view)

    def attention_output(self, i_layer: int) -> str:
        """The projection behind."""
        return "ssm_out" if self._hybrid.is_recurrent[i_layer] else "attn_output"

    def _gated_attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        q, k, v = linears(block, ("attn_q", "attn_k", "attn_v"), normed)
        q, gate = (x.flatten(1) for x in q.view(len(q), -1, 2, self.hparams.head_dim).unbind(2))
        put = self.put_projected(i_layer, block, (q, k, v), cache, view)
        return self.attend_put(i_layer, normed, put, cache, view) * torch.sigmoid(gate)

    def attend_put(
        self, i_layer: int, normed: torch.Tensor, put: PutHeads, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """Hook: keys and values enter the cache, and queries attend to what they may see of it."""
        return self.attend_cells(i_layer, self._blocks[i_layer], put, cache, view)

    def _delta(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        hp = self._hybrid
        qkv, z = linears(block, ("attn_qkv", "attn_gate"), normed)
        a, b = self.decay_and_strength(block, normed)
        dt = block.bias("ssm_dt")
        assert dt is not None
        g = block.values("ssm_a") * F.softplus(a + dt)
        taps, inputs = dequantize(block.matrix("ssm_conv1d")), (qkv.float(), g[..., None], torch.sigmoid(b)[..., None])
        y = mix_tokens(block.ops, hp.delta, view, inputs, cache.state[:2], taps, PER_HEAD, eps=hp.rms_eps)
        y = block.ops.rms_norm(y, block.vector("ssm_norm"), hp.rms_eps).flatten(1)
        return self.gate_delta(block, z, y)

    def gate_delta(self, block: Block, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Hook: what the rule gives, `y`, behind its gate."""
        return block.ops.swiglu(z, y)

    def decay_and_strength(self, block: Block, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hook: what decay and strength are made of, `[T, H]` each: of each key head strengths, then decays."""
        hp = self._hybrid.delta
        both = linear(block, "ssm_ba", normed).float().view(len(normed), hp.n_key_heads, 2, -1)
        b, a = both.unbind(2)
        return a.flatten(1), b.flatten(1)
