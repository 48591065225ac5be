"""Rotary position embedding: the angles.

theta(pos, i) = pos * base^(-2i / n_rot) / factor_i, with linear or YaRN scaling (Peng et al., arXiv:2309.00071, with
the correction range floored and ceiled, as GGUF engines do).
"""

from __future__ import annotations

import math

import torch

from overspill.models.specs.rope import RopeParams


def frequencies(rope: RopeParams) -> torch.Tensor:
    """Angle per position of each pair, float32 `[n_rot / 2]`."""
    i = torch.arange(rope.n_rot // 2, dtype=torch.float64)
    plain = rope.base ** (-2.0 * i / rope.n_rot)
    if rope.scaling != "yarn":
        return (plain / rope.factor).float()
    low, high = math.floor(_yarn_dim(rope, rope.beta_fast)), math.ceil(_yarn_dim(rope, rope.beta_slow))
    low, high = max(0, low), min(rope.n_rot - 1, high)
    ramp = 1.0 - ((i - low) / max(0.001, high - low)).clamp(0.0, 1.0)
    return (plain / rope.factor * (1.0 - ramp) + plain * ramp).float()


def _yarn_dim(rope: RopeParams, n_turns: float) -> float:
    return rope.n_rot * math.log(rope.n_ctx_orig / (n_turns * 2 * math.pi)) / (2 * math.log(rope.base))


_TABLE_POSITIONS = 64


class Rope:
    """cos and sin for positions, on one device; `factors [n_rot / 2]` divides the frequencies (Llama 3).

    name: equal for the ropes of a device and model that turn alike; text, whose hash is computed once.
    """

    def __init__(self, params: RopeParams, factors: torch.Tensor | None, device: torch.device) -> None:
        self.name = f"{params} {factors is None}"
        plain = frequencies(params).to(device)
        self._frequencies = plain if factors is None else plain / factors
        self._magnitude = params.magnitude
        self._table: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, n_rot / 2]` for integer positions `[T]`."""
        theta = positions.float()[:, None] * self._frequencies
        return theta.cos() * self._magnitude, theta.sin() * self._magnitude

    def angles_at(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for one position, `[1, n_rot / 2]`: computed for those that follow as well, which are next."""
        first = position // _TABLE_POSITIONS * _TABLE_POSITIONS
        table = self._table
        if table is None or table[0] != first:
            positions = torch.arange(first, first + _TABLE_POSITIONS, device=self._frequencies.device)
            self._table = table = first, *self.angles(positions)
        _, cos, sin = table
        row = slice(position - first, position - first + 1)
        return cos[row], sin[row]
