"""The Triton dequantiser against the reference, bit for bit, for every type and layout it is given."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

import logging

import pytest
import torch

from tests.helpers.triton_device import DEVICE

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton.decode import DECODERS
from overspill.kernels.triton.dequant import _warn, dequantize_bf16, dequantize_f32, dequantize_into
from overspill.kernels.triton.linear import embed
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow and are NaN


def random_bytes(type: TensorType, *shape: int) -> QTensor:
    """A weight of random bytes: any value that the type can hold, infinities and NaN too."""
    generator = torch.Generator().manual_seed(int(type))
    size = (*shape[:-1], type.row_bytes(shape[-1]))
    raw = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return QTensor(raw.to(DEVICE), type, shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("type", DECODERS, ids=lambda t: t.name)
def test_equals_the_reference_bit_for_bit(type: TensorType) -> None:
    weight = random_bytes(type, 3, 7, 512)
    assert same_bits(dequantize_f32(weight), dequantize(weight))


def test_knows_every_type_that_it_should() -> None:
    linear = {TensorType.Q4_0, TensorType.Q4_1, TensorType.Q5_0, TensorType.Q5_1, TensorType.Q8_0}
    k = {TensorType.Q2_K, TensorType.Q3_K, TensorType.Q4_K, TensorType.Q5_K, TensorType.Q6_K}
    codebooks = {TensorType.IQ4_NL, TensorType.IQ4_XS, TensorType.MXFP4}
    assert DECODERS.keys() == linear | k | codebooks | {TensorType.F32, TensorType.F16, TensorType.BF16}


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter truncates to bfloat16 where devices round")
@pytest.mark.parametrize("type", DECODERS, ids=lambda t: t.name)
def test_bfloat16_is_the_rounded_reference(type: TensorType) -> None:
    weight = random_bytes(type, 9, 1024)
    assert same_bits(dequantize_bf16(weight), dequantize(weight).bfloat16())


@pytest.mark.parametrize("type", [TensorType.Q8_0, TensorType.Q4_K, TensorType.IQ4_NL], ids=lambda t: t.name)
def test_matrices_go_where_they_are_wanted_and_nowhere_else(type: TensorType) -> None:
    weight = random_bytes(type, 5, 3, 256)
    room = torch.full((2, 7, 256), 123.0, device=DEVICE)
    dequantize_into(weight, room[:, 2:5], first=3)
    assert same_bits(room[:, 2:5].contiguous(), dequantize(weight)[3:])
    assert (room[:, :2] == 123.0).all()
    assert (room[:, 5:] == 123.0).all()


def test_experts_without_tokens_are_skipped() -> None:
    weight = random_bytes(TensorType.Q8_0, 4, 2, 64)
    room = torch.full((4, 2, 64), 123.0, device=DEVICE)
    dequantize_into(weight, room, offsets=torch.tensor([0, 0, 3, 3, 4], dtype=torch.int32, device=DEVICE))
    assert (room[0::2] == 123.0).all()
    assert same_bits(room[1::2].contiguous(), dequantize(weight)[1::2].contiguous())


def test_a_type_without_a_kernel_is_right_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    _warn.cache_clear()
    weight = random_bytes(TensorType.IQ3_S, 2, 4, 256)
    with caplog.at_level(logging.WARNING):
        first, second = dequantize_f32(weight), dequantize_f32(weight)
    assert same_bits(first, dequantize(weight))
    assert same_bits(first, second)
    assert [r.message for r in caplog.records] == [
        "no GPU kernel for IQ3_S weights: the reference is used, which is slow"
    ]


def test_embedding_rows() -> None:
    weight = random_bytes(TensorType.Q6_K, 11, 256)
    ids = torch.tensor([3, 0, 10, 3], device=DEVICE)
    assert same_bits(embed(weight, ids), ref.embed(weight, ids))
