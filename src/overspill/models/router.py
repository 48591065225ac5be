"""Routing rules: from router logits to expert ids and mixing weights."""

from __future__ import annotations

import torch

_SMALLEST_SUM = 6.103515625e-5


def softmax_top_k(logits_TE: torch.Tensor, n_used: int, *, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, the `n_used` largest, renormalised to sum 1 where the architecture does so.

    Returns ids int32 `[T, K]` and weights float32 `[T, K]`, largest first (Mixtral, arXiv:2401.04088; Qwen3-MoE).
    """
    mix, ids = logits_TE.float().softmax(-1).topk(n_used, -1)
    if is_normalised:
        mix = mix / mix.sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    return ids.int(), mix
