"""Parts that architectures compose: projections, self-attention, dense feed-forward, routing, the output head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.kernels import Ops, Steps
from overspill.models.base import Block, UbatchView
from overspill.quant.experts import NO_LIMIT, ExpertVectors

PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")


def linear(block: Block, name: str, x: torch.Tensor) -> torch.Tensor:
    """x W^T, times the scale and plus the bias where the file has them."""
    return _adjusted(block, name, block.ops.linear(x, block.matrix(name)))


def linears(block: Block, names: Sequence[str], x: torch.Tensor) -> list[torch.Tensor]:
    """`linear` with each of the weights."""
    if block.ops.linears is None:
        return [linear(block, name, x) for name in names]
    products = block.ops.linears(x, [block.matrix(name) for name in names])
    return [_adjusted(block, name, y) for name, y in zip(names, products, strict=True)]


def norm_linears(block: Block, norm: str, names: Sequence[str], x: torch.Tensor, eps: float) -> list[torch.Tensor]:
    """`linears` of the RMS norm of x whose gain is `norm.weight`."""
    if block.ops.norm_linears is None:
        return linears(block, names, block.ops.rms_norm(x, block.vector(norm), eps))
    weights = [block.matrix(name) for name in names]
    biases = [bias for name in names if (bias := block.bias(name)) is not None]
    if len(biases) == len(names) and all(block.scale(name) is None for name in names):
        return block.ops.norm_linears(x, block.vector(norm), eps, weights, biases)
    products = block.ops.norm_linears(x, block.vector(norm), eps, weights, ())
    return [_adjusted(block, name, y) for name, y in zip(names, products, strict=True)]


def _adjusted(block: Block, name: str, y: torch.Tensor) -> torch.Tensor:
    scale, bias = block.scale(name), block.bias(name)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def is_bare(block: Block, name: str) -> bool:
    """Whether a product with `name.weight` is all there is: no scale, no bias."""
    return block.scale(name) is None and block.bias(name) is None


def linear_heads(block: Block, name: str, x_THK: torch.Tensor) -> torch.Tensor:
    """x W^T with a matrix for each head, times the scale where the file has one: `[T, H, N]`."""
    y, scale = block.ops.linear_heads(x_THK, block.matrix(name)), block.scale(name)
    return y if scale is None else y * scale


def heads(block: Block, name: str, x_TD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Project and cut into heads: `[T, H, A]`."""
    return linear(block, name, x_TD).view(len(x_TD), -1, head_dim)


def head_gains(block: Block) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weights of the RMS norms of each query and each key head; None where the file has none."""
    if not block.has("attn_q_norm"):
        return None, None
    return block.vector("attn_q_norm"), block.vector("attn_k_norm")


def norm_each_head(block: Block, q: torch.Tensor, k: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of each query and key head, where the file has its weights."""
    norm, (q_gain, k_gain) = block.ops.rms_norm, head_gains(block)
    return (q if q_gain is None else norm(q, q_gain, eps)), (k if k_gain is None else norm(k, k_gain, eps))


def norm_all_heads(block: Block, q: torch.Tensor, k: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of all query heads of a token together, and of all its key heads."""
    norm = block.ops.rms_norm
    q_norm = norm(q.flatten(1), block.vector("attn_q_norm"), eps)
    return q_norm.view_as(q), norm(k.flatten(1), block.vector("attn_k_norm"), eps).view_as(k)


class PutHeads(Protocol):
    """Writes keys and values into cells and returns the queries, `[T, H, A]`."""

    def put(self, segment: Segment, rows: slice) -> torch.Tensor:
        """Some rows, into the cells of a segment."""

    def put_steps(self, steps: Steps) -> torch.Tensor:
        """All rows, each into its own cell."""


@dataclass(frozen=True, eq=False)
class PlainHeads:
    """Heads that are normed and rotated: `[T, H, A]`, `[T, G, A]`, `[T, G, B]`."""

    cache: KvCache
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def put(self, segment: Segment, rows: slice) -> torch.Tensor:
        self.cache.append(segment, self.k[rows], self.v[rows])
        return self.q[rows]

    def put_steps(self, steps: Steps) -> torch.Tensor:
        self.cache.append_steps(steps.slots, steps.positions, self.k, self.v)
        return self.q


def attend_cached(
    ops: Ops,
    cache: KvCache,
    view: UbatchView,
    put: PutHeads,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Put K and V into the cache and attend, segment by segment. Returns `[T, H * A]`.

    window, sinks: see `kernels.Attention`. chunk: a token sees only its own run of so many positions, counted from 0.
    Cells that no query of a segment sees are not read.
    """
    if view.steps is not None:
        assert ops.attend_steps is not None
        queries, cells = put.put_steps(view.steps), (cache.k, cache.v, cache.value_dim)
        return ops.attend_steps(queries, *cells, view.steps, scale=scale, window=window, chunk=chunk, sinks=sinks)
    outputs = []
    row = 0
    for segment in view.segments if chunk is None else _cut(view.segments, chunk):
        rows = slice(row, row + segment.n_tokens)
        queries = put.put(segment, rows)
        first = 0 if chunk is None else segment.first_pos // chunk * chunk
        first = first if window is None else max(first, segment.first_pos - window + 1)
        keys, values = cache.visible(segment, first)
        outputs.append(ops.attention(queries, keys, values, scale=scale, window=window, sinks=sinks))
        row += segment.n_tokens
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _cut(segments: Iterable[Segment], chunk: int) -> Iterator[Segment]:
    """Segments cut where a new chunk begins."""
    for segment in segments:
        first = segment.first_pos
        while first < segment.end_pos:
            end = min(segment.end_pos, (first // chunk + 1) * chunk)
            yield Segment(segment.slot, first, end - first)
            first = end


def feed_forward(block: Block, x: torch.Tensor, *, suffix: str = "") -> torch.Tensor:
    """Gated feed-forward down(silu(gate x) * up x) of `ffn_gate`, `ffn_up`, `ffn_down` (+ suffix)."""
    gate, up = linears(block, ("ffn_gate" + suffix, "ffn_up" + suffix), x)
    return linear(block, "ffn_down" + suffix, block.ops.swiglu(gate, up))


def shared_experts(block: Block, x: torch.Tensor) -> torch.Tensor:
    """The experts that every token uses, times sigmoid(gate . x) where the file has such a gate."""
    y = feed_forward(block, x, suffix="_shexp")
    if not block.has("ffn_gate_inp_shexp"):
        return y
    return y * torch.sigmoid(x.float() @ block.vector("ffn_gate_inp_shexp"))[:, None]


def expert_vectors(block: Block, limit: float | None) -> ExpertVectors:
    """Biases and scales of the routed experts, as far as the file has them. limit: see `HParams.expert_limit`."""
    gate, up, down = PARTS
    return ExpertVectors(
        (block.bias(gate), block.bias(up), block.bias(down)),
        (block.scale(gate), block.scale(up), block.scale(down)),
        NO_LIMIT if limit is None else limit,
    )
