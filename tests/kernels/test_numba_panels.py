"""Weights whose rows are interleaved by sixteen: the same bytes in another order, the same bits of every product."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.bench.shapes import SHAPES
from overspill.bench.synth import synthetic
from overspill.gguf.types import TensorType
from overspill.kernels.numba import experts, has_kernel, matmul, takes_digits
from overspill.kernels.numba.digits import DIGIT_BITS, STEP_BITS
from overspill.kernels.numba.interleave import interleave
from overspill.quant.dequant import dequantize
from overspill.quant.experts import Activation
from overspill.quant.panels import PANEL_ROWS, Panels, takes_panels
from overspill.quant.qtensor import QTensor
from tests.helpers.plain import plain_logits, plain_model
from tests.kernels.weights import random_weight

TYPES = [t for t in TensorType if has_kernel(t) and takes_panels(t, (PANEL_ROWS, 256))]
# Those that this CPU multiplies as bytes: only such products read panels.
READ_TYPES = [t for t in TYPES if takes_digits(t)]


def panels(source: QTensor) -> Panels:
    target = Panels.from_bytes(torch.full((source.n_bytes,), 0xFF, dtype=torch.uint8), source.type, source.shape)
    interleave(source, target)
    return target


def test_types_of_quantised_files_take_panels() -> None:
    assert {TensorType.Q8_0, TensorType.Q4_0, TensorType.Q4_K, TensorType.Q6_K, TensorType.MXFP4} <= {*TYPES}
    assert not takes_panels(TensorType.Q4_K, (37, 256))
    assert not takes_panels(TensorType.F32, (PANEL_ROWS, 256))


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(16, 256), (48, 512), (3, 32, 256)])
def test_all_bytes_are_there(type: TensorType, shape: tuple[int, ...]) -> None:
    source = random_weight(type, shape)
    found = panels(source)
    assert torch.equal(found.in_rows().data, source.data)
    assert torch.equal(dequantize(found), dequantize(source))
    if len(shape) == 3:
        assert torch.equal(found[1].in_rows().data, source.data[1])
        assert torch.equal(found.rows(1, 3).in_rows().data, source.data[1:3])


def test_rows_that_are_not_whole_panels_are_not_in_one_place() -> None:
    found = panels(random_weight(TensorType.Q8_0, (48, 256)))
    assert found.rows(16, 48).shape == (32, 256)
    with pytest.raises(IndexError):
        found.rows(8, 24)


@pytest.mark.parametrize("type", READ_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 2, 5, 40])
def test_products_have_the_same_bits(type: TensorType, n_tokens: int) -> None:
    source = random_weight(type, (80, 512))
    x = torch.randn(n_tokens, 512, generator=torch.Generator().manual_seed(n_tokens))
    assert torch.equal(matmul(x, panels(source)), matmul(x, source))


@pytest.mark.parametrize("type", READ_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_one_activation_much_larger_than_the_others(type: TensorType, n_tokens: int) -> None:
    """They share a power of two with it."""
    source = random_weight(type, (80, 512))
    x = torch.randn(n_tokens, 512, generator=torch.Generator().manual_seed(n_tokens))
    x[:, 7] *= 300
    expected = x.double() @ dequantize(source).double().T
    assert (matmul(x, panels(source)) - expected).norm() < 1e-5 * expected.norm()


# Where the numbers of a block are, and the byte that makes them largest.
NUMBERS = {
    TensorType.Q8_0: (slice(2, 34), 0x7F),
    TensorType.Q4_1: (slice(4, 20), 0xFF),
    TensorType.Q4_K: (slice(16, 144), 0xFF),
    TensorType.Q5_1: (slice(4, 24), 0xFF),
    TensorType.Q5_K: (slice(16, 176), 0xFF),
    TensorType.IQ4_NL: (slice(2, 18), 0xFF),
    TensorType.MXFP4: (slice(1, 17), 0x77),
    TensorType.Q6_K: (slice(0, 192), 0xFF),
}


@pytest.mark.parametrize("type", NUMBERS, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 2])
@pytest.mark.parametrize("sign", [-1, 1])
def test_sums_of_the_largest_numbers_fit(type: TensorType, n_tokens: int, sign: int) -> None:
    """All weights are as large as they can be, all digits the largest of their sign that there are together."""
    source = random_weight(type, (16, 256))
    place, byte = NUMBERS[type]
    source.data.view(-1, type.block.n_bytes)[:, place] = byte
    high, others = (-63, -64) if sign < 0 else (63, 63)
    if DIGIT_BITS == 8:
        high, others = (-32, -128) if sign < 0 else (63, 127)
    integer = (high << 2 * DIGIT_BITS) + (others << DIGIT_BITS) + others
    x = torch.full((n_tokens, 256), integer / 2**STEP_BITS)
    expected = x.double() @ dequantize(source).double().T
    assert (matmul(x, source) - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("type", READ_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
def test_experts_have_the_same_bits(type: TensorType, n_tokens: int) -> None:
    n, k, d, f = 5, 2, 256, 512
    rows = [random_weight(type, (n, *shape), seed=i) for i, shape in enumerate([(f, d), (f, d), (d, f)])]
    random = torch.Generator().manual_seed(n_tokens)
    x, mix = torch.randn(n_tokens, d, generator=random), torch.rand(n_tokens, k, generator=random)
    ids = torch.stack([torch.randperm(n, generator=random)[:k] for _ in range(n_tokens)]).to(torch.int32)
    found = []
    for stacks in (rows, [panels(stack) for stack in rows]):
        out = torch.ones(n_tokens, d)
        experts(x, *stacks, ids, mix, None, out, Activation.SILU)
        found.append(out)
    assert torch.equal(*found)


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K"])
def test_a_model_of_panels_gives_the_logits_of_the_reference(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens in its vocabulary than the real one, most of whose time they would be."""
    shape = SHAPES["qwen3-30b-a3b"] | {"qwen3moe.vocab_size": 2048}
    monkeypatch.setitem(SHAPES, "few-tokens", shape)
    source = synthetic("few-tokens", quant=quant, n_layer=1)
    ids = [5, 77, 1234, 9]
    wanted = plain_logits(plain_model(source), ids, 4)
    with LLM(source, devices="cpu", n_ctx=64) as llm:
        found = llm.logits(ids)
    error = (found - wanted).norm() / wanted.norm()
    assert error < 1e-2
