"""How a router turns its logits into a choice of experts, as a file gives it; `models.router` computes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from overspill.errors import UserError
from overspill.gguf.keys import Keys


class Gating(IntEnum):
    """What makes a weight of a logit; numbered as in `expert_gating_func`."""

    SOFTMAX = 1
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3
    SQRT_SOFTPLUS = 4


@dataclass(frozen=True, kw_only=True)
class RouterParams:
    """n_used: experts of a token. is_normalised: their weights are divided by their sum. scale: of the weights, last.

    n_groups: consecutive runs of experts, of which the best n_groups_used take part; 1 = no groups. n_best: a group
    is as good as the sum of its n_best largest scores.
    """

    gating: Gating
    n_used: int
    is_normalised: bool
    scale: float
    n_groups: int
    n_groups_used: int
    n_best: int = 2

    @classmethod
    def from_keys(
        cls, a: Keys, n_expert: int, n_used: int, *, gating: Gating = Gating.SOFTMAX, is_normalised: bool = True
    ) -> RouterParams:
        """Read the `expert_*` keys of an architecture's scope; `gating` and `is_normalised` hold where it has none."""
        n_groups, n_groups_used = _groups(a, n_expert, n_used)
        return cls(
            gating=_gating(a, gating),
            n_used=n_used,
            is_normalised=a.flag("expert_weights_norm", default=is_normalised),
            scale=a.f32("expert_weights_scale", default=0.0) or 1.0,
            n_groups=n_groups,
            n_groups_used=n_groups_used,
        )


def _gating(a: Keys, default: Gating) -> Gating:
    number = a.u32("expert_gating_func", default=0)
    if number not in (0, *Gating):
        known = ", ".join(f"{g.value} ({g.name.lower()})" for g in Gating)
        raise UserError(f"{a.full_name('expert_gating_func')} is {number}: only {known} are supported")
    return Gating(number) if number else default


def _groups(a: Keys, n_expert: int, n_used: int) -> tuple[int, int]:
    n_groups = max(1, a.u32("expert_group_count", default=1))
    if n_groups == 1:
        return 1, 1
    if n_expert % n_groups:
        raise UserError(f"{a.full_name('expert_group_count')} is {n_groups}: must divide expert_count, {n_expert}")
    n_groups_used = a.u32("expert_group_used_count", default=n_groups)
    if not 0 < n_groups_used <= n_groups or n_groups_used * (n_expert // n_groups) < n_used:
        raise UserError(
            f"{a.full_name('expert_group_used_count')} is {n_groups_used}: must be from 1 to expert_group_count, "
            f"{n_groups}, and leave at least expert_used_count experts, {n_used}"
        )
    return n_groups, n_groups_used
