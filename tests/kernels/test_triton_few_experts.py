"""The routed experts of a few tokens in Triton: right for every type, and bit-equal however calls cut them."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES, assert_near, few_programs

from overspill.gpu_memory import FEW_TOKENS
from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton.decode import DECODERS
from overspill.kernels.triton.few_experts import Pairs, add_experts, can_add
from overspill.kernels.triton.launch import Tuning
from overspill.kernels.triton.moe import MoeOp
from overspill.kernels.triton.norm import gated
from overspill.kernels.triton.tuning import RowTile
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.experts import NO_LIMIT, NO_VECTORS, Activation, ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor
from tests.kernels.test_triton_experts import CASES, Problem, problem, slab
from tests.kernels.weights import random_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
T = TensorType
SILU = gated(Activation.SILU, NO_LIMIT)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    few_programs(monkeypatch)


def stack(type: TensorType, *shape: int, seed: int = 0) -> QTensor:
    q = random_weight(type, shape, seed=seed)
    return QTensor(q.data.to(DEVICE), q.type, q.shape)


def few(dtype: torch.dtype) -> MoeOp:
    return MoeOp(Workspace(DEVICE), dtype, may_use_torch=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_vectors", [False, True], ids=["plain", "biases-and-scales"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference(case: tuple[int, int, int, str], has_vectors: bool, dtype: torch.dtype) -> None:
    p = problem(*case, has_vectors=has_vectors)
    assert can_add(case[0], p.weights.parts) == (case[0] <= FEW_TOKENS)
    assert_near(p.add(few(dtype), p.weights).to(dtype), p.wanted())


def odd_problem(types: tuple[TensorType, TensorType, TensorType], n_tokens: int = 2) -> Problem:
    """Widths as small as blocks of 256 allow, for K no power of two."""
    E, D, F, K = 5, 256, 256, 3
    generator = torch.Generator().manual_seed(n_tokens)
    x, before = (torch.randn(n_tokens, D, generator=generator).to(DEVICE) for _ in range(2))
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(n_tokens)]).int().to(DEVICE)
    mix = torch.rand(n_tokens, K, generator=generator).to(DEVICE)
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    parts = [stack(type, *shape, seed=i) for i, (type, shape) in enumerate(zip(types, shapes, strict=True))]
    return Problem(x, ids, mix, ExpertWeights(*parts), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", DECODERS, ids=lambda t: t.name)
def test_every_type(type: TensorType, dtype: torch.dtype) -> None:
    p = odd_problem((type, type, type))
    assert_near(p.add(few(dtype), p.weights).to(dtype), p.wanted())


def test_gate_up_and_down_may_differ_in_type() -> None:
    p = odd_problem((T.Q4_K, T.IQ4_XS, T.Q6_K))
    assert_near(p.add(few(torch.float32), p.weights), p.wanted())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_vectors", [False, True], ids=["plain", "biases-and-scales"])
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_cutting_experts_into_calls_changes_no_bit(n_tokens: int, has_vectors: bool, dtype: torch.dtype) -> None:
    p = problem(n_tokens, 7, 3, has_vectors=has_vectors)
    op = few(dtype)
    whole = p.add(op, p.weights)
    for cuts in ([0, 2, 3, 7], [0, 6, 7]):
        slabs = [slab(p.weights, first, last, n_experts=7) for first, last in pairwise(cuts)]
        assert torch.equal(p.add(op, *slabs), whole)
    assert not torch.equal(whole, p.before)


def test_experts_of_a_cache_lie_in_any_slot() -> None:
    """A map made on the device, not in ascending order; what no map names is not read."""
    p = problem(4, 6, 3)
    order = [4, 1, 5]
    parts = tuple(QTensor(q.data[order].contiguous(), q.type, (3, *q.shape[1:])) for q in p.weights.parts)
    slot_of = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
    slot_of[torch.tensor(order, device=DEVICE)] = torch.arange(3, dtype=torch.int32, device=DEVICE)
    out, wanted = p.before.clone(), p.before.clone()
    pairs = Pairs(p.ids, p.mix, slot_of)
    add_experts(p.x, pairs, parts, NO_VECTORS, SILU, out, dtype=torch.float32)
    weights = ExpertWeights(*parts, slot_of=slot_of.cpu().numpy())
    ref.experts(p.x, p.ids, p.mix, weights, Activation.SILU, wanted)
    assert_near(out, wanted)
    assert not torch.equal(wanted, p.wanted())


def test_experts_that_are_elsewhere_leave_no_trace() -> None:
    """Not even with scratch memory full of NaN."""
    p = problem(3, 6, 2)
    nowhere = ExpertWeights(*(q.rows(0, 1) for q in p.weights.parts), slot_of=np.full(6, -1, np.int32))
    torch.full((2, 1000, 1000), torch.nan, device=DEVICE)  # what is freed here is what the kernels are given
    assert torch.equal(p.add(few(torch.float32), nowhere), p.before)


def test_sums_are_taken_in_ascending_expert_id() -> None:
    """Biases of down whose sum depends on the order: 1 is lost next to 2^24, unless it meets the other 1 first."""
    E, D, F = 3, 32, 32
    zero = QTensor(torch.zeros(E, F, 34, dtype=torch.uint8, device=DEVICE), T.Q8_0, (E, F, D))
    bias = torch.tensor([1.0, 1.0, 2.0**24], device=DEVICE)[:, None].expand(E, D).contiguous()
    weights = ExpertWeights(zero, zero, zero, vectors=ExpertVectors(biases=(None, None, bias)))
    ids = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(2, D, device=DEVICE)
    few(torch.float32)(
        torch.ones(2, D, device=DEVICE), ids, torch.ones(2, 3, device=DEVICE), weights, Activation.SILU, out
    )
    assert (out == 2.0**24 + 2).all()


@pytest.mark.parametrize("tiles", [(RowTile(32, 64, Tuning(1, 1)), RowTile(128, 512, Tuning(2, 1)))], ids=str)
@pytest.mark.parametrize("type", [T.BF16, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
def test_any_tile_does(type: TensorType, tiles: tuple[RowTile, RowTile]) -> None:
    p = odd_problem((type, type, type), n_tokens=1)
    out = p.before.clone()
    pairs = Pairs(p.ids, p.mix, torch.arange(5, dtype=torch.int32, device=DEVICE))
    add_experts(p.x, pairs, p.weights.parts, NO_VECTORS, SILU, out, dtype=torch.float32, tiles=tiles)
    assert_near(out, p.wanted())
