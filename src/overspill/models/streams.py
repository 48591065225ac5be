"""The decoder with several residual streams: what a block reads is mixed of them, and each gets a share of its output.

See `models.specs.streams` for how a token is handed from layer to layer. An architecture says how streams are mixed
(`mix`), what stands between (`attention`), and how the streams become one for the head (`join`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overspill.cache.kv import KvCache
from overspill.models.base import Block, HParams, Routing, UbatchView
from overspill.models.layers import linear, shared_experts
from overspill.models.specs.streams import StreamHParams
from overspill.models.transformer import Transformer


class Mixed(NamedTuple):
    """x: what a block reads, `[T, D]`. shares: float32 `[T, R]`, what of its output each stream gets.

    kept: `[T, R, D]`, what it is added to.
    """

    x: torch.Tensor
    shares: torch.Tensor
    kept: torch.Tensor


class Row(NamedTuple):
    """Views of hidden states `[T, X]`: streams `[T, R, D]`, pending `[T, D]`, shares `[T, R]`."""

    streams: torch.Tensor
    pending: torch.Tensor
    shares: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, hp: StreamHParams) -> Row:
        """The parts of x."""
        n, D, R = hp.streams_dim, hp.n_embd, hp.n_streams
        return cls(x[:, :n].unflatten(1, (R, D)), x[:, n : n + D], x[:, n + D : n + D + R])

    def settled(self) -> torch.Tensor:
        """The streams with what was pending, `[T, R, D]`."""
        return self.streams + self.shares[:, :, None] * self.pending[:, None]


class StreamModel(Transformer):
    """The model contract over residual streams."""

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None:
        super().__init__(hparams, embedding, blocks, head)
        assert isinstance(hparams, StreamHParams)
        self._streams = hparams

    def mix(self, block: Block, half: str, X: torch.Tensor) -> Mixed:
        """Hook: streams `[T, R, D]` on their way into the attention (`attn`) or the feed-forward (`ffn`) of a layer."""
        raise NotImplementedError

    def join(self, X: torch.Tensor) -> torch.Tensor:
        """Hook: streams `[T, R, D]` -> what the head reads, `[T, D]`."""
        raise NotImplementedError

    def before_layer(self, i_layer: int, X: torch.Tensor, x: torch.Tensor, cache: KvCache, view: UbatchView) -> None:
        """Hook: what else is added to the streams X before a layer, in place; x: all that was handed on."""

    def shared(self, i_layer: int, normed: torch.Tensor) -> torch.Tensor:
        """Hook: the experts that every token uses."""
        return shared_experts(self._blocks[i_layer], normed)

    def choose(self, i_layer: int, normed: torch.Tensor, view: UbatchView) -> Routing:
        """Hook: the router."""
        return self.pick(self._blocks[i_layer], normed)

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Every stream begins as the embedding."""
        x = torch.zeros(len(ids), self._streams.x_dim, device=ids.device)
        Row.of(x, self._streams).streams.copy_(super().embed(ids, before)[:, None])
        return x

    def attend(self, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor:
        """What is pending, then the attention: `[T, X]` -> `[T, X]`."""
        block, X = self._blocks[i_layer], Row.of(x, self._streams).settled()
        self.before_layer(i_layer, X, x, cache, view)
        mixed = self.mix(block, "attn", X)
        y = self.project(i_layer, block, self.attention(i_layer, block, mixed.x, cache, view))
        out = x.clone()
        torch.add(mixed.kept, mixed.shares[:, :, None] * y[:, None], out=Row.of(out, self._streams).streams)
        return out

    def project(self, i_layer: int, block: Block, attended: torch.Tensor) -> torch.Tensor:
        """Hook: the output of all heads -> `[T, D]`."""
        return linear(block, self.attention_output(i_layer), attended)

    def route(self, i_layer: int, x: torch.Tensor, view: UbatchView) -> Routing:
        """The shared experts' output is pending from here on; the routed ones are added to it."""
        row = Row.of(x, self._streams)
        mixed = self.mix(self._blocks[i_layer], "ffn", row.streams)
        row.pending.copy_(self.shared(i_layer, mixed.x))
        row.shares.copy_(mixed.shares)
        row.streams.copy_(mixed.kept)
        return self.choose(i_layer, mixed.x, view)

    def added_to(self, x: torch.Tensor) -> torch.Tensor:
        """What is pending."""
        return Row.of(x, self._streams).pending

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, X]` -> logits `[T, V]`."""
        return linear(self._head, "output", self.join(Row.of(x, self._streams).settled()))
