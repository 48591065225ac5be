"""The pre-norm decoder with grouped-query attention that most architectures are variations of.

An architecture states its tensors and overrides the parts in which it differs; nothing here asks for its name. What
is only sometimes in a file (biases, shared experts, attention sinks) is used where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.gguf.types import TensorType
from overspill.kernels import AttentionWeights, Ops, RouterWeights, Steps, TokenEnds
from overspill.models.base import Block, HParams, Routing, UbatchView, forward_layer
from overspill.models.layers import (
    PARTS,
    PlainHeads,
    PutHeads,
    attend_cached,
    expert_vectors,
    feed_forward,
    head_gains,
    is_bare,
    linear,
    linears,
    norm_each_head,
    norm_linears,
    shared_experts,
)
from overspill.models.one_token import OneToken, PlainParts, Together
from overspill.models.rope import Rope
from overspill.models.router import pick_experts
from overspill.quant.experts import Activation, ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

# Methods that no subclass overrides where attention is one op.
_ATTENTION_HOOKS = ("attend_projected", "put_projected", "attend_cells")
# And where a layer is.
_LAYER_HOOKS = ("attend", "route", "added_to", "experts")


class _Preparation(NamedTuple):
    """How heads become ready: weights of their norms, its epsilon, and how channels are paired in the rotation."""

    gains: tuple[torch.Tensor | None, torch.Tensor | None]
    eps: float
    is_interleaved: bool


@dataclass(frozen=True, eq=False)
class _RawHeads:
    """Products that one op norms, rotates and puts into the cache: `[T, H * A]`, `[T, G * A]`, `[T, G * B]`."""

    cache: KvCache
    ops: Ops
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    angles: tuple[torch.Tensor, torch.Tensor]
    how: _Preparation

    def put(self, segment: Segment, rows: slice) -> torch.Tensor:
        parts, queries, row = self.cache.cut(segment), [], rows.start
        for part in parts:
            queries.append(self._put(part, slice(row, row + part.n_tokens)))
            row += part.n_tokens
        return queries[0] if len(parts) == 1 else torch.cat(queries)

    def _put(self, segment: Segment, rows: slice) -> torch.Tensor:
        assert self.ops.prepare_heads is not None
        gains, eps, is_interleaved = self.how
        cos, sin = self.angles
        products, angles = (self.q, self.k, self.v), self.angles
        if segment.n_tokens < self.q.shape[0]:
            products, angles = (self.q[rows], self.k[rows], self.v[rows]), (cos[rows], sin[rows])
        cells = self.cache.cells(segment)
        return self.ops.prepare_heads(*products, cells, angles, gains, eps=eps, is_interleaved=is_interleaved)

    def put_steps(self, steps: Steps) -> torch.Tensor:
        assert self.ops.prepare_steps is not None
        gains, eps, is_interleaved = self.how
        caches = self.cache.k, self.cache.v
        return self.ops.prepare_steps(
            self.q, self.k, self.v, caches, steps, self.angles, gains, eps=eps, is_interleaved=is_interleaved
        )


_QKV = ("attn_q", "attn_k", "attn_v")


class Transformer:
    """The model contract for the plain decoder; `blocks` may lie on different devices."""

    activation = Activation.SILU
    is_rope_interleaved = False
    # False where a subclass does more than project, than norm each head and rotate, than pick, than add: no fused op
    # serves it then.
    has_plain_projections = True
    has_plain_heads = True
    has_plain_router = True
    has_plain_residual = True
    ffn_norm = "ffn_norm"

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        self.hparams = hparams
        self._embedding = embedding
        self._blocks = blocks
        self._head = head
        self._ropes = [_rope(hparams, i, block) for i, block in enumerate(blocks)]
        self._resident_experts: dict[int, ExpertWeights] = {}
        plain_parts = [self._plain_parts(i, block) for i, block in enumerate(blocks)]
        self._one_token = OneToken(plain_parts, self.activation, self._all_experts)
        self._vectors = [expert_vectors(block, hparams.expert_limit(i)) for i, block in enumerate(blocks)]

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Ids `[T]` -> hidden states `[T, D]`, float32. before: see `HParams.n_before`; nothing here depends on it."""
        return self._embedding.ops.embed(self._embedding.matrix("token_embd"), ids)

    def attend(self, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor:
        """Norm, attention, output projection, residual: `[T, D]` -> `[T, D]`."""
        block, eps = self._blocks[i_layer], self.hparams.rms_eps
        if view.is_one_token:
            found = self._one_token.attend(i_layer, x, cache, view)
            if found is not None:
                return found
        if self.has_plain_projections:
            qkv = norm_linears(block, "attn_norm", _QKV, x, eps)
            attended = self.attend_projected(i_layer, block, qkv, cache, view)
        else:
            normed = block.ops.rms_norm(x, block.vector("attn_norm"), eps)
            attended = self.attention(i_layer, block, normed, cache, view)
        add_linear, output = block.ops.add_linear, self.attention_output(i_layer)
        if self.has_plain_residual and add_linear is not None and is_bare(block, output):
            return add_linear(x, attended, block.matrix(output))
        return x + self.after_attention(block, linear(block, output, attended))

    def attention_output(self, i_layer: int) -> str:
        """Hook: name of the projection behind attention."""
        return "attn_output"

    def attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """Projections, rotation, cached attention: `[T, D]` -> `[T, H * A]`."""
        return self.attend_projected(i_layer, block, linears(block, _QKV, normed), cache, view)

    def attend_projected(
        self, i_layer: int, block: Block, qkv: Sequence[torch.Tensor], cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """What follows the products with queries, keys and values."""
        q, k, v = qkv
        put = self.put_projected(i_layer, block, (q, k, v), cache, view)
        return self.attend_cells(i_layer, block, put, cache, view)

    def put_projected(
        self,
        i_layer: int,
        block: Block,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: KvCache,
        view: UbatchView,
    ) -> PutHeads:
        """For products `[T, H * A]`, `[T, G * A]`, `[T, G * B]`: norms, rotation, and into the cache."""
        hp = self.hparams
        has_op = block.ops.prepare_heads is not None
        if self.has_plain_heads and has_op and self._ropes[i_layer] is not None:
            return self._raw_heads(i_layer, block, qkv, cache, view)
        q, k, v = (
            x.view(len(x), -1, dim) for x, dim in zip(qkv, (hp.head_dim, hp.head_dim, hp.value_dim), strict=True)
        )
        q, k = self.norm_heads(block, q, k)
        return PlainHeads(cache, *self.rotate(i_layer, block, q, k, view), v)

    def _raw_heads(
        self,
        i_layer: int,
        block: Block,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cache: KvCache,
        view: UbatchView,
    ) -> _RawHeads:
        rope = self._ropes[i_layer]
        assert rope is not None
        how = _Preparation(head_gains(block), self.hparams.rms_eps, self.is_rope_interleaved)
        return _RawHeads(cache, block.ops, *qkv, view.angles(rope), how)

    def attend_cells(self, i_layer: int, block: Block, put: PutHeads, cache: KvCache, view: UbatchView) -> torch.Tensor:
        """Hook: keys and values enter the cache, and queries attend to what they may see of it."""
        window = self.hparams.window(i_layer)
        sinks = block.vector("attn_sinks") if block.has("attn_sinks") else None
        return attend_cached(block.ops, cache, view, put, scale=self.attention_scale, window=window, sinks=sinks)

    @property
    def attention_scale(self) -> float:
        """Hook: what products of queries and keys are multiplied by."""
        return 1.0 / math.sqrt(self.hparams.head_dim)

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Hook: what happens to query and key heads before rotation: a norm of each, where the file has it."""
        return norm_each_head(block, q, k, self.hparams.rms_eps)

    def rotate(
        self, i_layer: int, block: Block, q: torch.Tensor, k: torch.Tensor, view: UbatchView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hook: position enters queries and keys."""
        rope = self._ropes[i_layer]
        if rope is None:
            return q, k
        rotate = block.ops.rope_pairs if self.is_rope_interleaved else block.ops.rope_halves
        angles = view.angles(rope)
        return rotate(q, *angles), rotate(k, *angles)

    def after_attention(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        """Hook: what happens to the output of attention before it is added; nothing here."""
        return y

    def after_ffn(self, block: Block, y: torch.Tensor) -> torch.Tensor:
        """Hook: what happens to the output of a dense or shared feed-forward before it is added; nothing here."""
        return y

    def dense(self, block: Block, normed: torch.Tensor) -> torch.Tensor:
        """Hook: the feed-forward of a layer without experts."""
        return feed_forward(block, normed)

    def route(self, i_layer: int, x: torch.Tensor, view: UbatchView) -> Routing | None:
        """Add the dense or shared feed-forward to x in place. Layers with experts: which ones each token gets."""
        block, hp = self._blocks[i_layer], self.hparams
        if not hp.is_moe(i_layer):
            normed = block.ops.rms_norm(x, block.vector(self.ffn_norm), hp.rms_eps)
            x += self.after_ffn(block, self.dense(block, normed))
            return None
        normed, routing = self._routed(i_layer, block, x)
        if block.has("ffn_gate_shexp"):
            x += self.after_ffn(block, shared_experts(block, normed))
        return routing

    def _routed(self, i_layer: int, block: Block, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """The normed x, and its routing."""
        gain, eps, rule = block.vector(self.ffn_norm), self.hparams.rms_eps, self.hparams.router
        token_router = self._one_token.router(i_layer)
        if token_router is not None and x.shape[0] == 1:
            routed = token_router(x)
            return routed[0], Routing(*routed)
        router = block.matrix("ffn_gate_inp")
        if block.ops.route is None or rule is None or not self._is_plain_router(block):
            normed = block.ops.rms_norm(x, gain, eps)
            return normed, self.pick(block, normed)
        routed = block.ops.route(
            x,
            gain,
            router.data.view(torch.float32),
            block.bias("exp_probs_b"),
            block.bias("ffn_gate_inp"),
            eps=eps,
            n_used=rule.n_used,
            gating=rule.gating,
            is_normalised=rule.is_normalised,
            scale=rule.scale,
        )
        return routed[0], Routing(*routed)

    def _is_plain_router(self, block: Block) -> bool:
        """Whether norm, product and choice may be one op."""
        rule, router = self.hparams.router, block.matrix("ffn_gate_inp")
        is_plain = self.has_plain_router and router.type is TensorType.F32 and block.scale("ffn_gate_inp") is None
        return is_plain and rule is not None and rule.n_groups <= 1

    def _plain_parts(self, i_layer: int, block: Block) -> PlainParts:
        attention, router = self._plain_attention(i_layer, block), self._plain_router(i_layer, block)
        return PlainParts(block.ops, attention, self._ropes[i_layer], router)

    def _plain_router(self, i_layer: int, block: Block) -> RouterWeights | None:
        rule = self.hparams.router
        is_there = self.hparams.is_moe(i_layer) and block.has("ffn_gate_inp") and block.has(self.ffn_norm)
        if rule is None or not is_there or not self._is_plain_router(block):
            return None
        if block.bias("ffn_gate_inp") is not None:
            return None
        return RouterWeights(
            gain=block.vector(self.ffn_norm),
            router=block.matrix("ffn_gate_inp"),
            bias=block.bias("exp_probs_b"),
            eps=self.hparams.rms_eps,
            n_used=rule.n_used,
            gating=rule.gating,
            is_normalised=rule.is_normalised,
            scale=rule.scale,
        )

    def _plain_attention(self, i_layer: int, block: Block) -> AttentionWeights | None:
        hp, names = self.hparams, (*_QKV, "attn_output")
        is_plain = self.has_plain_projections and self.has_plain_heads and self.has_plain_residual
        is_plain = is_plain and self._ropes[i_layer] is not None and self._is_own(_ATTENTION_HOOKS)
        is_there = block.has("attn_norm") and all(block.has(name) and is_bare(block, name) for name in names)
        if not is_plain or not is_there:
            return None
        q, k, v, output = (block.matrix(name) for name in names)
        return AttentionWeights(
            gain=block.vector("attn_norm"),
            q=q,
            k=k,
            v=v,
            output=output,
            gains=head_gains(block),
            sinks=block.vector("attn_sinks") if block.has("attn_sinks") else None,
            eps=hp.rms_eps,
            scale=self.attention_scale,
            window=hp.window(i_layer),
            is_interleaved=self.is_rope_interleaved,
        )

    def _all_experts(self, i_layer: int) -> ExpertWeights | None:
        """Of a layer that has no parts but attention, router and resident experts; else None."""
        has_others = self._blocks[i_layer].has("ffn_gate_shexp") or not self._is_own(_LAYER_HOOKS)
        return self.resident_experts(i_layer) if self.hparams.is_moe(i_layer) and not has_others else None

    def _is_own(self, names: Sequence[str]) -> bool:
        """Whether these methods are the ones of this class."""
        return all(getattr(getattr(self, n), "__func__", None) is getattr(Transformer, n) for n in names)

    def pick(self, block: Block, normed: torch.Tensor) -> Routing:
        """Hook: the router."""
        assert self.hparams.router is not None
        logits = linear(block, "ffn_gate_inp", normed)
        ids, mix = pick_experts(logits, self.hparams.router, block.bias("exp_probs_b"))
        return Routing(normed, ids, mix)

    def added_to(self, x: torch.Tensor) -> torch.Tensor:
        """What experts are added to: all of the hidden states."""
        return x

    def experts(self, i_layer: int, y: torch.Tensor, routing: Routing, weights: ExpertWeights, ops: Ops) -> None:
        """Add the experts that `weights` holds to y, in place, with the kernels of the device that runs this."""
        of_token = self._one_token.experts(i_layer, weights, ops) if y.shape[0] == 1 else None
        if of_token is not None:
            of_token(routing.normed, routing.ids, routing.mix, y)
        else:
            ops.experts(routing.normed, routing.ids, routing.mix, weights, self.activation, y)

    def layers(self, first: int, x: torch.Tensor, caches: Sequence[KvCache], view: UbatchView) -> torch.Tensor:
        """Whole layers from `first` on, one for each cache: `[T, D]` -> `[T, D]`."""
        last = first + len(caches)
        runs = self._one_token.runs(first, last) if view.is_one_token else [(range(first, last), None)]
        for layers, together in runs:
            some = caches[layers.start - first : layers.stop - first]
            if together is not None and together.suits(some):
                x = together(x, some, view.segments[0])
                continue
            for i, cache in zip(layers, some, strict=True):
                x = forward_layer(self, i, x, cache, view)
        return x

    def resident_experts(self, i_layer: int) -> ExpertWeights:
        """All experts of a layer that keeps them where it computes."""
        if i_layer not in self._resident_experts:
            gate, up, down = (self.resident_part(i_layer, i_part) for i_part in range(3))
            self._resident_experts[i_layer] = ExpertWeights(gate, up, down, vectors=self.expert_vectors(i_layer))
        return self._resident_experts[i_layer]

    def resident_part(self, i_layer: int, i_part: int) -> QTensor:
        """The stacked gate (0), up (1) or down (2) matrices of a layer that keeps them where it computes."""
        return self._blocks[i_layer].matrix(PARTS[i_part])

    def expert_vectors(self, i_layer: int) -> ExpertVectors:
        """Biases and scales of a layer's experts, on the device that computes the layer."""
        return self._vectors[i_layer]

    def ops(self, i_layer: int) -> Ops:
        """Kernels of the device that computes the layer."""
        return self._blocks[i_layer].ops

    def token_logits(self, token: int, segment: Segment, caches: Sequence[KvCache]) -> torch.Tensor | None:
        """Logits `[1, V]` of a token, where one device has the whole model and a call for it; else None."""
        return self._whole(token, caches, segment) if self._whole is not None and self._whole.suits(caches) else None

    @cached_property
    def _whole(self) -> Together | None:
        if not self._is_own(("embed", "output")) or not is_bare(self._head, "output"):
            return None
        gain, eps, output = self._head.vector("output_norm"), self.hparams.rms_eps, self._head.matrix("output")
        return self._one_token.whole(TokenEnds(self._embedding.matrix("token_embd"), gain, eps, output))

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """Final norm and head: `[T, D]` -> logits `[T, V]`."""
        return norm_linears(self._head, "output_norm", ("output",), x, self.hparams.rms_eps)[0]


def _rope(hp: HParams, i_layer: int, block: Block) -> Rope | None:
    params = hp.rope_of(i_layer)
    if params is None:
        return None
    factors = block.vector("rope_freqs") if block.has("rope_freqs") else None
    return Rope(params, factors, block.device)
