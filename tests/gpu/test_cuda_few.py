"""Kernels of few tokens on a GPU, recorded: what they read from the device may change between replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.quant.experts import NO_VECTORS, Activation, ExpertWeights
from overspill.quant.qtensor import QTensor
from tests.kernels.weights import random_weight

pytest.importorskip("triton", reason="Triton is not installed")

E, K, D, F = 8, 3, 512, 256
EPS = 1e-6


def stack(*shape: int, seed: int) -> QTensor:
    q = random_weight(TensorType.Q8_0, shape, seed=seed)
    return QTensor(q.data.cuda(), q.type, q.shape)


@pytest.fixture(params=[None, (9, 0)], ids=["one-after-the-other", "chained"])
def _chaining(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kernels.triton.launch.CHAIN_FROM", request.param)


def recorded(step: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def maps() -> Iterator[list[int]]:
    """Where the experts lie: all in order, some absent, none."""
    yield list(range(E))
    yield [3, -1, 0, 7, -1, 1, 2, -1]
    yield [-1] * E


@pytest.mark.usefixtures("_chaining")
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_a_recorded_layer_follows_its_inputs_and_its_map(n_tokens: int) -> None:
    from overspill.kernels.triton import make_ops
    from overspill.kernels.triton.few_experts import Pairs, add_experts
    from overspill.kernels.triton.norm import gated

    ops = make_ops(torch.device("cuda"))
    gain, router = torch.rand(D, device="cuda"), torch.randn(E, D, device="cuda")
    weight = QTensor((0.02 * torch.randn(D, D, device="cuda")).bfloat16().view(torch.uint8), TensorType.BF16, (D, D))
    parts = stack(E, F, D, seed=1), stack(E, F, D, seed=2), stack(E, D, F, seed=3)
    x, slot_of = torch.zeros(n_tokens, D, device="cuda"), torch.zeros(E, dtype=torch.int32, device="cuda")
    silu = gated(Activation.SILU, 3.0e38)
    how = {"eps": EPS, "n_used": K, "gating": 1, "is_normalised": True, "scale": 1.0}

    def step() -> torch.Tensor:
        assert ops.norm_linears is not None
        assert ops.add_linear is not None
        assert ops.route is not None
        (q,) = ops.norm_linears(x, gain, EPS, [weight], ())
        y = ops.add_linear(x, q, weight)
        normed, ids, mix = ops.route(y, gain, router, None, None, **how)
        add_experts(normed, Pairs(ids, mix, slot_of), parts, NO_VECTORS, silu, y, dtype=torch.bfloat16)
        return torch.cat([y, ids.float(), mix], 1)

    graph, out = recorded(step)
    for i, slots in enumerate(maps()):
        x.copy_(torch.randn(n_tokens, D, generator=torch.Generator().manual_seed(i)))
        slot_of.copy_(torch.tensor(slots, dtype=torch.int32))
        graph.replay()
        again = step()
        assert torch.equal(out, again)
        y, ids, mix = out.split([D, K, K], 1)
        before = x.double() + (normed(x, gain) @ wide(weight).T) @ wide(weight).T
        wanted = before.float()
        weights = ExpertWeights(*parts, slot_of=slot_of.cpu().numpy())
        ref.experts(normed(wanted, gain).float(), ids.int(), mix, weights, Activation.SILU, wanted)
        assert (y.double() - wanted.double()).norm() <= 1e-2 * wanted.double().norm()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return ref.rms_norm(x.double(), gain.double(), EPS)


def wide(weight: QTensor) -> torch.Tensor:
    return weight.data.view(torch.bfloat16).double()
