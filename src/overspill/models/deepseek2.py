"""DeepSeek-V2, V3, R1, Kimi-K2: latent attention, dense first layers, shared experts, experts chosen by groups.

Attention is computed on latents for prompts and single tokens alike: queries are taken into the space of latents
(`attn_k_b`), and what the heads gather there becomes values at the end (`attn_v_b`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.cache.kv import KvCache
from overspill.models.base import Block, HParams, UbatchView
from overspill.models.layers import PlainHeads, attend_cached, heads, linear, linear_heads
from overspill.models.specs.deepseek2 import LatentHParams
from overspill.models.transformer import Transformer


class Model(Transformer):
    """The plain decoder with latent attention."""

    has_plain_projections = False

    is_rope_interleaved = True

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, LatentHParams)
        self._latent = hparams

    def attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """`[T, D]` -> `[T, H * A]`; a cell holds `[latent | rotated key]`."""
        hp, T = self._latent, len(normed)
        q, q_rot = (part.contiguous() for part in self._queries(block, normed).split([hp.n_plain, hp.rope.n_rot], -1))
        kv = linear(block, "attn_kv_a_mqa", normed)
        latent, k_rot = (part.contiguous() for part in kv.split([hp.n_latent, hp.rope.n_rot], -1))
        latent = block.ops.rms_norm(latent, block.vector("attn_kv_a_norm"), hp.rms_eps)
        q_rot, k_rot = self.rotate(i_layer, block, q_rot, k_rot[:, None], view)
        q = torch.cat([linear_heads(block, "attn_k_b", q).to(q_rot.dtype), q_rot], -1)
        k = torch.cat([latent[:, None].to(k_rot.dtype), k_rot], -1)
        gathered = attend_cached(
            block.ops, cache, view, PlainHeads(cache, q, k, latent[:, None]), scale=hp.attention_scale
        )
        return linear_heads(block, "attn_v_b", gathered.view(T, hp.n_head, hp.n_latent)).flatten(1)

    def _queries(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        hp = self._latent
        if not hp.n_latent_q:
            return heads(block, "attn_q", normed, hp.k_dim)
        latent = linear(block, "attn_q_a", normed)
        latent = block.ops.rms_norm(latent, block.vector("attn_q_a_norm"), hp.rms_eps)
        return heads(block, "attn_q_b", latent, hp.k_dim)
