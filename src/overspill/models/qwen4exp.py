"""Qwen3.8-Flash-Next: Qwen3.5's layers between streams, attention to the best blocks, embeddings of n-grams."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.kernels import Steps
from overspill.models import qwen35
from overspill.models.base import Block, HParams, UbatchView
from overspill.models.layers import PutHeads, linear, linears
from overspill.models.masked import (
    attend_masked,
    attend_own,
    best,
    best_of_steps,
    put_whole_blocks,
    rows_at_once,
    whole_blocks,
)
from overspill.models.ngrams import table_rows
from overspill.models.recurrent import run_segments
from overspill.models.specs.qwen4exp import Qwen4HParams
from overspill.models.streams import Mixed, StreamModel
from overspill.quant.dequant import dequantize


class Model(StreamModel, qwen35.Model):
    """Qwen3.5 with streams."""

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, Qwen4HParams)
        self._qwen4 = hparams

    # --- streams

    def mix(self, block: Block, half: str, X: torch.Tensor) -> Mixed:
        """The mean of the streams, each channel weighted by what a small network makes of all of them."""
        x, normed = self._mean(block, f"hc_{half}", X)
        shares = 2.0 * torch.sigmoid(linear(block, f"hc_{half}_inject", normed).float() / self._qwen4.n_streams)
        return Mixed(x, shares, X)

    def join(self, X: torch.Tensor) -> torch.Tensor:
        return self._mean(self._head, "output_hc", X)[0]

    def _mean(self, block: Block, name: str, X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[T, D]`, and the normed streams side by side that it is made of."""
        normed = self._normed(block, name + "_norm", X)
        flat = normed.flatten(1)
        hidden = F.silu(linear(block, name + "_down", flat).float() / self._qwen4.n_streams)
        weights = torch.sigmoid(linear(block, name + "_up", hidden).float()).view_as(X)
        return (normed * weights).mean(1).to(block.ops.normed_dtype), flat

    def _normed(self, block: Block, name: str, X: torch.Tensor) -> torch.Tensor:
        """The RMS norm of each stream, with gains of its own."""
        normed = X * torch.rsqrt(X.square().mean(-1, keepdim=True) + self.hparams.rms_eps)
        return normed * block.vector(name).view(X.shape[1:])

    # --- n-grams

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The streams, and what the table has for each token; `ids` are on the host."""
        x, ngrams, block = super().embed(ids, before), self._qwen4.ngrams, self._embedding
        rows = table_rows(ids, before, ngrams).flatten()
        x[:, -ngrams.embed_dim :] = block.ops.embed(block.matrix("per_layer_token_embd"), rows).view(len(ids), -1)
        return x

    def before_layer(self, i_layer: int, X: torch.Tensor, x: torch.Tensor, cache: KvCache, view: UbatchView) -> None:
        """Each stream gets the value of the n-gram, as far as its key fits the stream, and a convolution over time."""
        ngrams, block = self._qwen4.ngrams, self._blocks[i_layer]
        if i_layer != ngrams.layer:
            return
        key, value = linears(block, ("ple_key", "ple_value"), x[:, -ngrams.embed_dim :].contiguous())
        key = self._normed(block, "ple_norm_key", key.float().view_as(X))
        fit = (key * self._normed(block, "ple_norm_query", X)).sum(-1, keepdim=True) / math.sqrt(X.shape[-1])
        gated = torch.sigmoid(fit.sign() * fit.abs().clamp_min(1e-6).sqrt()) * value.float()[:, None]
        inputs = self._normed(block, "ple_norm_conv", gated).flatten(1)
        taps = dequantize(block.matrix("ple_conv1d"))

        def step(
            rows: tuple[torch.Tensor, ...], states: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            seen = torch.cat([states[0], rows[0]], 1)
            T, apart = rows[0].shape[1], ngrams.n_tokens
            y = seen[:, :T] * taps[:, 0]
            for j in range(1, ngrams.n_taps):
                y.addcmul_(seen[:, j * apart : j * apart + T], taps[:, j])
            return F.silu(y), (seen[:, T:],)

        X += gated
        X += run_segments(view, (inputs,), cache.state[-1:], step).view_as(X)

    # --- attention

    def gate_delta(self, block: Block, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A sigmoid, where Qwen3.5 has SiLU."""
        return torch.sigmoid(z) * y

    def attend_put(
        self, i_layer: int, normed: torch.Tensor, put: PutHeads, cache: KvCache, view: UbatchView
    ) -> torch.Tensor:
        """Attention to the best blocks, where there are more than an indexer picks."""
        block = self._blocks[i_layer]
        if not self._qwen4.ratios[i_layer]:
            return self.attend_cells(i_layer, block, put, cache, view)
        queries, keys = self._index_heads(i_layer, normed, view)
        if view.steps is not None:
            self._put_index_steps(i_layer, keys, view.steps, cache)
            return self._attend_steps(i_layer, queries, put.put_steps(view.steps), view.steps, cache)
        outputs, row = [], 0
        for segment in view.segments:
            rows = slice(row, row + segment.n_tokens)
            row = rows.stop
            self._put_index_keys(i_layer, keys[rows], segment, cache)
            q = put.put(segment, rows)
            k, v = cache.visible(segment)
            if segment.end_pos // self._qwen4.ratios[i_layer] <= self._n_best_blocks(i_layer):
                outputs.append(block.ops.attention(q, k, v, scale=self.attention_scale))
            else:
                seen = self._seen(i_layer, queries[rows], segment, cache)
                outputs.append(attend_masked(q, k, v, seen, scale=self.attention_scale))
        return torch.cat(outputs)

    def _n_best_blocks(self, i_layer: int) -> int:
        return self._qwen4.n_index_best // self._qwen4.ratios[i_layer]

    def _index_heads(self, i_layer: int, normed: torch.Tensor, view: UbatchView) -> tuple[torch.Tensor, torch.Tensor]:
        """The indexer's queries `[T, H, A]`, normed and rotated, and its keys `[T, A]`, neither."""
        hp, block, rope = self._qwen4, self._blocks[i_layer], self._ropes[i_layer]
        assert rope is not None
        q, keys = linears(block, ("indexer.q_proj", "indexer.k_proj"), normed)
        q = q.unflatten(1, (hp.index_heads, hp.index_dim))
        q = block.ops.rms_norm(q, block.vector("indexer.q_norm"), hp.rms_eps)
        return block.ops.rope_halves(q, *view.angles(rope)), keys

    def _put_index_keys(self, i_layer: int, keys: torch.Tensor, segment: Segment, cache: KvCache) -> None:
        """Keys of positions, and of the blocks that are complete with them: the mean, normed, and rotated as if it
        stood at the block's first position."""
        ratio = self._qwen4.ratios[i_layer]
        of_positions, of_blocks = (kept[segment.slot, 0] for kept in cache.blocks)
        of_positions[segment.first_pos : segment.end_pos] = keys
        first, last = segment.first_pos // ratio, segment.end_pos // ratio
        if first < last:
            rows = of_positions[first * ratio : last * ratio].unflatten(0, (-1, ratio))
            of_blocks[first:last] = self._block_keys(
                i_layer, rows, torch.arange(first, last, device=keys.device) * ratio
            )

    def _block_keys(self, i_layer: int, rows_NRA: torch.Tensor, positions_N: torch.Tensor) -> torch.Tensor:
        """Keys `[N, A]` of blocks by those of their positions, and the first of these."""
        block, rope = self._blocks[i_layer], self._ropes[i_layer]
        assert rope is not None
        normed = block.ops.rms_norm(rows_NRA.float().mean(1), block.vector("indexer.k_norm"), self._qwen4.rms_eps)
        return block.ops.rope_halves(normed[:, None], *rope.angles(positions_N))[:, 0]

    def _put_index_steps(self, i_layer: int, keys: torch.Tensor, steps: Steps, cache: KvCache) -> None:
        """The same for one position of each of several sequences."""
        ratio, (of_positions, of_blocks) = self._qwen4.ratios[i_layer], cache.blocks
        slots, positions = steps.slots.long(), steps.positions.long()
        of_positions[slots, 0, positions] = keys.to(of_positions.dtype)
        if of_blocks.shape[2]:
            first = positions // ratio * ratio
            cells = first[:, None] + torch.arange(ratio, device=keys.device)
            rows = of_positions[slots[:, None], 0, cells.clamp_max(of_positions.shape[2] - 1)]
            put_whole_blocks(of_blocks, steps, ratio, self._block_keys(i_layer, rows, first))

    def _attend_steps(
        self, i_layer: int, queries: torch.Tensor, q: torch.Tensor, steps: Steps, cache: KvCache
    ) -> torch.Tensor:
        """Attention of steps: to all there is where that cannot be more than the indexer picks."""
        ratio, n_blocks, n_best = self._qwen4.ratios[i_layer], cache.blocks[1].shape[2], self._n_best_blocks(i_layer)
        if n_blocks <= n_best:
            attend = self._blocks[i_layer].ops.attend_steps
            assert attend is not None
            return attend(q, cache.k, cache.v, cache.value_dim, steps, scale=self.attention_scale)
        slots, positions = steps.slots.long(), steps.positions.long()[:, None]
        index_keys = cache.blocks[1][slots, 0].to(queries.dtype)
        scores = torch.einsum("tha,tba->thb", queries, index_keys).float().relu_().sum(1)
        chosen, seen = best_of_steps(scores, n_best, whole_blocks(steps, ratio, n_blocks))
        within = torch.arange(ratio, device=q.device)
        behind = (positions + 1) // ratio * ratio + within
        cells = torch.cat([(chosen[:, :, None] * ratio + within).flatten(1), behind], 1)
        seen = torch.cat([seen[:, :, None].expand(-1, -1, ratio).flatten(1), behind <= positions], 1)
        at = slots[:, None], cells.clamp_max(cache.k.shape[2] - 1)
        k, v = cache.gather_keys(*at), cache.gather_values(*at)
        return attend_own(q, k, v, seen, scale=self.attention_scale)

    def _seen(self, i_layer: int, queries: torch.Tensor, segment: Segment, cache: KvCache) -> torch.Tensor:
        """Positions that each query attends to, bool `[T, C]`: those of the best blocks, and those behind the last."""
        ratio, device = self._qwen4.ratios[i_layer], queries.device
        n_blocks = segment.end_pos // ratio
        positions = torch.arange(segment.first_pos, segment.end_pos, device=device)[:, None]
        whole = torch.arange(n_blocks, device=device) < (positions + 1) // ratio
        scores = _scores(queries, cache.blocks[1][segment.slot, 0, :n_blocks])
        chosen = best(scores, self._n_best_blocks(i_layer), whole).repeat_interleave(ratio, 1)
        keys = torch.arange(segment.end_pos, device=device)
        seen = (keys <= positions) & (keys >= (positions + 1) // ratio * ratio)
        seen[:, : n_blocks * ratio] |= chosen
        return seen


def _scores(queries_THA: torch.Tensor, keys_BA: torch.Tensor) -> torch.Tensor:
    """The sum of all heads' products that are positive, float32 `[T, B]`."""
    scores, n, keys_BA = [], rows_at_once(queries_THA.shape[1] * len(keys_BA)), keys_BA.to(queries_THA.dtype)
    for first in range(0, len(queries_THA), n):
        products = torch.einsum("tha,ba->thb", queries_THA[first : first + n], keys_BA)
        scores.append(products.float().relu_().sum(1))
    return torch.cat(scores)
