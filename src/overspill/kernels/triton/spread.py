"""`kernels.spread` on the device: no one waits for the host to know which experts the ids name.

`fetch` reads host memory in a kernel, over the device's own link. All its programs work out the same list of experts
from `who`, and take the pieces of these in turn.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from overspill.kernels import Shares
from overspill.kernels.spread import PARTS_OF_ONE, bounds, stacks_in
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

_N_PROGRAMS = 528
_PIECE = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["n_pairs"])
def _divide(
    ids, table, who, n_pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, PARTIES: tl.constexpr, ONE: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """table: int32 `[2, PARTIES]`: where the parts begin, and whose they are."""
    experts = tl.arange(0, BLOCK_E)
    named = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, n_pairs, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(ids + at, mask=at < n_pairs, other=-1)
        named += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    named = (named > 0).to(tl.int32)
    n = tl.sum(named)
    place = tl.cumsum(named) - 1
    party = tl.full([BLOCK_E], -1, tl.int32)
    for i in tl.static_range(PARTIES):
        begins = (tl.load(table + i) * n + ONE // 2) // ONE
        party = tl.where(place >= begins, tl.load(table + PARTIES + i), party)
    tl.store(who + experts, tl.where(named > 0, party, -1), mask=experts < E)


@triton.jit(do_not_specialize=["party"])
def _fetch(
    who, gate, up, down, gate_room, up_room, down_room, slot_of, party,
    E: tl.constexpr, BLOCK_E: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr,
    ROOM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """GATE, UP, DOWN: words of one expert's matrices. ROOM: experts that there is room for."""
    experts = tl.arange(0, BLOCK_E)
    mine = (tl.load(who + experts, mask=experts < E, other=-1) == party).to(tl.int32)
    slots = tl.where(mine > 0, tl.cumsum(mine) - 1, -1)
    slots = tl.where(slots < ROOM, slots, -1)
    if tl.program_id(0) == 0:
        tl.store(slot_of + experts, slots, mask=experts < E)
    gates: tl.constexpr = (GATE + PIECE - 1) // PIECE
    ups: tl.constexpr = (UP + PIECE - 1) // PIECE
    downs: tl.constexpr = (DOWN + PIECE - 1) // PIECE
    pieces: tl.constexpr = gates + ups + downs
    for i in range(tl.program_id(0), tl.minimum(tl.sum(mine), ROOM) * pieces, tl.num_programs(0)):
        slot = i // pieces
        piece = i % pieces
        expert = tl.sum(tl.where(slots == slot, experts, 0)).to(tl.int64)
        if piece < gates:
            _move(gate + expert * GATE, gate_room + slot.to(tl.int64) * GATE, piece * PIECE, GATE, PIECE)
        elif piece < gates + ups:
            _move(up + expert * UP, up_room + slot.to(tl.int64) * UP, (piece - gates) * PIECE, UP, PIECE)
        else:
            first = (piece - gates - ups) * PIECE
            _move(down + expert * DOWN, down_room + slot.to(tl.int64) * DOWN, first, DOWN, PIECE)


@triton.jit
def _move(source, target, first, n, PIECE: tl.constexpr):
    at = first + tl.arange(0, PIECE)
    tl.store(target + at, tl.load(source + at, mask=at < n, other=0), mask=at < n)


_divide_kernel = Kernel(_divide)
_fetch_kernel = Kernel(_fetch)


def divide(ids: torch.Tensor, shares: Shares, who: torch.Tensor) -> None:
    """`kernels.Divide`."""
    table = _table(tuple(shares), ids.device)
    constants = (len(who), max(16, power_of_two(len(who))), len(shares), PARTS_OF_ONE, 64)
    _divide_kernel((1,), (ids.contiguous(), table, who, ids.numel()), constants, Tuning(n_warps=4))


@cache
def _table(shares: tuple[tuple[int, int], ...], device: torch.device) -> torch.Tensor:
    """Sent once, before anything is recorded."""
    return torch.tensor([bounds(shares)[:-1], [party for party, _ in shares]], dtype=torch.int32).to(device)


def fetch(
    source: ExpertWeights, who: torch.Tensor, party: int, room: torch.Tensor, vectors: ExpertVectors
) -> ExpertWeights:
    """`kernels.Fetch`; host memory must be pinned."""
    stacks = stacks_in(room, source.parts)
    slot_of = torch.empty_like(who)
    words = _word_type([part.data[0].numel() for part in source.parts])
    sources, rooms = ([_words(part, words) for part in parts] for parts in (source.parts, stacks))
    sizes = [part.data[0].numel() // words.itemsize for part in source.parts]
    E = len(who)
    n_programs = min(_N_PROGRAMS, E * sum(cdiv(size, _PIECE) for size in sizes))
    constants = (E, max(16, power_of_two(E)), *sizes, stacks[0].shape[0], _PIECE)
    _fetch_kernel((n_programs,), (who, *sources, *rooms, slot_of, party), constants, Tuning(n_warps=4))
    return ExpertWeights(*stacks, slot_of, vectors)


def _word_type(sizes: list[int]) -> torch.dtype:
    """The widest words that matrices of so many bytes consist of."""
    return next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))


def _words(part: QTensor, words: torch.dtype) -> torch.Tensor:
    return part.data.view(-1).view(words)
