"""Routing rules: from router logits to expert ids and mixing weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from overspill.models.specs.router import Gating, RouterParams

_SMALLEST_SUM = 6.103515625e-5


def pick_experts(
    logits_TE: torch.Tensor, rule: RouterParams, bias_E: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and what their outputs count: ids int32 `[T, K]`, weights float32 `[T, K]`.

    Logits become scores (Mixtral, arXiv:2401.04088: softmax; DeepSeek-V3, arXiv:2412.19437: sigmoid). `bias_E` is
    added for the choice alone. Only the experts of the best groups take part; the largest `n_used` are chosen, best
    first. Their scores, without the bias, are normalised to sum 1 where the rule says so, and then scaled.
    """
    logits_TE = logits_TE.float()
    scores = _scores(logits_TE, rule.gating)
    if bias_E is None and rule.n_groups == 1:
        ids = logits_TE.topk(rule.n_used, -1).indices  # the order of scores, where they do not round to equals
    else:
        ids = _best(scores if bias_E is None else scores + bias_E, rule)
    return ids.int(), _mix(scores, ids, rule)


def mix_of_chosen(logits_TE: torch.Tensor, ids_TK: torch.Tensor, rule: RouterParams) -> torch.Tensor:
    """What experts that something else has chosen count, float32 `[T, K]`."""
    return _mix(_scores(logits_TE.float(), rule.gating), ids_TK.long(), rule)


def _mix(scores_TE: torch.Tensor, ids_TK: torch.Tensor, rule: RouterParams) -> torch.Tensor:
    mix = scores_TE.gather(-1, ids_TK)
    if rule.gating is Gating.SOFTMAX_OF_CHOSEN:
        mix = mix.softmax(-1)
    if rule.is_normalised:
        mix = mix / mix.sum(-1, keepdim=True).clamp_min(_SMALLEST_SUM)
    return mix if rule.scale == 1.0 else mix * rule.scale


def _scores(logits_TE: torch.Tensor, gating: Gating) -> torch.Tensor:
    match gating:
        case Gating.SOFTMAX:
            return logits_TE.softmax(-1)
        case Gating.SIGMOID:
            return logits_TE.sigmoid()
        case Gating.SQRT_SOFTPLUS:
            return F.softplus(logits_TE).sqrt()
        case Gating.SOFTMAX_OF_CHOSEN:
            return logits_TE


def _best(scores_TE: torch.Tensor, rule: RouterParams) -> torch.Tensor:
    if rule.n_groups == 1:
        return scores_TE.topk(rule.n_used, -1).indices
    T, E = scores_TE.shape
    groups = scores_TE.view(T, rule.n_groups, E // rule.n_groups)
    worth = groups.topk(min(rule.n_best, groups.shape[-1]), -1).values.sum(-1)
    out = torch.ones_like(worth, dtype=torch.bool).scatter(-1, worth.topk(rule.n_groups_used, -1).indices, False)
    return groups.masked_fill(out[..., None], float("-inf")).view(T, E).topk(rule.n_used, -1).indices
