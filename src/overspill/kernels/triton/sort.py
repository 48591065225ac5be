"""From the router's choice to rows in expert order: which row of the products belongs to which token and rank.

One launch, no atomics, no host: a program per expert scans all (token, rank) pairs twice, first counting those that
belong before its own, then writing where its own go, in pair order. So the order is stable and always the same.

Row tiles of the products are numbered without a prefix sum over experts: those of slot s start at tile
offsets[s] // M + s, which leaves room for all of them, since a slot of n rows needs at most ceil(n / M) tiles and
offsets[s + 1] // M + s + 1 is never less than the sum. Unused tiles say so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv
from overspill.kernels.triton.workspace import Workspace

_TUNING = Tuning(n_warps=8)
_PAIRS = 2048
_TILES = 64


@triton.jit(do_not_specialize=["n_pairs", "first", "n_slots", "n_tiles"])
def _sort(
    ids, slot_of, order, inverse, offsets, tiles, n_pairs, first, n_slots, n_tiles,
    BLOCK: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Program s: the pairs of slot first + s; program n_slots: the pairs whose expert is not here."""
    s = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    n_before = 0
    n_own = 0
    for start in range(0, n_pairs, BLOCK):
        i = start + lanes
        is_there = i < n_pairs
        slot = tl.load(slot_of + tl.load(ids + i, mask=is_there, other=0), mask=is_there, other=-1) - first
        is_here = (slot >= 0) & (slot < n_slots)
        n_before += tl.sum((is_here & (slot < s)).to(tl.int32))
        n_own += tl.sum((is_here & (slot == s)).to(tl.int32))
    tl.store(offsets + s, n_before)
    row = n_before
    for start in range(0, n_pairs, BLOCK):
        i = start + lanes
        is_there = i < n_pairs
        slot = tl.load(slot_of + tl.load(ids + i, mask=is_there, other=0), mask=is_there, other=-1) - first
        is_here = (slot >= 0) & (slot < n_slots)
        is_own = is_here & (slot == s)
        at = row + tl.cumsum(is_own.to(tl.int32)) - 1
        tl.store(order + at, i, mask=is_own)
        tl.store(inverse + i, at, mask=is_own)
        tl.store(inverse + i, at * 0 - 1, mask=is_there & (is_here == 0) & (s == n_slots))
        row += tl.sum(is_own.to(tl.int32))
    first_tile = n_before // M + s
    end_tile = (n_before + n_own) // M + s + 1
    if s == n_slots:
        end_tile = n_tiles
    n_used = (n_own + M - 1) // M
    lanes = tl.arange(0, TILES)
    for start in range(first_tile, end_tile, TILES):
        i = start + lanes
        is_used = i - first_tile < n_used
        is_there = i < end_tile
        tl.store(tiles + 2 * i, tl.where(is_used, s, -1), mask=is_there)
        tl.store(tiles + 2 * i + 1, n_before + (i - first_tile) * M, mask=is_there)


_kernel = Kernel(_sort)


class Sorted(NamedTuple):
    """Pairs (token, rank), numbered token * K + rank, in the order of the slots of their experts.

    order: pair of each row, `[T K]`; rows from offsets[-1] on are not defined. inverse: row of each pair, -1 where its
    expert is not here. offsets: `[n + 1]`, first row of each slot. tiles: `[n_tiles, 2]`, slot (or -1) and first row.
    All int32.
    """

    order: torch.Tensor
    inverse: torch.Tensor
    offsets: torch.Tensor
    tiles: torch.Tensor


def sort_pairs(
    ids: torch.Tensor, slot_of: torch.Tensor, first: int, n_slots: int, tile_rows: int, workspace: Workspace
) -> Sorted:
    """Order pairs by slot, for the slots `first <= slot < first + n_slots`.

    ids: int32 `[T, K]`, contiguous. slot_of: int32 `[E]` on the same device, -1 for experts that are not here.
    """
    n_pairs = ids.numel()
    n_tiles = n_pairs // tile_rows + n_slots + 1
    order = workspace.take("order", (n_pairs,), torch.int32)
    inverse = workspace.take("inverse", (n_pairs,), torch.int32)
    offsets = workspace.take("offsets", (n_slots + 1,), torch.int32)
    tiles = workspace.take("tiles", (n_tiles, 2), torch.int32)
    args = (ids, slot_of, order, inverse, offsets, tiles, n_pairs, first, n_slots, n_tiles)
    _kernel((n_slots + 1,), args, (_PAIRS, tile_rows, _TILES), _TUNING)
    return Sorted(order, inverse, offsets, tiles)


def max_tiles(n_pairs: int, n_slots: int, tile_rows: int) -> int:
    """Upper bound of tiles, and the number of entries of `Sorted.tiles`."""
    return cdiv(n_pairs, tile_rows) + n_slots + 1
