"""Sharing out experts, and fetching them, in Triton against the reference in torch."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES

from overspill.gguf.types import TensorType
from overspill.kernels import ref as plain
from overspill.kernels import spread as ref
from overspill.kernels.triton.dequant import PLAIN
from overspill.kernels.triton.moe import MoeOp
from overspill.kernels.triton.spread import divide, fetch
from overspill.kernels.triton.workspace import Workspace
from overspill.kernels.triton.wide import wide_bytes, widen_into
from overspill.pipeline.upload import widened_alike
from overspill.quant.experts import NO_VECTORS, Activation, ExpertVectors, ExpertWeights
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor
from tests.kernels.weights import random_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("n_tokens", "n_used", "n_expert"), [(1, 8, 128), (3, 4, 20), (16, 8, 40), (1, 1, 5), (70, 8, 40)]
)
@pytest.mark.parametrize("n_slices", [1, 2])
@pytest.mark.parametrize("shares", [[(0, 1)], [(1, 46), (0, 46), (2, 50)], [(2, 1), (3, 1000)]])
def test_the_same_experts_go_to_the_same_parties(
    n_tokens: int, n_used: int, n_expert: int, shares: list[tuple[int, int]], n_slices: int
) -> None:
    generator = np.random.default_rng(n_expert)
    rows = [generator.permutation(n_expert)[:n_used] for _ in range(n_tokens)]
    ids = torch.tensor(np.array(rows), dtype=torch.int32)
    who = torch.zeros(n_expert * n_slices, dtype=torch.int32, device=DEVICE)
    wanted = torch.zeros(n_expert * n_slices, dtype=torch.int32)
    tally, counted = (torch.full((5,), 5, dtype=torch.int64) for _ in range(2))
    tally = tally.to(DEVICE)

    divide(ids.to(DEVICE), shares, who, tally, n_slices, shares[-1][0])

    ref.divide(ids, shares, wanted, counted, n_slices, shares[-1][0])
    assert torch.equal(who.cpu(), wanted)
    assert tally.tolist() == counted.tolist() == [5, *(5 + 2 // n_slices * int((wanted == p).sum()) for p in range(4))]


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.MXFP4, TensorType.BF16])
def test_fetched_experts_are_those_of_the_party(type: TensorType) -> None:
    n_expert, F, D = 7, 256, 512
    generator = torch.Generator().manual_seed(1)

    def stack(rows: int, cols: int) -> QTensor:
        n_bytes = n_expert * rows * type.row_bytes(cols)
        raw = torch.randint(0, 256, (n_bytes,), generator=generator, dtype=torch.uint8)
        raw = raw.pin_memory() if DEVICE.type == "cuda" else raw
        return QTensor.from_bytes(raw, type, (n_expert, rows, cols))

    source = ExpertWeights(stack(F, D), stack(F, D), stack(D, F))
    who = torch.tensor([1, -1, 0, 1, 2, 1, -1], dtype=torch.int32, device=DEVICE)
    room = torch.zeros(4 * sum(part.data[0].numel() for part in source.parts) + 192, dtype=torch.uint8, device=DEVICE)

    fetched = fetch(source, who, 1, room, NO_VECTORS)

    assert isinstance(fetched.slot_of, torch.Tensor)
    assert fetched.slot_of.tolist() == [0, -1, -1, 1, -1, 2, -1]
    for stack_, part in zip(fetched.parts, source.parts, strict=True):
        assert stack_.shape[0] == 4
        assert torch.equal(stack_.data[:3].cpu(), part.data[[0, 3, 5]])


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.BF16])
def test_slices_add_up_to_their_expert(type: TensorType) -> None:
    """Fetched by halves, two of one expert and one of another: what they give is what whole experts give."""
    n_expert, F, D = 4, 512, 256
    parts = [random_weight(type, (n_expert, *shape), seed=i) for i, shape in enumerate([(F, D), (F, D), (D, F)])]
    if DEVICE.type == "cuda":
        parts = [QTensor(part.data.pin_memory(), part.type, part.shape) for part in parts]
    source = ExpertWeights(*parts)
    x, mix = torch.randn(2, D, generator=torch.Generator().manual_seed(3)), torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    ids = torch.tensor([[2, 0], [0, 3]], dtype=torch.int32)
    who = torch.tensor([1, 1, -1, -1, 0, 1, 0, 0], dtype=torch.int32)
    room = torch.zeros(4 * sum(part.data[0].numel() for part in parts) + 192, dtype=torch.uint8, device=DEVICE)
    wanted = torch.zeros(2, D)
    for party in (0, 1):
        weights = ref.fetch(source, who, party, torch.zeros(len(room), dtype=torch.uint8), NO_VECTORS)
        plain.experts(x, ids, mix, weights, Activation.SILU, wanted)
    whole = torch.zeros(2, D)
    plain.experts(x, ids, mix, source, Activation.SILU, whole)
    torch.testing.assert_close(wanted, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))

    out = torch.zeros(2, D, device=DEVICE)
    op = MoeOp(Workspace(DEVICE), torch.float32, may_use_torch=False)
    for party in (0, 1):
        weights = fetch(source, who.to(DEVICE), party, room.clone(), NO_VECTORS)
        op(x.to(DEVICE), ids.to(DEVICE), mix.to(DEVICE), weights, Activation.SILU, out)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))


def _pinned(parts: list[QTensor]) -> list[QTensor]:
    return [QTensor(q.data.pin_memory(), q.type, q.shape) for q in parts] if DEVICE.type == "cuda" else parts


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.BF16])
def test_fetched_experts_are_dequantised_and_slots_without_one_left_alone(type: TensorType) -> None:
    n_expert, F, D = 5, 256, 256
    source = ExpertWeights(*_pinned([random_weight(type, (n_expert, *s)) for s in ((F, D), (F, D), (D, F))]))
    who = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    room = torch.empty(sum(part.data.numel() for part in source.parts) + 192, dtype=torch.uint8, device=DEVICE)
    wide = torch.full((wide_bytes(n_expert, D, F),), 0xFF, dtype=torch.uint8, device=DEVICE)
    fetched = fetch(source, who, 1, room, NO_VECTORS)
    plain_ones = widened_alike(fetched, wide)

    widen_into(fetched, plain_ones)

    assert plain_ones.slot_of is fetched.slot_of
    for stack, part in zip(plain_ones.parts, source.parts, strict=True):
        found, wanted = stack.plain[:3].float().cpu(), dequantize(part)[[0, 2, 3]]
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)  # the interpreter cuts where GPUs round
        assert (stack.data[3:] == 0xFF).all()


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_use_experts_that_the_device_alone_knows(dtype: torch.dtype, has_biases: bool) -> None:
    """40 tokens, two parties, each with room for all: what both give is what whole experts give."""
    n_expert, n_used, F, D, T = 5, 2, 64, 32, 40
    parts = [random_weight(PLAIN[dtype], (n_expert, *s), seed=i) for i, s in enumerate([(F, D), (F, D), (D, F)])]
    generator = torch.Generator().manual_seed(3)
    x, mix = torch.randn(T, D, generator=generator), torch.rand(T, n_used, generator=generator)
    ids = torch.stack([torch.randperm(n_expert, generator=generator)[:n_used] for _ in range(T)]).to(torch.int32)
    biases = tuple(torch.randn(n_expert, n, generator=generator) if has_biases else None for n in (F, F, D))
    there = ExpertVectors(biases=tuple(None if b is None else b.to(DEVICE) for b in biases))
    source = ExpertWeights(*_pinned(parts))
    who = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    room = torch.empty(sum(part.data.numel() for part in parts) + 192, dtype=torch.uint8, device=DEVICE)
    experts = MoeOp(Workspace(DEVICE), dtype, may_use_torch=False)
    out = torch.ones(T, D, device=DEVICE)
    for party in range(2):
        room.fill_(0xFF)
        fetched = fetch(source, who, party, room, there)
        experts(x.to(DEVICE), ids.to(DEVICE), mix.to(DEVICE), fetched, Activation.SILU, out)

    wanted = torch.ones(T, D)
    whole = ExpertWeights(*parts, vectors=ExpertVectors(biases=biases))
    plain.experts(x, ids, mix, whole, Activation.SILU, wanted)
    error = (out.cpu() - wanted).norm() / (wanted - 1).norm()
    assert error < (1e-5 if dtype == torch.float32 else 0.02)
