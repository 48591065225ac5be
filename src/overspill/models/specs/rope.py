"""Parameters of rotary position embedding, as a file gives them; `models.rope` turns them into angles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from overspill.errors import UserError
from overspill.gguf.cursor import shown
from overspill.gguf.keys import Keys


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """n_rot: rotated channels. scaling: none, linear or yarn. factor: context extension, 1 = none.

    log_multiplier: how much YaRN's attention temperature grows with the logarithm of the factor. beta_fast, beta_slow:
    channels that turn more often than the first within `n_ctx_orig` positions stay as they are, those that turn less
    often than the second are stretched by the whole factor.
    """

    n_rot: int
    base: float
    scaling: str
    factor: float
    n_ctx_orig: int
    attn_factor: float
    log_multiplier: float = 0.1
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @classmethod
    def from_keys(cls, a: Keys, head_dim: int) -> RopeParams:
        """Read `rope.*` of an architecture's scope `a`."""
        scaling = a.text("rope.scaling.type", default="linear")
        if scaling not in ("none", "linear", "yarn"):
            raise UserError(
                f"{a.full_name('rope.scaling.type')} is {shown(scaling)}: only none, linear and yarn are supported"
            )
        n_rot = a.u32("rope.dimension_count", default=head_dim)
        if n_rot == 0 or n_rot % 2 or n_rot > head_dim:
            raise UserError(
                f"{a.full_name('rope.dimension_count')} is {n_rot}: must be even, above 0 and at most the head size, "
                f"{head_dim}"
            )
        n_ctx_orig = a.u32("rope.scaling.original_context_length", default=a.u32("context_length"))
        if scaling == "yarn" and n_ctx_orig == 0:
            raise UserError(f"{a.full_name('rope.scaling.original_context_length')} is 0: yarn needs at least 1")
        return cls(
            n_rot=n_rot,
            base=rope_base(a, "rope.freq_base", 10000.0),
            scaling=scaling,
            factor=1.0 if scaling == "none" else _factor(a),
            n_ctx_orig=n_ctx_orig,
            attn_factor=a.f32("rope.scaling.attn_factor", default=1.0),
            beta_fast=_beta(a, "rope.scaling.yarn_beta_fast", cls.beta_fast),
            beta_slow=_beta(a, "rope.scaling.yarn_beta_slow", cls.beta_slow),
        )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: YaRN's attention temperature, 1 otherwise."""
        if self.scaling != "yarn":
            return self.attn_factor
        return self.attn_factor * (1.0 + self.log_multiplier * math.log(self.factor))


def rope_base(a: Keys, name: str, default: float) -> float:
    """The base of angles under a key of the scope `a`."""
    base = a.f32(name, default=default)
    if not 1.0 < base < math.inf:
        raise UserError(f"{a.full_name(name)} is {base:g}: must be above 1")
    return base


def _beta(a: Keys, name: str, default: float) -> float:
    """A bound between channels. Converters write it for all models; Kimi-K2 has 1 for both."""
    beta = a.f32(name, default=default)
    if not 0.0 < beta < math.inf:
        raise UserError(f"{a.full_name(name)} is {beta:g}: must be above 0")
    return beta


def _factor(a: Keys) -> float:
    """Context extension; 0 stands for none."""
    factor = a.f32("rope.scaling.factor", default=a.f32("rope.scale_linear", default=0.0))
    if not 0.0 <= factor < math.inf:
        raise UserError(f"{a.full_name('rope.scaling.factor')} is {factor:g}: must not be below 0")
    return factor or 1.0
