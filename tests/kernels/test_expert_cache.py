"""The rules by which experts come into slots and leave them, in torch; and their Triton version against that."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.sharing import CacheState
from overspill.kernels.triton import expert_cache, spread
from overspill.quant.experts import NO_VECTORS, ExpertWeights
from overspill.quant.qtensor import QTensor

SHARES = [(1, 3), (0, 3), (3, 2)]


def empty(n_expert: int, n_slots: int, n_slices: int = 1) -> CacheState:
    return CacheState(n_slots, n_slices, *torch.full((4, n_expert * n_slices), -1, dtype=torch.int32))


def empty_on_device(n_expert: int, n_slots: int, n_slices: int = 1) -> CacheState:
    state = empty(n_expert, n_slots, n_slices)
    return CacheState(*state[:2], *(part.to(DEVICE) for part in state[2:]))


class Looks:
    """A cache that is looked up step after step."""

    def __init__(
        self, n_expert: int, n_slots: int, shares: list[tuple[int, int]], n_slices: int = 1, whole: int | None = None
    ) -> None:
        self.shares, self.state, self.whole = shares, empty(n_expert, n_slots, n_slices), whole
        self.who = torch.empty(n_expert * n_slices, dtype=torch.int32)
        self.tally = torch.zeros(11, dtype=torch.int64)

    def __call__(self, *ids: int) -> dict[int, int]:
        """The party of each expert, or slice, that is named."""
        ids_ = torch.tensor([ids], dtype=torch.int32)
        ref.OPS.look_up(ids_, self.shares, self.who, self.tally, self.state, self.whole)
        return {e: int(self.who[e]) for e in range(len(self.who)) if self.who[e] >= 0}

    @property
    def held(self) -> set[int]:
        return {e for e, slot in enumerate(self.state.slot_of.tolist()) if slot >= 0}

    @property
    def filled(self) -> set[int]:
        return {e for e, slot in enumerate(self.state.fills.tolist()) if slot >= 0}


def test_what_the_owner_fetches_stays_and_is_its_own_next_time() -> None:
    look = Looks(8, 4, [(0, 1)])

    assert look(5, 2) == {5: 0, 2: 0}
    assert look.filled == {2, 5}
    assert look(5, 3) == {5: 0, 3: 0}

    assert look.filled == {3}
    assert look.held == {2, 3, 5}
    assert look.tally.tolist()[:2] == [2, 6], "in halves"


def test_the_coldest_that_is_not_named_goes() -> None:
    look = Looks(8, 3, [(0, 1)])
    for ids in [(0, 1), (0, 1), (1, 2), (0, 2), (0, 2)]:
        look(*ids)
    assert look.held == {0, 1, 2}

    look(1, 7)  # 1 would be the coldest, but it is named; 2 was named less often than 0

    assert look.held == {0, 1, 7}


def test_of_what_is_missing_the_hottest_is_the_owners() -> None:
    look = Looks(8, 2, [(0, 1), (9, 1)])
    look.state.heat[7] = 5000

    assert look(3, 7) == {7: 0, 3: 9}

    assert look.held == {7}


def test_a_single_one_that_is_missing_is_the_owners_however_small_its_share() -> None:
    for weight in (0, 1):
        assert Looks(8, 2, [(0, weight), (9, 100)])(4) == {4: 0}


def test_more_than_the_slots_hold_are_fetched_elsewhere() -> None:
    look = Looks(8, 2, [(3, 1)])

    look(0, 1, 2, 4)

    assert look.held == look.filled == {0, 1}
    assert look.state.rest.tolist() == [-1, -1, 3, -1, 3, -1, -1, -1]
    look(0, 1, 5, 6)  # both slots are in use in this step, so nobody loses one
    assert look.held == {0, 1}
    assert look.filled == set()


def test_uses_of_long_ago_count_less() -> None:
    look = Looks(8, 2, [(0, 1)])
    for _ in range(4):
        look(0)
    for _ in range(300):
        look(1)
    look(5)
    assert look.held == {1, 5}


def test_slices_are_shared_out_and_kept_by_themselves() -> None:
    look = Looks(8, 8, [(0, 1), (1, 1)], n_slices=2)

    assert look(3) == {6: 0, 7: 1}
    assert look.held == {6}
    assert look(3) == {6: 0, 7: 0}
    assert look.held == {6, 7}
    assert look.tally.tolist()[:3] == [1, 2, 1]


def test_who_takes_whole_experts_gets_no_rests() -> None:
    look = Looks(8, 16, [(0, 1), (9, 9)], n_slices=2, whole=9)

    assert look(3) == {6: 0, 7: 0}, "the owner gets a slice at least, so the other takes no whole expert"
    assert look(1, 2) == {2: 0, 3: 0, 4: 9, 5: 9}
    look.state.slot_of[4] = 15  # a slice of expert 2 is kept: what is left of it comes first
    assert look(2, 5) == {4: 0, 5: 0, 10: 9, 11: 9}


def steps(n_tokens: int, n_used: int, n_expert: int) -> Iterator[torch.Tensor]:
    """Ids of which some come often."""
    generator = np.random.default_rng(n_tokens + n_expert)
    worth = 1 / np.arange(1, n_expert + 1)
    for _ in range(12):
        rows = [generator.choice(n_expert, n_used, replace=False, p=worth / worth.sum()) for _ in range(n_tokens)]
        yield torch.tensor(np.array(rows), dtype=torch.int32)


@pytest.mark.parametrize(
    ("n_tokens", "n_used", "n_expert", "n_slots", "n_slices"),
    [(1, 8, 128, 20, 1), (3, 4, 20, 12, 2), (16, 8, 40, 9, 1), (1, 1, 5, 1, 1), (2, 4, 70, 70, 2), (1, 8, 128, 64, 2)],
)
@pytest.mark.parametrize("shares", [[(0, 1)], SHARES, [(2, 1), (3, 1000)], [(2, 0), (1, 2)]])
def test_triton_looks_up_the_same(
    n_tokens: int, n_used: int, n_expert: int, n_slots: int, n_slices: int, shares: list[tuple[int, int]]
) -> None:
    wanted = Looks(n_expert, n_slots, shares, n_slices)
    state = empty_on_device(n_expert, n_slots, n_slices)
    who = torch.zeros(n_expert * n_slices, dtype=torch.int32, device=DEVICE)
    tally = torch.zeros(11, dtype=torch.int64, device=DEVICE)
    for ids in steps(n_tokens, n_used, n_expert):
        ref.OPS.look_up(ids, shares, wanted.who, wanted.tally, wanted.state, 3)

        expert_cache.look_up(ids.to(DEVICE), shares, who, tally, state, 3)

        assert torch.equal(who.cpu(), wanted.who)
        assert tally.tolist() == wanted.tally.tolist()
        for got, known in zip(state[2:], wanted.state[2:], strict=True):
            assert torch.equal(got.cpu(), known)


@pytest.mark.parametrize("n_slots", [1, 7, 30])
def test_slots_are_never_shared_nor_lost(n_slots: int) -> None:
    look = Looks(30, n_slots, SHARES)
    for ids in steps(2, 4, 30):
        before = look.held
        look(*ids.flatten().tolist())
        slots = [slot for slot in look.state.slot_of.tolist() if slot >= 0]
        assert sorted(slots) == list(range(len(slots)))
        assert len(before) <= len(slots) <= n_slots
        assert not before & look.filled


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K])
def test_triton_fills_the_slots_that_are_named_and_no_others(type: TensorType) -> None:
    n_expert, n_slots, F, D = 7, 4, 256, 512
    generator = torch.Generator().manual_seed(1)

    def stack(rows: int, cols: int) -> QTensor:
        n_bytes = n_expert * rows * type.row_bytes(cols)
        raw = torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8)
        raw = raw.pin_memory() if DEVICE.type == "cuda" else raw
        return QTensor.from_bytes(raw, type, (n_expert, rows, cols))

    source = ExpertWeights(stack(F, D), stack(F, D), stack(D, F))
    state = empty_on_device(n_expert, n_slots)
    for expert, slot in ((0, 2), (3, 0), (6, 3)):
        state.fills[expert] = slot
    n_bytes = n_slots * sum(part.data[0].numel() for part in source.parts) + 192
    memory = torch.full((n_bytes,), 99, dtype=torch.uint8, device=DEVICE)

    filled = spread.fill(source, state, memory, NO_VECTORS)

    assert filled.slot_of is state.slot_of
    for stack_, part in zip(filled.parts, source.parts, strict=True):
        assert stack_.shape[0] == n_slots
        assert torch.equal(stack_.data[[2, 0, 3]].cpu(), part.data[[0, 3, 6]])
        assert torch.all(stack_.data[1] == 99)


@pytest.mark.parametrize("n_slices", [1, 2])
@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K])
def test_triton_places_whole_experts_and_leaves_the_others_alone(
    type: TensorType, n_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts 1 to 5 of seven: 2 has no slot, of 3 a slice is missing where there are two."""
    monkeypatch.setattr(spread, "_N_PLACING", 7)  # the interpreter takes long for a program, whatever it does
    n_expert, n_slots, F, D, first, n = 7, 5 * n_slices, 512, 256, 1, 5
    generator = torch.Generator().manual_seed(1)

    def stack(n: int, rows: int, cols: int) -> QTensor:
        raw = torch.randint(0, 256, (n * rows * type.row_bytes(cols),), generator=generator, dtype=torch.uint8)
        return QTensor.from_bytes(raw, type, (n, rows, cols))

    def spoilt(parts: tuple[QTensor, ...], device: torch.device) -> list[QTensor]:
        return [QTensor(torch.full_like(q.data, 99, device=device), q.type, q.shape) for q in parts]

    source = ExpertWeights(stack(n_expert, F, D), stack(n_expert, F, D), stack(n_expert, D, F))
    state = empty(n_expert, n_slots, n_slices)
    whole = [0, 1, 4, 5]
    state.fills[[e * n_slices + i for e in whole for i in range(n_slices)]] = torch.arange(4 * n_slices).int().flip(0)
    state.fills[3 * n_slices] = 4 * n_slices if n_slices > 1 else -1
    state.slot_of.copy_(state.fills)
    memory = torch.full((n_slots * sum(q.data[0].numel() for q in source.parts) + 192,), 77, dtype=torch.uint8)
    kept = replace(ref.OPS.fill(source, state, memory, NO_VECTORS), slot_of=state.slot_of)
    wanted = spoilt(tuple(q.rows(0, n) for q in source.parts), torch.device("cpu"))
    ref.OPS.place(kept, wanted, first)
    for got, part in zip(wanted, source.parts, strict=True):
        for e in range(first, first + n):
            assert torch.equal(got[e - first].data, part[e].data if e in whole else torch.full_like(part[e].data, 99))

    there = [QTensor(q.data.to(DEVICE), q.type, q.shape) for q in kept.parts]
    target = spoilt(tuple(wanted), DEVICE)
    spread.place(ExpertWeights(*there, state.slot_of.to(DEVICE), n_slices=n_slices), target, first)

    for got, part in zip(target, wanted, strict=True):
        assert torch.equal(got.data.cpu(), part.data)
