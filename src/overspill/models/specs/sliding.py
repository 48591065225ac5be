"""Layers of which some see only a window of the keys before a token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs.base import HParams
from overspill.models.specs.rope import RopeParams, rope_base


@dataclass(frozen=True, kw_only=True)
class SlidingHParams(HParams):
    """n_window: keys a query sees in a layer with a window. is_windowed: per layer. rope_window: of those layers."""

    n_window: int
    is_windowed: tuple[bool, ...]
    rope_window: RopeParams

    def window(self, i_layer: int) -> int | None:
        """`n_window` where the layer has one."""
        return self.n_window if self.is_windowed[i_layer] else None

    def rope_of(self, i_layer: int) -> RopeParams:
        """How the layer rotates queries and keys."""
        return self.rope_window if self.is_windowed[i_layer] else self.rope


def read_windows(a: Keys, n_layer: int, *, period: int) -> tuple[int, tuple[bool, ...]]:
    """Size of the window, and which layers have one.

    `attention.sliding_window_pattern` is a flag for each layer, or a period n: of n layers the last has no window
    (0: all have one). period: where the file does not say it. `UserError` for a window of 0.
    """
    n_window = a.u32("attention.sliding_window")
    if n_window == 0:
        raise UserError(f"{a.full_name('attention.sliding_window')} is 0: a token must see at least itself")
    name = "attention.sliding_window_pattern"
    if a.is_array(name):
        return n_window, a.per_layer_flags(name, a.u32("block_count"))[:n_layer]
    n = a.u32(name, default=period)
    return n_window, tuple(n == 0 or i % n < n - 1 for i in range(n_layer))


def window_rope(a: Keys, rope: RopeParams, base: float) -> RopeParams:
    """Rotation of layers with a window: `rope` with `rope.freq_base_swa`, or with `base` where the file has none."""
    return replace(rope, base=rope_base(a, "rope.freq_base_swa", base))
