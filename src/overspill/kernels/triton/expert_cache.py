"""`kernels.expert_cache` on the device: one program finds what lies in slots, shares out the rest, and replaces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.gpu_memory import MAX_SLICES
from overspill.kernels.expert_cache import HEAT_DECAY, HEAT_OF_USE
from overspill.kernels.sharing import CacheState, Shares
from overspill.kernels.spread import PARTS_OF_ONE
from overspill.kernels.triton.launch import Kernel, Tuning
from overspill.kernels.triton.spread import PAIRS, block_of, count_ids, count_parties, table_of

_TILE = 8192


@triton.jit(do_not_specialize=["n_pairs"])
def _look_up(
    ids, table, who, tally, slot_of, heat, fills, rest, keys, given, n_pairs,
    E: tl.constexpr, BLOCK_E: tl.constexpr, PARTIES: tl.constexpr, ONE: tl.constexpr, PAIRS: tl.constexpr,
    LAST_IS_WHOLE: tl.constexpr, SLOTS: tl.constexpr, SLICES: tl.constexpr, UNIT: tl.constexpr, DECAY: tl.constexpr,
    USE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """E: slices of all experts. table: see `spread._divide`. keys, given: scratch `[BLOCK_E]`, by which they see each
    other."""
    experts = tl.arange(0, BLOCK_E)
    is_there = experts < E
    named = count_ids(ids, experts // SLICES, n_pairs, PAIRS)
    slots = tl.load(slot_of + experts, mask=is_there, other=-1)
    warm = tl.load(heat + experts, mask=is_there, other=0)
    warm += named * USE - ((warm + (1 << DECAY) - 1) >> DECAY)
    is_hit = (named > 0) & (slots >= 0)
    is_missing = (named > 0) & (slots < 0) & is_there
    is_idle = (named == 0) & (slots >= 0)
    is_whole = is_missing
    for i in tl.static_range(SLICES):
        slice_slots = tl.load(slot_of + experts // SLICES * SLICES + i, mask=is_there, other=-1)
        is_whole = is_whole & (slice_slots < 0)
    # Of missing ones the hottest has the largest key (rests of experts before others), of idle ones the coldest; the
    # former are above 0.
    rank = warm.to(tl.int64) * BLOCK_E + tl.where(is_missing & (is_whole == 0), 1 << 40, 0).to(tl.int64)
    key = tl.where(is_missing, rank + BLOCK_E - experts, tl.where(is_idle, -(rank + experts + 1), 0))
    tl.store(keys + experts, key)
    tl.debug_barrier()
    place = tl.zeros([BLOCK_E], tl.int32)
    for first in tl.static_range(0, BLOCK_E, CHUNK):
        others = tl.load(keys + first + tl.arange(0, CHUNK))
        is_alike = (key[:, None] > 0) | (others[None, :] < 0)
        place += tl.sum(((others[None, :] > key[:, None]) & is_alike).to(tl.int32), axis=1)
    n_missing = tl.sum(is_missing.to(tl.int32))
    n_held = tl.sum((slots >= 0).to(tl.int32))
    n_hits = tl.sum(is_hit.to(tl.int32))
    owner = tl.load(table + PARTIES)
    party = tl.full([BLOCK_E], -1, tl.int32)
    for i in tl.static_range(PARTIES):
        begins = (tl.load(table + i) * n_missing + ONE - 1) // ONE
        if i > 0:
            begins = tl.maximum(begins, 1)
        if LAST_IS_WHOLE and i == PARTIES - 1:
            n_whole = tl.sum(is_whole.to(tl.int32)) // SLICES
            n_experts = tl.minimum((n_missing - begins + SLICES // 2) // SLICES, n_whole)
            begins = n_missing - tl.minimum(n_experts, tl.maximum(n_missing - 1, 0) // SLICES) * SLICES
        party = tl.where(is_missing & (place >= begins), tl.load(table + PARTIES + i), party)
    count_parties(party, table, tally, PARTIES, UNIT)
    tl.store(tally, tl.load(tally) + n_hits * UNIT)
    tl.store(who + experts, tl.where(is_hit, owner, party), mask=is_there)
    tl.store(heat + experts, warm, mask=is_there)

    is_mine = party == owner
    n_free = SLOTS - n_held
    is_evicted = is_idle & (place < tl.sum(is_mine.to(tl.int32)) - n_free)
    tl.store(given + place, slots, mask=is_idle)
    tl.debug_barrier()
    from_idle = is_mine & (place >= n_free) & (place - n_free < n_held - n_hits)
    slot = tl.load(given + place - n_free, mask=from_idle, other=-1)
    slot = tl.where(is_mine & (place < n_free), n_held + place, slot)
    tl.store(fills + experts, slot, mask=is_there)
    tl.store(rest + experts, tl.where(is_mine & (slot < 0), owner, -1), mask=is_there)
    tl.store(slot_of + experts, tl.where(is_mine, slot, tl.where(is_evicted, -1, slots)), mask=is_there)


_look_up_kernel = Kernel(_look_up)


def look_up(
    ids: torch.Tensor,
    shares: Shares,
    who: torch.Tensor,
    tally: torch.Tensor,
    state: CacheState,
    whole: int | None = None,
) -> None:
    """`kernels.LookUp`."""
    E, BLOCK_E, n_parties = len(who), block_of(len(who)), len(shares)
    keys = torch.empty(BLOCK_E, dtype=torch.int64, device=ids.device)
    given = torch.empty(BLOCK_E, dtype=torch.int32, device=ids.device)
    args = (ids.contiguous(), table_of(tuple(shares), ids.device), who, tally, *state[2:], keys, given, ids.numel())
    last_is_whole = n_parties > 1 and shares[-1][0] == whole
    sizes = (E, BLOCK_E, n_parties, PARTS_OF_ONE, PAIRS, last_is_whole, state.n_slots, state.n_slices)
    unit = MAX_SLICES // state.n_slices
    chunk, tuning = min(BLOCK_E, _TILE // BLOCK_E), Tuning(n_warps=8 if BLOCK_E <= 128 else 16)
    _look_up_kernel((1,), args, (*sizes, unit, HEAT_DECAY, HEAT_OF_USE, chunk), tuning)
