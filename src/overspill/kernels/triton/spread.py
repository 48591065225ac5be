"""`kernels.spread` on the device: no one waits for the host to know which experts the ids name.

`fetch` reads host memory in a kernel, over the device's own link. All its programs work out the same list of experts
from `who`, and take the pieces of these in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from overspill.gpu_memory import MAX_SLICES
from overspill.kernels.sharing import CacheState, Shares
from overspill.kernels.spread import PARTS_OF_ONE, bounds, stacks_in
from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

_N_PROGRAMS = 528
_N_PLACING = 4 * _N_PROGRAMS
_PIECE = 1024
PAIRS = 16
_FEW_PAIRS, _MANY_PAIRS = 256, 64
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["n_pairs"])
def _divide(
    ids, table, who, tally, n_pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, PARTIES: tl.constexpr,
    SLICES: tl.constexpr, UNIT: tl.constexpr, ONE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """E: slices of experts. table: int32 `[3, PARTIES]`: where parts begin, whose they are, slices taken at a time."""
    experts = tl.arange(0, BLOCK_E)
    named = (count_ids(ids, experts // SLICES, n_pairs, PAIRS) > 0).to(tl.int32)
    n = tl.sum(named)
    place = tl.cumsum(named) - 1
    party = tl.full([BLOCK_E], -1, tl.int32)
    for i in tl.static_range(PARTIES):
        begins = (tl.load(table + i) * n + ONE // 2) // ONE
        at_a_time = tl.load(table + 2 * PARTIES + i)
        begins = (begins + at_a_time // 2) // at_a_time * at_a_time
        party = tl.where(place >= begins, tl.load(table + PARTIES + i), party)
    party = tl.where(named > 0, party, -1)
    tl.store(who + experts, party, mask=experts < E)
    count_parties(party, table, tally, PARTIES, UNIT)


@triton.jit
def count_ids(ids, experts, n_pairs, PAIRS: tl.constexpr):
    """How many of the ids name each expert."""
    named = tl.zeros_like(experts)
    for first in range(0, n_pairs, PAIRS):
        at = first + tl.arange(0, PAIRS)
        chosen = tl.load(ids + at, mask=at < n_pairs, other=-1)
        named += tl.sum((chosen[:, None] == experts[None, :]).to(tl.int32), axis=0)
    return named


@triton.jit
def count_parties(party, table, tally, PARTIES: tl.constexpr, UNIT: tl.constexpr):
    """Add each party's experts, or slices, to the tally; each counts UNIT."""
    for i in tl.static_range(PARTIES):
        number = tl.load(table + PARTIES + i)
        n = tl.sum((party == number).to(tl.int32))
        tl.store(tally + 1 + number, tl.load(tally + 1 + number) + n * UNIT)


