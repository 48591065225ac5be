"""The pre-norm decoder with grouped-query attention that most architectures are variations of.

An architecture states its tensors and overrides the parts in which it differs; nothing here asks for its name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from overspill.cache.kv import KvCache
from overspill.kernels import Ops
from overspill.models.base import Block, HParams, Routing, UbatchView
from overspill.models.layers import attend_cached, feed_forward, heads, linear
from overspill.models.rope import Rope
from overspill.models.router import softmax_top_k
from overspill.quant.experts import Activation, ExpertWeights
from overspill.quant.qtensor import QTensor


class Transformer:
    """The model contract for the plain decoder; `blocks` may lie on different devices."""

    activation = Activation.SILU
    is_mix_normalised = True
    is_rope_interleaved = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        self.hparams = hparams
        self._embedding = embedding
        self._blocks = blocks
        self._head = head
        self._ropes = [_rope(hparams, block) for block in blocks]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids `[T]` -> hidden states `[T, D]`, float32."""
        return self._embedding.ops.embed(self._embedding.matrix("token_embd"), ids)

    def attend(self, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor:
        """Norm, projections, rotation, cached attention, residual: `[T, D]` -> `[T, D]`."""
        block, hp = self._blocks[i_layer], self.hparams
        normed = block.ops.rms_norm(x, block.vector("attn_norm"), hp.rms_eps)
        q, k, v = (heads(block, name, normed, hp.head_dim) for name in ("attn_q", "attn_k", "attn_v"))
        q, k = self.norm_heads(block, q, k)
        rotate = block.ops.rope_pairs if self.is_rope_interleaved else block.ops.rope_halves
        angles = self._ropes[i_layer].angles(view.positions)
        attended = attend_cached(
            block.ops, cache, view, rotate(q, *angles), rotate(k, *angles), v, scale=1.0 / math.sqrt(hp.head_dim)
        )
        return x + linear(block, "attn_output", attended)

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hook: what happens to query and key heads before rotation; nothing here."""
        return q, k

    def route(self, i_layer: int, x: torch.Tensor) -> Routing | None:
        """Dense layers: add the feed-forward to x in place. Layers with experts: norm and router."""
        block, hp = self._blocks[i_layer], self.hparams
        normed = block.ops.rms_norm(x, block.vector("ffn_norm"), hp.rms_eps)
        if not hp.is_moe(i_layer):
            x += feed_forward(block, normed)
            return None
        logits = block.ops.linear(normed, block.matrix("ffn_gate_inp"))
        ids, mix = softmax_top_k(logits, hp.n_expert_used, is_normalised=self.is_mix_normalised)
        return Routing(normed, ids, mix)

    def experts(self, i_layer: int, x: torch.Tensor, routing: Routing, weights: ExpertWeights, ops: Ops) -> None:
        """Add the experts that `weights` holds to x, in place, with the kernels of the device that runs this."""
        ops.experts(routing.normed, routing.ids, routing.mix, weights, self.activation, x)

    def resident_experts(self, i_layer: int) -> ExpertWeights:
        """All experts of a layer that keeps them where it computes."""
        gate, up, down = (self.resident_part(i_layer, i_part) for i_part in range(3))
        return ExpertWeights(gate, up, down)

    def resident_part(self, i_layer: int, i_part: int) -> QTensor:
        """The stacked gate (0), up (1) or down (2) matrices of a layer that keeps them where it computes."""
        return self._blocks[i_layer].matrix(f"ffn_{('gate', 'up', 'down')[i_part]}_exps")

    def ops(self, i_layer: int) -> Ops:
        """Kernels of the device that computes the layer."""
        return self._blocks[i_layer].ops

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head: `[T, D]` -> logits `[T, V]`."""
        head = self._head
        normed = head.ops.rms_norm(x, head.vector("output_norm"), self.hparams.rms_eps)
        return head.ops.linear(normed, head.matrix("output"))


def _rope(hp: HParams, block: Block) -> Rope:
    factors = block.vector("rope_freqs") if block.has("rope_freqs") else None
    return Rope(hp.rope, factors, block.vector("attn_norm").device)
