"""Routing against a plain reading of the rules, in all combinations; and what files may say about it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.router import pick_experts
from overspill.models.specs.router import Gating, RouterParams

T, E, K = 7, 12, 3
COMBINATIONS = [
    RouterParams(
        gating=gating, n_used=K, is_normalised=norm, scale=scale, n_groups=groups, n_groups_used=used, n_best=best
    )
    for gating, norm, scale, (groups, used), best in product(
        Gating, (False, True), (1.0, 2.5), ((1, 1), (4, 2), (3, 1), (4, 4)), (1, 2)
    )
]


def by_hand(logits: NDArray[np.float64], rule: RouterParams, bias: NDArray[np.float64]) -> dict[int, float]:
    """Ids and weights of one token."""
    scores = {
        Gating.SOFTMAX: np.exp(logits) / np.exp(logits).sum(),
        Gating.SIGMOID: 1 / (1 + np.exp(-logits)),
        Gating.SOFTMAX_OF_CHOSEN: logits,
        Gating.SQRT_SOFTPLUS: np.sqrt(np.log1p(np.exp(logits))),
    }[rule.gating]
    biased, size = scores + bias, E // rule.n_groups
    groups = [range(g * size, (g + 1) * size) for g in range(rule.n_groups)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[: rule.n_best]))
    allowed = [e for group in groups[: rule.n_groups_used] for e in group]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: rule.n_used]
    weights = scores[chosen]
    if rule.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = np.exp(weights) / np.exp(weights).sum()
    if rule.is_normalised:
        weights = weights / weights.sum()
    return dict(zip(chosen, weights * rule.scale, strict=True))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rule", COMBINATIONS, ids=lambda rule: "-".join(str(v) for v in vars(rule).values()))
def test_all_combinations(rule: RouterParams, has_bias: bool) -> None:
    rng = np.random.default_rng(3)
    logits, bias = rng.normal(0, 2, (T, E)), rng.normal(0, 0.5, E) * has_bias
    ids, mix = pick_experts(torch.tensor(logits), rule, torch.tensor(bias).float() if has_bias else None)
    assert ids.dtype is torch.int32
    assert mix.dtype is torch.float32
    for t in range(T):
        expected = by_hand(logits[t], rule, bias)
        assert ids[t].tolist() == list(expected)
        np.testing.assert_allclose(mix[t].numpy(), list(expected.values()), rtol=1e-5)


def test_the_bias_decides_but_does_not_weigh() -> None:
    rule = RouterParams(gating=Gating.SIGMOID, n_used=1, is_normalised=False, scale=1.0, n_groups=1, n_groups_used=1)
    ids, mix = pick_experts(torch.tensor([[2.0, 1.0]]), rule, torch.tensor([0.0, 9.0]))
    assert ids.tolist() == [[1]]
    assert mix.item() == torch.sigmoid(torch.tensor(1.0)).item()


def test_saturated_scores_are_still_told_apart() -> None:
    rule = RouterParams(gating=Gating.SIGMOID, n_used=1, is_normalised=False, scale=1.0, n_groups=1, n_groups_used=1)
    assert pick_experts(torch.tensor([[30.0, 31.0, 30.5]]), rule, None)[0].item() == 1


def params(**values: bool | int | float) -> RouterParams:
    keys = Keys.of({f"x.{name}": value for name, value in values.items()}, "test.gguf")
    return RouterParams.from_keys(keys.scoped("x"), 16, 4, gating=Gating.SIGMOID, is_normalised=False)


def test_keys() -> None:
    plain = RouterParams(gating=Gating.SIGMOID, n_used=4, is_normalised=False, scale=1.0, n_groups=1, n_groups_used=1)
    assert params() == params(expert_gating_func=0, expert_weights_scale=0.0, expert_group_count=0) == plain
    full = params(expert_gating_func=1, expert_weights_norm=True, expert_weights_scale=2.5, expert_group_count=4)
    assert full == RouterParams(
        gating=Gating.SOFTMAX, n_used=4, is_normalised=True, scale=2.5, n_groups=4, n_groups_used=4
    )
    assert params(expert_group_count=4, expert_group_used_count=2).n_groups_used == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_gating_func": 9}, r"x\.expert_gating_func is 9: only 1 \(softmax\), 2 \(sigmoid\)"),
        ({"expert_group_count": 5}, r"x\.expert_group_count is 5: must divide expert_count, 16"),
        ({"expert_group_count": 4, "expert_group_used_count": 5}, r"x\.expert_group_used_count is 5"),
        ({"expert_group_count": 8, "expert_group_used_count": 1}, r"leave at least expert_used_count experts, 4"),
        ({"expert_weights_norm": 1}, r"x\.expert_weights_norm .* expected a bool"),
    ],
)
def test_defects_are_named(values: dict[str, bool | int | float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        params(**values)
