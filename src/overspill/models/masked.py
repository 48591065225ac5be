"""Attention to a choice of keys that differs from query to query: plain torch, so many queries at a time."""

from __future__ import annotations

import torch

_SCORE_BYTES = 64 << 20


def rows_at_once(n_scores: int) -> int:
    """Queries whose float32 scores, `n_scores` each, take a bounded amount of memory."""
    return max(1, _SCORE_BYTES // (4 * max(1, n_scores)))


def attend_masked(
    q_THA: torch.Tensor,
    k_GCA: torch.Tensor,
    v_GCB: torch.Tensor,
    seen_TC: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale q k^T over the keys seen) v, `[T, H * B]`. sinks: see `kernels.Attention`."""
    (T, H, _), (G, C, B) = q_THA.shape, v_GCB.shape
    n = rows_at_once(H * C)
    q, k_GCA, v_GCB = q_THA.unflatten(1, (G, H // G)), k_GCA.to(q_THA.dtype), v_GCB.to(q_THA.dtype)
    outputs = []
    for first in range(0, T, n):
        rows = slice(first, first + n)
        scores = torch.einsum("tgra,gca->tgrc", q[rows], k_GCA).float() * scale
        scores = scores.masked_fill(~seen_TC[rows, None, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, G, -1, 1).expand(len(scores), -1, -1, -1)], -1)
        weights = scores.softmax(-1)[..., :C].to(v_GCB.dtype)
        outputs.append(torch.einsum("tgrc,gcb->tgrb", weights, v_GCB).reshape(-1, H * B))
    return torch.cat(outputs)


def best(scores_TC: torch.Tensor, n: int, seen_TC: torch.Tensor) -> torch.Tensor:
    """Of the columns that are seen the `n` with the largest scores, bool `[T, C]`."""
    if scores_TC.shape[1] <= n:
        return seen_TC
    chosen = scores_TC.masked_fill(~seen_TC, float("-inf")).topk(n, -1).indices
    return torch.zeros_like(seen_TC).scatter(-1, chosen, True) & seen_TC