@triton.jit(do_not_specialize=["party"])
def _fetch(
    which, gate, up, down, gate_room, up_room, down_room, slot_of, party,
    E: tl.constexpr, BLOCK_E: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr,
    DOWN_ROW: tl.constexpr, SLICES: tl.constexpr, ROOM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """which: the party of each expert, whose own go to slots in ascending order, and these to `slot_of`; where that is
    None, the slot of each, or -1. E: experts or slices of them; GATE, UP, DOWN: words of one's matrices; DOWN_ROW: of a
    row of the last. ROOM: slots that there are.

    Slices of gate and up are rows, one behind the other; those of down are parts of each row.
    """
    experts = tl.arange(0, BLOCK_E)
    given = tl.load(which + experts, mask=experts < E, other=-1)
    mine = ((given >= 0) if slot_of is None else (given == party)).to(tl.int32)
    order = tl.where(mine > 0, tl.cumsum(mine) - 1, -1)
    order = tl.where(order < ROOM, order, -1)
    slots = given if slot_of is None else order
    if slot_of is not None:  # noqa: SIM102  (known when compiled, unlike the other)
        if tl.program_id(0) == 0:
            tl.store(slot_of + experts, slots, mask=experts < E)
    gates: tl.constexpr = (GATE + PIECE - 1) // PIECE
    ups: tl.constexpr = (UP + PIECE - 1) // PIECE
    downs: tl.constexpr = (DOWN + PIECE - 1) // PIECE
    pieces: tl.constexpr = gates + ups + downs
    for i in range(tl.program_id(0), tl.minimum(tl.sum(mine), ROOM) * pieces, tl.num_programs(0)):
        is_it = order == i // pieces
        piece = i % pieces
        expert = tl.sum(tl.where(is_it, experts, 0)).to(tl.int64)
        slot = tl.sum(tl.where(is_it, slots, 0))
        if piece < gates:
            _move(gate + expert * GATE, gate_room + slot.to(tl.int64) * GATE, piece * PIECE, GATE, PIECE, GATE, 1)
        elif piece < gates + ups:
            _move(up + expert * UP, up_room + slot.to(tl.int64) * UP, (piece - gates) * PIECE, UP, PIECE, UP, 1)
        else:
            first = (piece - gates - ups) * PIECE
            source = down + expert // SLICES * (SLICES * DOWN) + expert % SLICES * DOWN_ROW
            _move(source, down_room + slot.to(tl.int64) * DOWN, first, DOWN, PIECE, DOWN_ROW, SLICES)


@triton.jit
def _move(source, target, first, n, PIECE: tl.constexpr, ROW: tl.constexpr, SLICES: tl.constexpr):
    """ROW: words of a row; in the source, SLICES of them stand side by side."""
    at = first + tl.arange(0, PIECE)
    tl.store(target + at, tl.load(source + _beside(at, ROW, SLICES), mask=at < n, other=0), mask=at < n)


@triton.jit
def _move_back(source, target, first, n, PIECE: tl.constexpr, ROW: tl.constexpr, SLICES: tl.constexpr):
    """The same where rows stand side by side in the target."""
    at = first + tl.arange(0, PIECE)
    tl.store(target + _beside(at, ROW, SLICES), tl.load(source + at, mask=at < n, other=0), mask=at < n)


@triton.jit
def _beside(at, ROW: tl.constexpr, SLICES: tl.constexpr):
    return at if SLICES == 1 else at // ROW * (ROW * SLICES) + at % ROW


@triton.jit(do_not_specialize=["first", "n"])
def _place(
    slot_of, gate_slots, up_slots, down_slots, gate, up, down, first, n,
    GATE: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, DOWN_ROW: tl.constexpr, SLICES: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Of n experts from the first on, those whose slices all lie in slots. Words as for `_fetch`."""
    gates: tl.constexpr = (GATE + PIECE - 1) // PIECE
    ups: tl.constexpr = (UP + PIECE - 1) // PIECE
    downs: tl.constexpr = (DOWN + PIECE - 1) // PIECE
    pieces: tl.constexpr = gates + ups + downs
    for i in range(tl.program_id(0), n * SLICES * pieces, tl.num_programs(0)):
        mine = tl.full([], 0, tl.int64) + i // pieces
        piece = i % pieces
        slot = tl.load(slot_of + first * SLICES + mine).to(tl.int64)
        least = slot
        for k in tl.static_range(SLICES):
            least = tl.minimum(least, tl.load(slot_of + (first + mine // SLICES) * SLICES + k).to(tl.int64))
        if least >= 0:
            if piece < gates:
                _move_back(gate_slots + slot * GATE, gate + mine * GATE, piece * PIECE, GATE, PIECE, GATE, 1)
            elif piece < gates + ups:
                _move_back(up_slots + slot * UP, up + mine * UP, (piece - gates) * PIECE, UP, PIECE, UP, 1)
            else:
                start = (piece - gates - ups) * PIECE
                target = down + mine // SLICES * (SLICES * DOWN) + mine % SLICES * DOWN_ROW
                _move_back(down_slots + slot * DOWN, target, start, DOWN, PIECE, DOWN_ROW, SLICES)


_divide_kernel = Kernel(_divide)
_fetch_kernel = Kernel(_fetch)
_place_kernel = Kernel(_place)


def divide(
    ids: torch.Tensor,
    shares: Shares,
    who: torch.Tensor,
    tally: torch.Tensor,
    n_slices: int = 1,
    whole: int | None = None,
) -> None:
    """`kernels.Divide`."""
    table = table_of(tuple(shares), ids.device, n_slices, whole)
    n_at_once = PAIRS if ids.numel() <= _FEW_PAIRS else _MANY_PAIRS
    constants = (len(who), block_of(len(who)), len(shares), n_slices, MAX_SLICES // n_slices, PARTS_OF_ONE, n_at_once)
    _divide_kernel((1,), (ids.contiguous(), table, who, tally, ids.numel()), constants, Tuning(n_warps=4))


def block_of(n_experts: int) -> int:
    """Width of a program that handles all experts at once."""
    return max(16, power_of_two(n_experts))


@cache
def table_of(
    shares: tuple[tuple[int, int], ...], device: torch.device, n_slices: int = 1, whole: int | None = None
) -> torch.Tensor:
    """Sent once, before anything is recorded."""
    parties = [party for party, _ in shares]
    at_a_time = [n_slices if party == whole else 1 for party in parties]
    return torch.tensor([bounds(shares)[:-1], parties, at_a_time], dtype=torch.int32).to(device)


def fetch(
    source: ExpertWeights, who: torch.Tensor, party: int, room: torch.Tensor, vectors: ExpertVectors
) -> ExpertWeights:
    """`kernels.Fetch`; host memory must be pinned."""
    n_slices = len(who) // source.gate.shape[0]
    stacks = stacks_in(room, source.parts, n_slices)
    slot_of = torch.empty_like(who)
    _move_experts(source, stacks, who, slot_of, party)
    return ExpertWeights(*stacks, slot_of, vectors, n_slices)


def fill(source: ExpertWeights, state: CacheState, memory: torch.Tensor, vectors: ExpertVectors) -> ExpertWeights:
    """`kernels.Fill`; host memory must be pinned."""
    stacks = stacks_in(memory, source.parts, state.n_slices)
    _move_experts(source, stacks, state.fills, None, 0)
    return ExpertWeights(*stacks, state.slot_of, vectors, state.n_slices)


def place(kept: ExpertWeights, target: Sequence[QTensor], first: int) -> None:
    """`kernels.Place`."""
    words, widths = _widths(kept.parts, kept.n_slices)
    n, stacks = target[0].shape[0], [_words(part, words) for part in (*kept.parts, *target)]
    n_programs = min(_N_PLACING, n * kept.n_slices * sum(cdiv(size, _PIECE) for size in widths[:3]))
    _place_kernel((n_programs,), (kept.slot_of, *stacks, first, n), (*widths, _PIECE), Tuning(n_warps=4))


def _move_experts(
    source: ExpertWeights,
    stacks: tuple[QTensor, QTensor, QTensor],
    which: torch.Tensor,
    slot_of: torch.Tensor | None,
    party: int,
) -> None:
    n_all = len(which)
    words, widths = _widths(stacks, n_all // source.gate.shape[0])
    sources, rooms = ([_words(part, words) for part in parts] for parts in (source.parts, stacks))
    n_programs = min(_N_PROGRAMS, n_all * sum(cdiv(size, _PIECE) for size in widths[:3]))
    constants = (n_all, block_of(n_all), *widths, stacks[0].shape[0], _PIECE)
    _fetch_kernel((n_programs,), (which, *sources, *rooms, slot_of, party), constants, Tuning(n_warps=4))


def _widths(stacks: Sequence[QTensor], n_slices: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """The words to move (slices of) experts in; such words of gate, up, down and a row of down of one; n_slices."""
    row_bytes, sizes = stacks[2].data.shape[2], [stack.data[0].numel() for stack in stacks]
    words = _word_type([row_bytes, *sizes])
    return words, (*(n_bytes // words.itemsize for n_bytes in (*sizes, row_bytes)), n_slices)


def _word_type(sizes: list[int]) -> torch.dtype:
    """The widest words that matrices, and rows of down, of so many bytes consist of."""
    return next(word for word in _WORDS if all(size % word.itemsize == 0 for size in sizes))


def _words(part: QTensor, words: torch.dtype) -> torch.Tensor:
    return part.data.view(-1).view(words)
