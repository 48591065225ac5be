"""Parts that architectures compose: projections, self-attention, dense feed-forward, routing, the output head."""

from __future__ import annotations

import torch

from overspill.cache.kv import KvCache
from overspill.kernels import Ops
from overspill.models.base import Block, UbatchView


def linear(block: Block, name: str, x: torch.Tensor) -> torch.Tensor:
    """x W^T, plus the bias where the file has one."""
    y = block.ops.linear(x, block.matrix(name))
    bias = block.bias(name)
    return y if bias is None else y + bias


def heads(block: Block, name: str, x_TD: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Project and cut into heads: `[T, H, A]`."""
    return linear(block, name, x_TD).view(len(x_TD), -1, head_dim)


def attend_cached(
    ops: Ops,
    cache: KvCache,
    view: UbatchView,
    q_THA: torch.Tensor,
    k_TGA: torch.Tensor,
    v_TGA: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Append K and V to the cache and attend, segment by segment. Returns `[T, H * A]`."""
    outputs = []
    row = 0
    for segment in view.segments:
        rows = slice(row, row + segment.n_tokens)
        cache.append(segment, k_TGA[rows], v_TGA[rows])
        outputs.append(ops.attention(q_THA[rows], *cache.visible(segment), scale=scale))
        row += segment.n_tokens
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def feed_forward(block: Block, x: torch.Tensor, *, suffix: str = "") -> torch.Tensor:
    """Gated feed-forward down(silu(gate x) * up x) of `ffn_gate`, `ffn_up`, `ffn_down` (+ suffix)."""
    gate = linear(block, "ffn_gate" + suffix, x)
    up = linear(block, "ffn_up" + suffix, x)
    return linear(block, "ffn_down" + suffix, block.ops.swiglu(gate, up))
