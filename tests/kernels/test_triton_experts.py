"""The routed experts in Triton: right against the reference, and bit-equal however they are cut into slabs."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES, assert_near

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton import grouped
from overspill.kernels.triton.combine import combine
from overspill.kernels.triton.moe import MoeOp, SlotMaps
from overspill.kernels.triton.sort import Sorted, sort_pairs
from overspill.kernels.triton.wide import gate_up_of, stacks_in, wide_bytes, widen
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.experts import NO_VECTORS, Activation, ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
D, F = 64, 32


@pytest.fixture
def _as_if_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of many tokens, for problems that are small enough to test."""
    monkeypatch.setattr("overspill.kernels.triton.few_experts.FEW_TOKENS", 0)


def random_q8_0(*shape: int) -> QTensor:
    """Scales near 2^-8."""
    generator = torch.Generator().manual_seed(sum(shape))
    size = (*shape[:-1], TensorType.Q8_0.row_bytes(shape[-1]))
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    raw.unflatten(-1, (-1, 34))[..., 1] = 0x1C
    return QTensor(raw.to(DEVICE), TensorType.Q8_0, shape)


@dataclass
class Problem:
    """One call of `experts`. `weights` holds all of them."""

    x: torch.Tensor
    ids: torch.Tensor
    mix: torch.Tensor
    weights: ExpertWeights
    before: torch.Tensor
    activation: Activation = Activation.SILU

    def add(self, op: MoeOp, *parts: ExpertWeights) -> torch.Tensor:
        """What `op` makes of `before` when it is given the weights in these parts."""
        out = self.before.clone()
        for weights in parts:
            op(self.x, self.ids, self.mix, weights, self.activation, out)
        return out

    def wanted(self) -> torch.Tensor:
        out = self.before.clone()
        ref.experts(self.x, self.ids, self.mix, self.weights, self.activation, out)
        return out


