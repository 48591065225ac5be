"""Attention to a choice of keys that differs from query to query, in plain torch.

Of many queries of one sequence, which all keys are held against, so many at a time; and of steps, each with keys of its
own sequence, whose number is always the same.
"""

from __future__ import annotations

import torch

from overspill.kernels import Steps

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
        weights = _weights(scores, seen_TC[rows], sinks).to(v_GCB.dtype)
        outputs.append(torch.einsum("tgrc,gcb->tgrb", weights, v_GCB).reshape(-1, H * B))
    return torch.cat(outputs)


def attend_own(
    q_THA: torch.Tensor,
    k_TGCA: torch.Tensor,
    v_TGCB: torch.Tensor,
    seen_TC: torch.Tensor,
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same where each query has keys and values of its own; those that it does not see may be anything."""
    (T, H, _), G = q_THA.shape, k_TGCA.shape[1]
    is_unseen = ~seen_TC[:, None, :, None]
    k, v = (x.masked_fill(is_unseen, 0.0).to(q_THA.dtype) for x in (k_TGCA, v_TGCB))
    scores = torch.einsum("tgra,tgca->tgrc", q_THA.unflatten(1, (G, H // G)), k).float() * scale
    return torch.einsum("tgrc,tgcb->tgrb", _weights(scores, seen_TC, sinks).to(v.dtype), v).reshape(T, -1)


def _weights(scores_TGRC: torch.Tensor, seen_TC: torch.Tensor, sinks_H: torch.Tensor | None) -> torch.Tensor:
    """The softmax over the keys seen, and sinks."""
    C, G = scores_TGRC.shape[-1], scores_TGRC.shape[1]
    scores = scores_TGRC.masked_fill(~seen_TC[:, None, None], float("-inf"))
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.view(1, G, -1, 1).expand(len(scores), -1, -1, -1)], -1)
    return scores.softmax(-1)[..., :C]


def best(scores_TC: torch.Tensor, n: int, seen_TC: torch.Tensor) -> torch.Tensor:
    """Of the columns that are seen the `n` with the largest scores, bool `[T, C]`."""
    if scores_TC.shape[1] <= n:
        return seen_TC
    chosen = scores_TC.masked_fill(~seen_TC, float("-inf")).topk(n, -1).indices
    return torch.zeros_like(seen_TC).scatter(-1, chosen, True) & seen_TC


def best_of_steps(scores_TC: torch.Tensor, n: int, seen_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the `n` largest scores, `[T, n]`, and which of them are seen."""
    chosen = scores_TC.masked_fill(~seen_TC, float("-inf")).topk(n, -1).indices
    return chosen, seen_TC.gather(-1, chosen)


def whole_blocks(steps: Steps, ratio: int, n_blocks: int) -> torch.Tensor:
    """Which of so many blocks of `ratio` positions are complete with each step, bool `[T, n_blocks]`."""
    return torch.arange(n_blocks, device=steps.positions.device) < ((steps.positions + 1) // ratio)[:, None]


def put_whole_blocks(blocks: torch.Tensor, steps: Steps, ratio: int, new: torch.Tensor) -> None:
    """Keys `[T, A]` of the blocks that steps stand in, into `[S, 1, n_blocks, A]`, where a step completes its block."""
    slots, positions = steps.slots.long(), steps.positions.long()
    at = (positions // ratio).clamp_max(blocks.shape[2] - 1)  # cells behind the last block belong to none
    is_whole = (positions + 1) % ratio == 0
    blocks[slots, 0, at] = torch.where(is_whole[:, None], new.to(blocks.dtype), blocks[slots, 0, at])
