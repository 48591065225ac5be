"""How the kernels for few tokens are cut, all in one place: chosen by `benchmarks/gpu_decode_kernels.py` on an H200.

A cut decides the order of sums, so a change here changes last bits of results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from overspill.gguf.types import TensorType
from overspill.kernels.triton.launch import Tuning, power_of_two


class RowTile(NamedTuple):
    """Rows of a weight and values of a row that a program takes at once, and how its kernel is compiled."""

    n_rows: int
    width: int
    tuning: Tuning

    def width_for(self, K: int) -> int:
        """No wider than the row."""
        return max(32, min(self.width, power_of_two(K)))


_T = TensorType
Tiles = Mapping[TensorType | None, RowTile]
"""By type of the weight; None: all others."""

MAX_TOKENS = 32
"""More tokens than that go through the kernels for many."""

TOKEN: Tiles = {
    _T.F32: RowTile(2, 1024, Tuning(4, 1)),
    _T.BF16: RowTile(4, 1024, Tuning(4, 1)),
    _T.F16: RowTile(4, 1024, Tuning(4, 1)),
    _T.Q8_0: RowTile(2, 2048, Tuning(4, 1)),
    None: RowTile(4, 512, Tuning(4, 1)),
}
TOKEN_OF_TALL: Tiles = {
    _T.BF16: RowTile(8, 2048, Tuning(4, 1)),
    _T.F16: RowTile(8, 2048, Tuning(4, 1)),
}
"""For weights of at least `TALL` rows, such as the head."""

SEVERAL: Tiles = {
    _T.BF16: RowTile(32, 128, Tuning(2, 4)),
    _T.F16: RowTile(32, 128, Tuning(2, 4)),
    None: RowTile(16, 256, Tuning(4, 2)),
}
TALL = 32768
MIN_ROWS = 4224
"""One plain weight of fewer rows and several tokens is left to torch, which cuts its columns too."""

EXPERT_GATE_UP: Tiles = {
    _T.F32: RowTile(2, 1024, Tuning(4, 1)),
    _T.BF16: RowTile(2, 1024, Tuning(4, 1)),
    _T.F16: RowTile(2, 1024, Tuning(4, 1)),
    _T.Q8_0: RowTile(2, 2048, Tuning(2, 1)),
    None: RowTile(4, 512, Tuning(4, 1)),
}
EXPERT_DOWN: Tiles = {
    _T.Q8_0: RowTile(4, 1024, Tuning(2, 1)),
    None: RowTile(2, 256, Tuning(4, 1)),
}
EXPERT_DOWN_OF_ONE: Mapping[TensorType, tuple[RowTile, RowTile]] = {
    _T.Q8_0: (RowTile(1, 256, Tuning(1, 1)), RowTile(1, 512, Tuning(1, 1))),
}
"""For one token, which leaves a GPU idle where programs are large: of whole experts, and of slices."""

ROUTER = RowTile(1, 1024, Tuning(8, 1))


def token_tile(type: TensorType, n_rows: int) -> RowTile:
    """The tile for one token and weights of so many rows in all."""
    return TOKEN_OF_TALL[type] if n_rows >= TALL and type in TOKEN_OF_TALL else tile_of(TOKEN, type)


def down_tile(type: TensorType, n_tokens: int, n_slices: int) -> RowTile:
    """The tile for the second product of experts."""
    if n_tokens == 1 and type in EXPERT_DOWN_OF_ONE:
        return EXPERT_DOWN_OF_ONE[type][n_slices > 1]
    return tile_of(EXPERT_DOWN, type)


def tile_of(tiles: Tiles, type: TensorType) -> RowTile:
    """The tile for a type."""
    return tiles[type] if type in tiles else tiles[None]