def routing(n_tokens: int, n_experts: int, n_used: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """spread: anywhere; same: all tokens to the same experts; even: odd experts get none."""
    if kind == "same":
        return torch.arange(n_used).add(1).flip(0).expand(n_tokens, -1)
    step = 2 if kind == "even" else 1
    chosen = [torch.randperm(n_experts // step, generator=generator)[:n_used] * step for _ in range(n_tokens)]
    return torch.stack(chosen)


def problem(n_tokens: int, n_experts: int, n_used: int, kind: str = "spread", *, has_vectors: bool = False) -> Problem:
    generator = torch.Generator().manual_seed(n_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    E = n_experts
    biases, scales = (normal(E, F), normal(E, F), normal(E, D)), (normal(E), None, normal(E))
    weights = ExpertWeights(
        random_q8_0(E, F, D),
        random_q8_0(E, F, D),
        random_q8_0(E, D, F),
        vectors=ExpertVectors(biases, scales) if has_vectors else NO_VECTORS,
    )
    ids = routing(n_tokens, n_experts, n_used, kind, generator).int().to(DEVICE)
    x, before, mix = normal(n_tokens, D), normal(n_tokens, D), normal(n_tokens, n_used).abs()
    activation = Activation.SWIGLU_OAI if has_vectors else Activation.SILU
    return Problem(x, ids, mix, weights, before, activation)


def slab(weights: ExpertWeights, first: int, last: int, *, n_experts: int) -> ExpertWeights:
    slot_of = np.full(n_experts, -1, np.int32)
    slot_of[first:last] = np.arange(last - first)
    return ExpertWeights(*(q.rows(first, last) for q in weights.parts), slot_of, weights.vectors)


def widened(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    n = weights.gate.shape[0]
    return widen(weights, torch.empty(wide_bytes(n, D, F, dtype=dtype), dtype=torch.uint8, device=DEVICE), dtype=dtype)


CASES = {
    "one-token": (1, 6, 3, "spread"),
    "few-tokens": (7, 8, 2, "spread"),
    "all-to-the-same": (9, 8, 2, "same"),
    "half-get-none": (11, 8, 2, "even"),
    "every-expert": (5, 3, 3, "spread"),
    "one-expert": (20, 2, 1, "same"),
}


@pytest.mark.usefixtures("_as_if_many")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_vectors", [False, True], ids=["plain", "biases-and-scales"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(case: tuple[int, int, int, str], has_vectors: bool, dtype: torch.dtype) -> None:
    p = problem(*case, has_vectors=has_vectors)
    got = p.add(MoeOp(Workspace(DEVICE), dtype, may_use_torch=False), p.weights)
    assert_near(got.to(dtype), p.wanted())


@pytest.mark.usefixtures("_as_if_many")
@pytest.mark.parametrize("dtype", DTYPES)
def test_slabs_scratch_and_widening_change_no_bit(dtype: torch.dtype) -> None:
    p = problem(11, 7, 3)
    whole = p.add(MoeOp(Workspace(DEVICE), dtype, may_use_torch=False), p.weights)
    small = MoeOp(Workspace(DEVICE, weight_bytes=wide_bytes(2, D, F, dtype=dtype)), dtype, may_use_torch=False)
    slabs = [slab(p.weights, first, last, n_experts=7) for first, last in ((0, 2), (2, 3), (3, 7))]
    assert torch.equal(p.add(small, p.weights), whole)
    assert torch.equal(p.add(small, *slabs), whole)
    assert torch.equal(p.add(small, *(widened(s, dtype) for s in slabs)), whole)
    assert not torch.equal(whole, p.before)


def test_widened_experts_are_the_values_of_their_blocks() -> None:
    weights = problem(1, 4, 1).weights
    wide = widened(weights, torch.float32)
    for plain, q in zip(wide.parts, weights.parts, strict=True):
        assert plain.shape == q.shape
        assert all(torch.equal(plain[e].data.view(torch.float32), ref.dequantize(q[e])) for e in range(4))


def test_gate_and_up_of_a_widened_slab_are_one_stack() -> None:
    buffer = torch.arange(wide_bytes(3, D, F, dtype=torch.float32), dtype=torch.uint8, device=DEVICE)
    stacks = stacks_in(buffer, 3, F, D, torch.float32)
    whole = gate_up_of(stacks)
    assert whole is not None
    assert torch.equal(whole.view(torch.int32), torch.cat([stacks.gate, stacks.up], 1).view(torch.int32))
    assert gate_up_of(stacks._replace(gate=stacks.gate.contiguous())) is None


def test_products_of_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    monkeypatch.setattr("overspill.kernels.triton.moe._MANY_ROWS", 4)
    p = problem(20, 3, 2)
    got = p.add(MoeOp(Workspace(DEVICE), dtype, may_use_torch=True), slab(p.weights, 0, 2, n_experts=3))
    plain = p.add(MoeOp(Workspace(DEVICE), dtype, may_use_torch=False), slab(p.weights, 0, 2, n_experts=3))
    assert_near(got.to(dtype), plain)


def sorted_pairs(ids: torch.Tensor, slots: list[int], first: int, n_slots: int, tile: int) -> Sorted:
    slot_of = torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    return sort_pairs(ids.int().to(DEVICE), slot_of, first, n_slots, tile, Workspace(DEVICE))


@pytest.mark.parametrize("n_tokens", [1, 100, 9000])
def test_pairs_are_sorted_by_slot_and_stable(n_tokens: int) -> None:
    """9000 tokens with 8 experts each are more pairs than 16 bits count."""
    ids = torch.stack([torch.randperm(12)[:8] for _ in range(n_tokens)])
    slots = [4, -1, 0, 3, 2, -1, 1, 5, 6, 7, 8, 9]
    got = sorted_pairs(ids, slots, 2, 3, 16)
    slot = torch.tensor(slots)[ids.flatten()] - 2
    pairs = [(slot == s).nonzero()[:, 0] for s in range(3)]
    order, ends = torch.cat(pairs), np.cumsum([0] + [len(p) for p in pairs])
    assert got.offsets.tolist() == ends.tolist()
    assert torch.equal(got.order[: len(order)].cpu().long(), order)
    inverse = torch.full((8 * n_tokens,), -1)
    inverse[order] = torch.arange(len(order))
    assert torch.equal(got.inverse.cpu().long(), inverse)


@pytest.mark.parametrize("counts", [(0, 0, 0), (16, 16, 16), (1, 0, 33), (15, 17, 0), (48, 0, 0), (0, 0, 31)])
def test_tiles_cover_every_row_once(counts: tuple[int, ...]) -> None:
    ids = torch.cat([torch.full((n,), e) for e, n in enumerate(counts)] + [torch.tensor([3])])[:, None]
    got = sorted_pairs(ids[torch.randperm(len(ids))], [0, 1, 2, -1], 0, 3, 16)
    covered = [
        (slot, row)
        for slot, first in got.tiles.tolist()
        if slot >= 0
        for row in range(first, min(first + 16, int(got.offsets[slot + 1])))
    ]
    wanted = [(s, row) for s, n in enumerate(counts) for row in range(sum(counts[:s]), sum(counts[:s]) + n)]
    assert sorted(covered) == wanted


def test_contributions_are_added_in_ascending_expert_id() -> None:
    """Numbers whose sum depends on the order: 1 is lost next to 2^24, unless it meets the other 1 first."""
    ids = torch.tensor([[7, 2, 5]], dtype=torch.int32, device=DEVICE)
    y = torch.tensor([[1.0], [1.0], [2.0**24]], device=DEVICE)
    sums = []
    for inverse in ([0, 1, 2], [2, 0, 1], [0, 2, 1], [0, -1, 1]):
        out = torch.zeros(1, 1, device=DEVICE)
        combine(out, y, ids, torch.ones(1, 3, device=DEVICE), torch.tensor(inverse, dtype=torch.int32, device=DEVICE))
        sums.append(out.item())
    assert sums == [2.0**24, 2.0**24 + 2, 2.0**24, 2.0]


@pytest.mark.parametrize("n_few", [0, 16])
@pytest.mark.parametrize("limit", [0.25, 2.0])
def test_gates_within_limits_into_rows_that_are_apart(
    limit: float, n_few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.kernels.triton.few_experts.FEW_TOKENS", n_few)
    p = problem(*CASES["few-tokens"])
    p.weights = replace(p.weights, vectors=ExpertVectors(limit=limit))
    wide = torch.full((len(p.x), 2 * D), torch.nan, device=DEVICE)
    wide[:, 16 : 16 + D] = p.before
    MoeOp(Workspace(DEVICE), torch.float32, may_use_torch=False)(
        p.x, p.ids, p.mix, p.weights, p.activation, wide[:, 16 : 16 + D]
    )
    torch.testing.assert_close(wide[:, 16 : 16 + D], p.wanted(), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(p.wanted(), problem(*CASES["few-tokens"]).wanted())
    assert torch.isnan(wide[:, :16]).all()
    assert torch.isnan(wide[:, 16 + D :]).all()


def test_slot_maps_are_sent_once() -> None:
    maps = SlotMaps(DEVICE)
    weights = problem(1, 6, 1).weights
    part = slab(weights, 2, 4, n_experts=6)
    assert maps.of(part) is maps.of(slab(weights, 2, 4, n_experts=6))
    assert maps.of(part).slot_of.tolist() == [-1, -1, 0, 1, -1, -1]
    assert maps.of(part).expert_of.tolist() == [2, 3]
    assert maps.of(weights).slot_of.tolist() == list(range(6))


def test_slot_maps_of_slabs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded work refers to them, however many sets of selected experts come by."""
    monkeypatch.setattr("overspill.kernels.triton.moe._MAPS_KEPT", 2)
    maps, weights = SlotMaps(DEVICE), problem(1, 6, 1).weights
    part = maps.of(slab(weights, 2, 5, n_experts=6))

    def selected(*ids: int) -> ExpertWeights:
        slot_of = np.full(6, -1, np.int32)
        slot_of[list(ids)] = range(len(ids))
        return replace(slab(weights, 0, len(ids), n_experts=6), slot_of=slot_of)

    found = [maps.of(selected(*ids)) for ids in ((0, 2), (0, 3), (1, 3), (0, 2, 4))]
    assert maps.of(selected(0, 2, 4)) is found[-1]
    assert maps.of(selected(0, 2)) is not found[0]
    assert maps.of(slab(weights, 2, 5, n_experts=6)) is part


@pytest.mark.parametrize(("n_pairs", "rows"), [(8, 16), (128 * 17, 32), (128 * 49, 64), (128 * 97, 128), (10**6, 128)])
def test_tiles_grow_with_the_rows_an_expert_gets(n_pairs: int, rows: int) -> None:
    assert grouped.tile_rows(n_pairs, 128) == rows
