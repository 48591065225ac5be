"""The CPU kernels: against the reference in float64, and against themselves cut another way, bit for bit."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

from overspill.gguf.types import TensorType
from overspill.kernels.numba import experts, has_kernel, matmul, use_threads
from overspill.quant.dequant import dequantize
from overspill.quant.experts import NO_VECTORS, Activation, ExpertVectors
from overspill.quant.qtensor import QTensor
from tests.kernels.weights import random_weight

TYPES = [t for t in TensorType if has_kernel(t)]
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def _two_threads():
    use_threads(2)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


def oai(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS = {
    Activation.SILU: lambda gate, up: torch.nn.functional.silu(gate) * up,
    Activation.SWIGLU_OAI: oai,
}


def reference(layer: Layer, *, act=Activation.SILU, vectors=NO_VECTORS, present=None) -> torch.Tensor:
    """The specification, pair by pair in float64."""
    stacks = [dequantize(w).double() for w in layer.stacks()]
    total = layer.start.double()

    def product(part: int, e: int, x: torch.Tensor) -> torch.Tensor:
        y = stacks[part][e] @ x
        y = y if vectors.scales[part] is None else y * vectors.scales[part][e].double()
        return y if vectors.biases[part] is None else y + vectors.biases[part][e].double()

    for t, (row, mix) in enumerate(zip(layer.ids.tolist(), layer.weights.double(), strict=True)):
        for e, weight in zip(row, mix, strict=True):
            if present is None or e in present:
                x = layer.x[t].double()
                total[t] += weight * product(2, e, ACTIVATIONS[act](product(0, e, x), product(1, e, x)))
    return total


class Layer:
    """Random experts and routing: `n` experts, `k` of them for every token."""

    def __init__(self, type: TensorType, *, n=6, k=3, d=256, f=512, n_tokens=40, down_type=None):
        self.gate = random_weight(type, (n, f, d), seed=1)
        self.up = random_weight(type, (n, f, d), seed=2)
        self.down = random_weight(down_type or type, (n, d, f), seed=3)
        random = torch.Generator().manual_seed(n_tokens)
        self.x = torch.randn(n_tokens, d, generator=random)
        self.ids = torch.stack([torch.randperm(n, generator=random)[:k] for _ in range(n_tokens)])
        self.weights = torch.rand(n_tokens, k, generator=random)
        self.start = torch.randn(n_tokens, d, generator=random)

    def stacks(self) -> tuple[QTensor, QTensor, QTensor]:
        return self.gate, self.up, self.down

    def run(self, tokens=slice(None), *, act=Activation.SILU, vectors=NO_VECTORS) -> torch.Tensor:
        out = self.start[tokens].clone()
        ids, weights = self.ids[tokens], self.weights[tokens]
        experts(self.x[tokens], *self.stacks(), ids, weights, None, out, act, vectors=vectors)
        return out


def test_every_type_of_weights_has_a_kernel() -> None:
    without = {t.name for t in TensorType if not has_kernel(t)}
    assert without == {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(64, 256), (37, 768), (1, 2304)], ids=str)
def test_matmul_equals_the_reference(type: TensorType, shape: tuple[int, int]) -> None:
    weight = random_weight(type, shape)
    x = torch.randn(130, shape[1], generator=torch.Generator().manual_seed(0))
    expected = x.double() @ dequantize(weight).double().T
    everything = matmul(x, weight)
    assert relative_error(everything, expected) < TOLERANCE
    for n_tokens in (1, 2, 3, 4, 5, 8, 19, 21, 97):
        assert torch.equal(matmul(x[:n_tokens], weight), everything[:n_tokens]), n_tokens


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_decoded_weights_are_those_of_the_reference(type: TensorType) -> None:
    weight = random_weight(type, (29, 512), seed=5)
    values = dequantize(weight)
    assert values.abs().max() > 0
    one_hot = torch.eye(512)
    assert torch.equal(matmul(one_hot, weight), values.T)
    assert torch.equal(matmul(one_hot[300:304], weight), values.T[300:304])


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_weights_may_lie_at_any_address(type: TensorType) -> None:
    weight = random_weight(type, (9, 256))
    raw = torch.empty(weight.n_bytes + 1, dtype=torch.uint8)[1:].copy_(weight.data.view(-1))
    x = torch.randn(25, 256)
    for n_tokens in (1, 25):
        assert torch.equal(matmul(x[:n_tokens], QTensor.from_bytes(raw, type, (9, 256))), matmul(x[:n_tokens], weight))


@pytest.mark.parametrize("type", [TensorType.F32, TensorType.F16, TensorType.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("n_elements", [1, 24, 33, 300, 2049, 4100])
def test_matmul_with_rows_of_any_length(type: TensorType, n_elements: int) -> None:
    weight = random_weight(type, (19, n_elements))
    x = torch.randn(25, n_elements, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ dequantize(weight).double().T
    assert relative_error(matmul(x, weight), expected) < TOLERANCE
    assert torch.equal(matmul(x[:1], weight), matmul(x, weight)[:1])


def test_matmul_of_no_tokens_and_of_a_transposed_input() -> None:
    weight = random_weight(TensorType.Q8_0, (16, 64))
    assert matmul(torch.empty(0, 64), weight).shape == (0, 16)
    x = torch.randn(64, 5).T
    assert torch.equal(matmul(x, weight), matmul(x.contiguous(), weight))


def test_matmul_keeps_nan_and_infinity_in_their_rows() -> None:
    weight = random_weight(TensorType.F32, (9, 64))
    weight.data.view(torch.float32)[3, 5] = float("nan")
    x = torch.randn(6, 64)
    x[2, 7] = float("inf")
    bad = ~matmul(x, weight).isfinite()
    assert bad[2].all()
    assert bad[:, 3].all()
    assert int(bad.sum()) == 9 + 6 - 1


def test_matmul_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        matmul(torch.zeros(2, 96), random_weight(TensorType.Q8_0, (16, 64)))


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    layer = Layer(TensorType.Q4_K)
    use_threads(1)
    alone = layer.run(), matmul(layer.x, layer.gate[0])
    use_threads(2)
    assert torch.equal(layer.run(), alone[0])
    assert torch.equal(matmul(layer.x, layer.gate[0]), alone[1])


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_experts_equal_the_reference(type: TensorType, n_tokens: int) -> None:
    layer = Layer(type, n_tokens=n_tokens)
    expected = reference(layer)
    assert relative_error(layer.run(), expected) < TOLERANCE


def test_experts_of_mixed_types_and_odd_sizes() -> None:
    layer = Layer(TensorType.F32, d=40, f=17, n_tokens=30, down_type=TensorType.F16)
    expected = reference(layer)
    assert relative_error(layer.run(), expected) < TOLERANCE
    assert torch.equal(layer.run(slice(0, 1)), layer.run()[:1])


@pytest.mark.parametrize("act", list(Activation))
@pytest.mark.parametrize(("has_scales", "has_biases"), [(False, False), (True, False), (False, True), (True, True)])
def test_activations_scales_and_biases(act: Activation, has_scales: bool, has_biases: bool) -> None:
    layer = Layer(TensorType.MXFP4, n=5, k=2, d=96, f=160, n_tokens=33)
    random = torch.Generator().manual_seed(3)
    scales = tuple(torch.rand(5, generator=random) + 0.5 for _ in range(3))
    biases = tuple(torch.randn(5, n, generator=random) * 4 for n in (160, 160, 96))
    none = (None, None, None)
    vectors = ExpertVectors(biases=biases if has_biases else none, scales=scales if has_scales else none)
    together = layer.run(act=act, vectors=vectors)
    assert relative_error(together, reference(layer, act=act, vectors=vectors)) < TOLERANCE
    assert torch.equal(layer.run(slice(4, 5), act=act, vectors=vectors), together[4:5])
    assert torch.equal(layer.run(slice(9, 30), act=act, vectors=vectors), together[9:30])


@pytest.mark.parametrize("limit", [0.25, 0.75])
def test_gates_within_limits_into_rows_that_are_apart(limit: float) -> None:
    layer = Layer(TensorType.Q8_0, n=5, k=2, d=96, f=160, n_tokens=33)
    gate, up, down = (dequantize(w).double() for w in layer.stacks())
    expected = layer.start.double()
    for t, (row, mix) in enumerate(zip(layer.ids.tolist(), layer.weights.double(), strict=True)):
        for e, weight in zip(row, mix, strict=True):
            g, u = gate[e] @ layer.x[t].double(), up[e] @ layer.x[t].double()
            assert (g > limit).any()
            assert (u < -limit).any()
            hidden = torch.nn.functional.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
            expected[t] += weight * (down[e] @ hidden)
    wide = torch.full((33, 200), torch.nan)
    wide[:, 40:136] = layer.start
    vectors = ExpertVectors(limit=limit)
    experts(layer.x, *layer.stacks(), layer.ids, layer.weights, None, wide[:, 40:136], vectors=vectors)
    assert relative_error(wide[:, 40:136], expected) < TOLERANCE
    assert torch.isnan(wide[:, :40]).all()
    assert torch.isnan(wide[:, 136:]).all()
    assert torch.equal(layer.run(vectors=vectors), wide[:, 40:136])


def test_biases_of_the_wrong_shape_are_refused() -> None:
    layer = Layer(TensorType.Q8_0, n=2, k=1, d=32, f=64, n_tokens=3)
    with pytest.raises(ValueError, match="scales and biases must be"):
        layer.run(vectors=ExpertVectors(biases=(torch.zeros(2, 32), None, None)))


def test_experts_give_a_token_the_same_bits_in_any_batch() -> None:
    layer = Layer(TensorType.Q8_0, n=3, k=2, n_tokens=150)
    together = layer.run()
    for tokens in (slice(0, 1), slice(70, 71), slice(3, 10), slice(20, 120)):
        assert torch.equal(layer.run(tokens), together[tokens])


def test_many_tokens_are_taken_in_turns_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(TensorType.Q8_0)
    together = layer.run()
    module = sys.modules["overspill.kernels.numba.experts"]
    monkeypatch.setattr(module, "_MAX_HIDDEN_BYTES", 7 * 3 * 4 * 512)
    assert torch.equal(layer.run(), together)


@pytest.mark.parametrize("n_tokens", [1, 8, 60])
@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K], ids=lambda t: t.name)
def test_slabs_of_experts_give_the_bits_of_one_run(type: TensorType, n_tokens: int) -> None:
    layer = Layer(type, n=8, k=4, n_tokens=n_tokens)
    together = layer.run()
    out = layer.start.clone()
    for first, last in ((0, 4), (4, 7), (7, 8)):
        slot_of = np.full(8, -1, np.int32)
        slot_of[first:last] = np.arange(last - first)
        slab = [w.rows(first, last) for w in layer.stacks()]
        experts(layer.x, *slab, layer.ids.to(torch.int32), layer.weights, slot_of, out, Activation.SILU)
    assert torch.equal(out, together)


def test_absent_experts_add_nothing_and_slots_may_be_shuffled() -> None:
    layer = Layer(TensorType.Q4_0)
    order = [4, 1, 5]
    stacks = [QTensor(w.data[order], w.type, (3, *w.shape[1:])) for w in layer.stacks()]
    slot_of = np.full(6, -1, np.int32)
    slot_of[order] = np.arange(3)
    out = layer.start.clone()
    experts(layer.x, *stacks, layer.ids, layer.weights, slot_of, out, Activation.SILU)
    expected = reference(layer, present=set(order))
    assert relative_error(out, expected) < TOLERANCE
    out = layer.start.clone()
    experts(layer.x, *stacks, layer.ids, layer.weights, np.full(6, -1, np.int32), out, Activation.SILU)
    assert torch.equal(out, layer.start)


def test_no_tokens_and_no_experts_change_nothing() -> None:
    layer = Layer(TensorType.Q8_0)
    assert layer.run(slice(0, 0)).shape == (0, 256)
    out = layer.start.clone()
    nothing = [w.rows(0, 0) for w in layer.stacks()]
    experts(layer.x, *nothing, layer.ids, layer.weights, np.full(6, -1, np.int32), out, Activation.SILU)
    assert torch.equal(out, layer.start)


def test_experts_refuse_ids_slots_and_shapes_that_are_none() -> None:
    layer = Layer(TensorType.Q8_0, n=2, k=1, d=32, f=32, n_tokens=3)
    rest = layer.weights, None, layer.start.clone(), Activation.SILU
    for bad_id in (-1, 2):
        with pytest.raises(IndexError, match="expert ids"):
            experts(layer.x, *layer.stacks(), torch.full((3, 1), bad_id), *rest)
    with pytest.raises(IndexError, match="slots at most 1"):
        experts(layer.x, *layer.stacks(), layer.ids, layer.weights, np.full(2, 2, np.int32), *rest[2:])
    assert torch.equal(rest[2], layer.start)
    with pytest.raises(ValueError, match="do not fit"):
        experts(torch.zeros(3, 64), *layer.stacks(), layer.ids, *rest)
    with pytest.raises(ValueError, match="do not fit 3 tokens"):
        experts(layer.x, *layer.stacks(), layer.ids[:2], layer.weights[:2], *rest[1:])
    with pytest.raises(ValueError, match="must be float32"):
        experts(layer.x.double(), *layer.stacks(), layer.ids, *rest)


def test_calls_from_several_threads_at_once() -> None:
    layers = [Layer(t, n_tokens=n) for t, n in ((TensorType.Q8_0, 1), (TensorType.Q4_K, 40), (TensorType.Q6_K, 7))]
    expected = [(layer.run(), matmul(layer.x, layer.up[1])) for layer in layers]
    wrong: list[int] = []

    def work(i: int) -> None:
        use_threads(1 + i % 2)
        for _ in range(20):
            same = torch.equal(layers[i].run(), expected[i][0])
            if not (same and torch.equal(matmul(layers[i].x, layers[i].up[1]), expected[i][1])):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(layers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0, 1e4])
def test_silu_over_its_whole_range(size: float) -> None:
    """Down is the identity and up is 1, so the output is the activation itself."""
    n = 64
    eye = torch.eye(n).view(torch.uint8).view(1, n, 4 * n)
    identity = QTensor(eye, TensorType.F32, (1, n, n))
    ones = torch.zeros(n, n)
    ones[:, 0] = 1.0
    up = QTensor(ones.view(torch.uint8).view(1, n, 4 * n), TensorType.F32, (1, n, n))
    x = torch.linspace(-size, size, 50 * n).view(50, n)
    x[:, 0] = 1.0
    out = torch.zeros(50, n)
    experts(x, identity, up, identity, torch.zeros(50, 1, dtype=torch.int32), torch.ones(50, 1), None, out)
    torch.testing.assert_close(out, torch.nn.functional.silu(x.double()).float(), rtol=1e-6, atol=1e-34)
