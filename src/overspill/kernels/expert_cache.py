"""Experts that a layer's device keeps in slots: which they are, and what replaces them. In torch.

All is worked out where the ids are, step by step, from the ids and what was named before: nobody waits for the host,
and the same tokens leave the same experts in the slots. Whatever the owner fetches goes into a slot, that of the
coldest expert which no id names in this step: it costs no byte more than fetching it to anywhere else, and what does
not come back is the coldest soon. Slots 0 ... n - 1 are those in use, so the next free one is known without a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from overspill.gpu_memory import MAX_SLICES
from overspill.kernels.sharing import CacheState, Shares
from overspill.kernels.spread import PARTS_OF_ONE, bounds, put_slices, stacks_in
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

HEAT_OF_USE: Final = 1 << 10
HEAT_DECAY: Final = 7
"""Of its heat an expert loses a 128th (rounded up) at each step of its layer. In whole numbers, so that it is the same
everywhere."""


def look_up(
    ids: torch.Tensor,
    shares: Shares,
    who: torch.Tensor,
    tally: torch.Tensor,
    state: CacheState,
    whole: int | None = None,
) -> None:
    """`kernels.LookUp`."""
    S = state.n_slices
    named = torch.bincount(ids.long().flatten(), minlength=len(who) // S).repeat_interleave(S)
    state.heat.sub_((state.heat + (1 << HEAT_DECAY) - 1) >> HEAT_DECAY).add_(named.int() * HEAT_OF_USE)
    heat, slot_of = state.heat.tolist(), state.slot_of.tolist()
    chosen = torch.nonzero(named)[:, 0].tolist()
    hits = [e for e in chosen if slot_of[e] >= 0]
    is_whole = [max(slot_of[e // S * S : e // S * S + S]) < 0 for e in range(len(who))]
    # Rests of experts first, so that those who take whole ones find them at the end.
    missing = sorted((e for e in chosen if slot_of[e] < 0), key=lambda e: (is_whole[e], -heat[e], e))
    who.fill_(-1)
    who[hits] = shares[0][0]
    tally[0] += len(hits) * (MAX_SLICES // S)
    cuts = _cuts(shares, len(missing), sum(is_whole[e] for e in missing), S, whole)
    for (party, _), first, last in zip(shares, cuts, cuts[1:], strict=False):
        who[missing[first:last]] = party
        tally[1 + party] += (last - first) * (MAX_SLICES // S)
    _replace(missing[: cuts[1]], set(chosen), shares[0][0], state)


def _cuts(shares: Shares, n: int, n_whole: int, n_slices: int, whole: int | None) -> list[int]:
    """Where each party's part of n missing slices begins, and n. n_whole: of experts of which all are missing."""
    cuts = [-(-b * n // PARTS_OF_ONE) for b in bounds(shares)]
    cuts[1:] = [max(cut, min(1, n)) for cut in cuts[1:]]
    if len(shares) > 1 and shares[-1][0] == whole:
        n_experts = min((n - cuts[-2] + n_slices // 2) // n_slices, n_whole // n_slices, max(0, n - 1) // n_slices)
        cuts[-2] = n - n_experts * n_slices
    return cuts


def _replace(fetched: list[int], chosen: set[int], owner: int, state: CacheState) -> None:
    """Give slots to what the owner fetches, the hottest first."""
    heat, slot_of = state.heat.tolist(), state.slot_of.tolist()
    held = [e for e, slot in enumerate(slot_of) if slot >= 0]
    idle = sorted((e for e in held if e not in chosen), key=lambda e: (heat[e], e))
    n_free = state.n_slots - len(held)
    slots = [*range(len(held), state.n_slots), *(slot_of[e] for e in idle)][: len(fetched)]
    state.slot_of[idle[: max(0, len(fetched) - n_free)]] = -1
    state.fills.fill_(-1)
    state.rest.fill_(-1)
    state.fills[fetched[: len(slots)]] = torch.tensor(slots, dtype=torch.int32)
    state.slot_of[fetched[: len(slots)]] = torch.tensor(slots, dtype=torch.int32)
    state.rest[fetched[len(slots) :]] = owner


def fill(source: ExpertWeights, state: CacheState, memory: torch.Tensor, vectors: ExpertVectors) -> ExpertWeights:
    """`kernels.Fill`."""
    stacks = stacks_in(memory, source.parts, state.n_slices)
    (wanted,) = torch.nonzero(state.fills >= 0, as_tuple=True)
    put_slices(source, wanted.tolist(), stacks, state.fills[wanted].tolist(), state.n_slices)
    return ExpertWeights(*stacks, state.slot_of.numpy(), vectors, state.n_slices)


def place(kept: ExpertWeights, target: Sequence[QTensor], first: int) -> None:
    """`kernels.Place`."""
    n, n_slices = target[0].shape[0], kept.n_slices
    slots = torch.as_tensor(kept.slot_of).view(-1, n_slices)[first : first + n].tolist()
    for i, of_expert in enumerate(slots):
        if min(of_expert) < 0:
            continue
        for part, stack in zip(target, kept.parts, strict=True):
            is_down = stack is kept.down
            rows = part.data[i].unflatten(1 if is_down else 0, (n_slices, -1))
            for k, slot in enumerate(of_expert):
                (rows[:, k] if is_down else rows[k]).copy_(stack.data[slot])
