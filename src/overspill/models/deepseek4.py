"""DeepSeek-V4: streams mixed by doubly stochastic matrices, a window of keys beside compressed blocks, hash routing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.models.base import Block, HParams, Routing, UbatchView
from overspill.models.compress import Compressor, rotate_last
from overspill.models.layers import PlainHeads, linear, linears
from overspill.models.masked import attend_masked, attend_own, best, best_of_steps, rows_at_once, whole_blocks
from overspill.models.router import mix_of_chosen
from overspill.models.specs.deepseek4 import DeepSeek4HParams
from overspill.models.streams import Mixed, StreamModel
from overspill.quant.qtensor import QTensor


class Model(StreamModel):
    """Residual streams around attention to one key for all heads, which is its value too."""

    has_plain_projections = False

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, DeepSeek4HParams)
        self._v4 = hparams
        self._compressors = [self._compressors_of(i) for i in range(hparams.n_layer)]

    def _compressors_of(self, i_layer: int) -> list[Compressor]:
        """Of keys, then of the indexer's keys, as far as the layer has them."""
        hp, rope = self._v4, self._ropes[i_layer]
        assert rope is not None
        kinds = (("attn_compressor", hp.compression(i_layer)), ("indexer_compressor", hp.index(i_layer)))
        return [Compressor(self._blocks[i_layer], name, c, rope, hp.rms_eps) for name, c in kinds if c is not None]

    # --- streams

    def mix(self, block: Block, half: str, X: torch.Tensor) -> Mixed:
        """Streams are weighted and summed, normed, and turned into each other by a doubly stochastic matrix."""
        hp, R = self._v4, self._v4.n_streams
        scale, base = block.vector(f"hc_{half}_scale"), block.vector(f"hc_{half}_base")
        raw = self._normed_product(block, f"hc_{half}_fn", X)
        reads = torch.sigmoid(raw[:, :R] * scale[0] + base[:R]) + hp.mix_eps
        shares = 2.0 * torch.sigmoid(raw[:, R : 2 * R] * scale[1] + base[R : 2 * R])
        turns = (raw[:, 2 * R :] * scale[2] + base[2 * R :]).unflatten(1, (R, R))
        x = (reads[:, :, None] * X).sum(1)
        kept = torch.einsum("tsd,tsx->tdx", doubly_stochastic(turns, hp.n_sinkhorn, hp.mix_eps), X)
        return Mixed(block.ops.rms_norm(x, block.vector(f"{half}_norm"), hp.rms_eps), shares, kept)

    def _normed_product(self, block: Block, name: str, X: torch.Tensor) -> torch.Tensor:
        """A product with all streams of a token, normed together, without gains."""
        flat = X.flatten(1)
        return linear(block, name, flat).float() * _inverse_rms(flat, self.hparams.rms_eps)

    def join(self, X: torch.Tensor) -> torch.Tensor:
        head, hp = self._head, self._v4
        raw = self._normed_product(head, "output_hc_fn", X)
        reads = torch.sigmoid(raw * head.vector("output_hc_scale") + head.vector("output_hc_base")) + hp.mix_eps
        return head.ops.rms_norm((reads[:, :, None] * X).sum(1), head.vector("output_norm"), hp.rms_eps)

    # --- attention

    def attention(
        self, i_layer: int, block: Block, normed: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """`[T, D]` -> `[T, H * A]`. What heads gather is rotated back: values carry the rotation of their keys."""
        hp, rope = self._v4, self._ropes[i_layer]
        assert rope is not None
        cos, sin = view.angles(rope)
        latent, key = linears(block, ("attn_q_a", "attn_kv"), normed)
        latent = block.ops.rms_norm(latent, block.vector("attn_q_a_norm"), hp.rms_eps)
        key = block.ops.rms_norm(key, block.vector("attn_kv_a_norm"), hp.rms_eps)
        q = linear(block, "attn_q_b", latent).unflatten(1, (hp.n_head, hp.head_dim))
        q = rotate_last(block, q * _inverse_rms(q, hp.rms_eps).to(q.dtype), (cos, sin))
        key = rotate_last(block, key[:, None], (cos, sin))
        if self._compressors[i_layer]:
            gathered = self._attend_blocks(i_layer, normed, latent, (q, key), cache, view)
        else:
            gathered = self.attend_cells(i_layer, block, PlainHeads(cache, q, key, key), cache, view)
        return rotate_last(block, gathered.unflatten(1, (hp.n_head, hp.head_dim)), (cos, -sin)).flatten(1)

    def _attend_blocks(
        self,
        i_layer: int,
        normed: torch.Tensor,
        latent: torch.Tensor,
        heads: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        view: UbatchView,
    ) -> torch.Tensor:
        """Attention to the window and to blocks, in one softmax, segment by segment."""
        hp, block, compressors = self._v4, self._blocks[i_layer], self._compressors[i_layer]
        if view.steps is not None:
            return self._attend_block_steps(i_layer, normed, latent, heads, cache, view)
        rows = [compressor.rows(normed, view) for compressor in compressors]
        (q, key), outputs, first_row = heads, [], 0
        for segment in view.segments:
            these = slice(first_row, first_row + segment.n_tokens)
            first_row = these.stop
            for i, compressor in enumerate(compressors):
                compressor.put(rows[i][these], segment, cache.state[i], cache.blocks[i][segment.slot, 0])
            cache.append(segment, key[these], key[these])
            seen = self._seen_blocks(i_layer, normed[these], latent[these], segment, cache, view, these)
            first = max(0, segment.first_pos - hp.n_window + 1)
            window, _ = cache.visible(segment, first)
            keys = torch.cat([window[0], cache.blocks[0][segment.slot, 0, : seen.shape[1]]])[None]
            seen = torch.cat([_in_window(segment, first, hp.n_window, seen.device), seen], 1)
            outputs.append(
                attend_masked(q[these], keys, keys, seen, scale=self.attention_scale, sinks=block.vector("attn_sinks"))
            )
        return torch.cat(outputs)

    def _attend_block_steps(
        self,
        i_layer: int,
        normed: torch.Tensor,
        latent: torch.Tensor,
        heads: tuple[torch.Tensor, torch.Tensor],
        cache: KvCache,
        view: UbatchView,
    ) -> torch.Tensor:
        """The same for steps: of the window and of blocks as many keys as there can be, seen or not."""
        hp, block, steps, (q, key) = self._v4, self._blocks[i_layer], view.steps, heads
        assert steps is not None
        assert view.state_rows is not None
        for i, compressor in enumerate(self._compressors[i_layer]):
            rows = compressor.rows(normed, view)
            compressor.put_steps(rows, steps, view.state_rows, cache.state[i], cache.blocks[i])
        cache.append_steps(steps.slots, steps.positions, key, key)
        slots, back = steps.slots.long()[:, None], torch.arange(1 - hp.n_window, 1, device=q.device)
        cells = steps.positions.long()[:, None] + back
        window = cache.gather_keys(slots, cells.clamp_min(0) % cache.n_cells)[:, 0]
        blocks, seen = self._step_blocks(i_layer, normed, latent, cache, view)
        keys = torch.cat([window, cache.blocks[0][slots, 0, blocks]], 1)[:, None]
        seen = torch.cat([cells >= 0, seen], 1)
        return attend_own(q, keys, keys, seen, scale=self.attention_scale, sinks=block.vector("attn_sinks"))

    def _seen_blocks(
        self,
        i_layer: int,
        normed: torch.Tensor,
        latent: torch.Tensor,
        segment: Segment,
        cache: KvCache,
        view: UbatchView,
        rows: slice,
    ) -> torch.Tensor:
        """Blocks that each query attends to, bool `[T, blocks]`: all complete ones, or the best of them."""
        hp, ratio = self._v4, self._v4.ratios[i_layer]
        n_blocks = segment.end_pos // ratio
        positions = torch.arange(segment.first_pos, segment.end_pos, device=normed.device)
        seen = torch.arange(n_blocks, device=normed.device) < ((positions + 1) // ratio)[:, None]
        if len(cache.blocks) == 1 or n_blocks <= hp.n_index_best:
            return seen
        q, weights = self._index_heads(i_layer, normed, latent, view, rows)
        keys = cache.blocks[1][segment.slot, 0, :n_blocks].to(q.dtype)
        n = rows_at_once(hp.index_heads * len(keys))
        products = (torch.einsum("tha,ba->thb", part, keys) for part in q.split(n))
        scores = [_index_scores(x, w) for x, w in zip(products, weights.split(n), strict=True)]
        return best(torch.cat(scores), hp.n_index_best, seen)

    def _step_blocks(
        self, i_layer: int, normed: torch.Tensor, latent: torch.Tensor, cache: KvCache, view: UbatchView
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks for each step, `[T, n]`, and which of them it attends to."""
        steps, n_blocks = view.steps, cache.blocks[0].shape[2]
        assert steps is not None
        seen = whole_blocks(steps, self._v4.ratios[i_layer], n_blocks)
        if len(cache.blocks) == 1 or n_blocks <= self._v4.n_index_best:
            return torch.arange(n_blocks, device=normed.device).expand(len(normed), -1), seen
        q, weights = self._index_heads(i_layer, normed, latent, view, slice(None))
        keys = cache.blocks[1][steps.slots.long(), 0].to(q.dtype)
        scores = _index_scores(torch.einsum("tha,tba->thb", q, keys), weights)
        return best_of_steps(scores, self._v4.n_index_best, seen)

    def _index_heads(
        self, i_layer: int, normed: torch.Tensor, latent: torch.Tensor, view: UbatchView, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's queries `[T, H, A]` of some rows, and what each of its heads counts, float32 `[T, H]`."""
        hp, block, rope = self._v4, self._blocks[i_layer], self._ropes[i_layer]
        assert rope is not None
        cos, sin = view.angles(rope)
        q = linear(block, "indexer.attn_q_b", latent).unflatten(1, (hp.index_heads, hp.index_dim))
        weights = linear(block, "indexer.proj", normed).float() / math.sqrt(hp.index_dim * hp.index_heads)
        return rotate_last(block, q, (cos[rows], sin[rows])), weights

    def project(self, i_layer: int, block: Block, attended: torch.Tensor) -> torch.Tensor:
        """Groups of heads become latents, which become the output together."""
        groups = attended.unflatten(1, (self._v4.n_groups, -1))
        latents = block.ops.linear_heads(groups, _of_groups(block.matrix("attn_output_a"), self._v4.n_groups))
        return linear(block, "attn_output_b", latents.flatten(1))

    # --- experts

    def shared(self, i_layer: int, normed: torch.Tensor) -> torch.Tensor:
        block, limit = self._blocks[i_layer], self._v4.shared_limits[i_layer]
        gate, up = linears(block, ("ffn_gate_shexp", "ffn_up_shexp"), normed)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return linear(block, "ffn_down_shexp", block.ops.swiglu(gate, up))

    def choose(self, i_layer: int, normed: torch.Tensor, view: UbatchView) -> Routing:
        """By token id in the first layers; how much they count is the router's word in all."""
        hp, block = self._v4, self._blocks[i_layer]
        if i_layer >= hp.n_layer_hash:
            return self.pick(block, normed)
        assert hp.router is not None
        table = block.matrix("ffn_gate_tid2eid").data.view(torch.int32)
        ids = table[view.ids.long()]
        return Routing(normed, ids, mix_of_chosen(linear(block, "ffn_gate_inp", normed), ids, hp.router))


def doubly_stochastic(logits_TRR: torch.Tensor, n_steps: int, eps: float) -> torch.Tensor:
    """Rows by softmax, then columns and rows divided by their sums in turn (Sinkhorn and Knopp)."""
    m = logits_TRR.softmax(-1) + eps
    m = m / (m.sum(1, keepdim=True) + eps)
    for _ in range(n_steps - 1):
        m = m / (m.sum(2, keepdim=True) + eps)
        m = m / (m.sum(1, keepdim=True) + eps)
    return m


def _index_scores(products_THB: torch.Tensor, weights_TH: torch.Tensor) -> torch.Tensor:
    """Scores of blocks, float32 `[T, B]`: the positive products of all heads, weighted."""
    return (products_THB.float().relu_() * weights_TH[:, :, None]).sum(1)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, float32."""
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def _in_window(segment: Segment, first: int, n_window: int, device: torch.device) -> torch.Tensor:
    """Which keys from position `first` on each query of a segment sees, bool `[T, C]`."""
    positions = torch.arange(segment.first_pos, segment.end_pos, device=device)[:, None]
    keys = torch.arange(first, segment.end_pos, device=device)
    return (keys <= positions) & (keys > positions - n_window)


def _of_groups(weight: QTensor, n_groups: int) -> QTensor:
    """A matrix `[G * N, K]` as one for each group."""
    n, k = weight.shape
    return QTensor(weight.in_rows().data.unflatten(0, (n_groups, -1)), weight.type, (n_groups, n // n_groups, k))
