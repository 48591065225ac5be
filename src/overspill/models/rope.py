"""Rotary position embedding: parameters from the file, and the angles.

theta(pos, i) = pos * base^(-2i / n_rot) / factor_i, with linear or YaRN scaling (Peng et al., arXiv:2309.00071, with
the correction range floored and ceiled, as GGUF engines do).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from overspill.errors import UserError
from overspill.gguf.keys import Keys

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, kw_only=True)
class RopeParams:
    """n_rot: rotated channels. scaling: none, linear or yarn. factor: context extension, 1 = none."""

    n_rot: int
    base: float
    scaling: str
    factor: float
    n_ctx_orig: int
    attn_factor: float

    @classmethod
    def from_keys(cls, a: Keys, head_dim: int) -> RopeParams:
        """Read `rope.*` of an architecture's scope `a`."""
        scaling = a.text("rope.scaling.type", default="linear")
        if scaling not in ("none", "linear", "yarn"):
            raise UserError(f"rope.scaling.type is {scaling!r}: only none, linear and yarn are supported")
        n_rot = a.u32("rope.dimension_count", default=head_dim)
        if n_rot % 2 or n_rot > head_dim:
            raise UserError(f"rope.dimension_count is {n_rot}: must be even and at most the head size, {head_dim}")
        factor = a.f32("rope.scaling.factor", default=a.f32("rope.scale_linear", default=0.0))
        return cls(
            n_rot=n_rot,
            base=a.f32("rope.freq_base", default=10000.0),
            scaling=scaling,
            factor=1.0 if scaling == "none" or factor == 0.0 else factor,
            n_ctx_orig=a.u32("rope.scaling.original_context_length", default=a.u32("context_length")),
            attn_factor=a.f32("rope.scaling.attn_factor", default=1.0),
        )

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by: YaRN's attention temperature, 1 otherwise."""
        if self.scaling != "yarn":
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(self.factor))

    def frequencies(self) -> torch.Tensor:
        """Angle per position of each pair, float32 `[n_rot / 2]`."""
        i = torch.arange(self.n_rot // 2, dtype=torch.float64)
        plain = self.base ** (-2.0 * i / self.n_rot)
        if self.scaling != "yarn":
            return (plain / self.factor).float()
        low, high = self._yarn_dim(_BETA_FAST, math.floor), self._yarn_dim(_BETA_SLOW, math.ceil)
        low, high = max(0.0, low), min(self.n_rot - 1.0, high)
        ramp = 1.0 - ((i - low) / max(0.001, high - low)).clamp(0.0, 1.0)
        return (plain / self.factor * (1.0 - ramp) + plain * ramp).float()

    def _yarn_dim(self, n_turns: float, rounding: type[int] | object) -> float:
        assert callable(rounding)
        dim = self.n_rot * math.log(self.n_ctx_orig / (n_turns * 2 * math.pi)) / (2 * math.log(self.base))
        return float(rounding(dim))


class Rope:
    """cos and sin for positions, on one device; `factors [n_rot / 2]` divides the frequencies (Llama 3)."""

    def __init__(self, params: RopeParams, factors: torch.Tensor | None, device: torch.device) -> None:
        frequencies = params.frequencies().to(device)
        self._frequencies = frequencies if factors is None else frequencies / factors
        self._magnitude = params.magnitude

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, n_rot / 2]` for integer positions `[T]`."""
        theta = positions.float()[:, None] * self._frequencies
        return theta.cos() * self._magnitude, theta.sin() * self._magnitude
