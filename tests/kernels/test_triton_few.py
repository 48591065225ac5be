"""Products of a few tokens in Triton against the reference: every type, odd sizes, and what rides along."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES, assert_near

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton import norm, skinny
from overspill.kernels.triton.decode import DECODERS
from overspill.kernels.triton.linear import LinearOp
from overspill.kernels.triton.launch import Tuning
from overspill.kernels.triton.tuning import RowTile
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor
from tests.kernels.weights import random_weight

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 1e-6
T = TensorType


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def weight_of(type: TensorType, *shape: int, seed: int = 0) -> QTensor:
    q = random_weight(type, shape, seed=seed)
    return QTensor(q.data.to(DEVICE), q.type, q.shape)


def product(x: torch.Tensor, weight: QTensor, dtype: torch.dtype) -> torch.Tensor:
    """x W^T in float64, of x as the kernels round it; more than one token rounds weights too."""
    values = dequantize(weight)
    values = values if len(x) == 1 or weight.type is T.F32 else values.to(dtype)
    x = x if weight.type is T.F32 else x.to(dtype)
    return x.double() @ values.double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", DECODERS, ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 5])
def test_every_type(n_tokens: int, type: TensorType, dtype: torch.dtype) -> None:
    x, weight = normal(n_tokens, 768), weight_of(type, 37, 768)
    assert_near(LinearOp(Workspace(DEVICE), dtype).linear(x, weight), product(x, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", [T.BF16, T.F16, T.F32, T.Q8_0, T.Q4_0], ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 2, 16, 17, 32, 33])
def test_numbers_of_tokens(n_tokens: int, type: TensorType, dtype: torch.dtype) -> None:
    """Rows of 1120 values are no whole number of tiles, and 8 rows fill no tile of theirs."""
    x, weight = normal(n_tokens, 1120), weight_of(type, 8, 1120)
    got = LinearOp(Workspace(DEVICE), dtype).linear(x, weight)
    assert got.dtype == torch.float32
    assert_near(got, product(x, weight, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("type", [T.BF16, T.Q8_0, T.Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("sizes", [(19,), (19, 32), (19, 3, 40)], ids=str)
def test_several_weights_norm_and_residual(
    sizes: tuple[int, ...], n_tokens: int, type: TensorType, dtype: torch.dtype
) -> None:
    op, x, gain = LinearOp(Workspace(DEVICE), dtype), 3 * normal(n_tokens, 256), normal(256)
    weights = [weight_of(type, n, 256, seed=n) for n in sizes]
    normed = norm.rms_norm(x, gain, EPS, dtype=dtype)
    assert_near(normed, ref.rms_norm(x, gain, EPS))
    for got, weight in zip(op.linears(x, weights), weights, strict=True):
        assert_near(got, product(x, weight, dtype))
    for got, weight in zip(op.norm_linears(x, gain, EPS, weights), weights, strict=True):
        assert_near(got, product(normed, weight, dtype))
    biases = [normal(n) for n in sizes]
    shifted = op.norm_linears(x, gain, EPS, weights, biases)
    for got, weight, bias in zip(shifted, weights, biases, strict=True):
        assert_near(got, product(normed, weight, dtype) + bias)
    before = normal(n_tokens, sizes[-1])
    assert_near(op.add_linear(before, x, weights[-1]), before.double() + product(x, weights[-1], dtype))


def test_weights_of_two_types_are_products_of_their_own() -> None:
    op, x = LinearOp(Workspace(DEVICE), torch.float32), normal(1, 256)
    weights = [weight_of(T.Q4_K, 9, 256), weight_of(T.Q6_K, 5, 256)]
    assert not skinny.can_multiply(x, weights)
    for got, weight in zip(op.linears(x, weights), weights, strict=True):
        assert_near(got, product(x, weight, torch.float32))


@pytest.mark.parametrize("type", [T.BF16, T.Q8_0, T.IQ4_XS], ids=lambda t: t.name)
@pytest.mark.parametrize("n_tokens", [1, 4])
@pytest.mark.parametrize("tile", [RowTile(2, 64, Tuning(1, 1)), RowTile(8, 2048, Tuning(2, 1))], ids=str)
def test_any_tile_does(tile: RowTile, n_tokens: int, type: TensorType) -> None:
    tile = tile if n_tokens == 1 else tile._replace(n_rows=16)
    x, weight = normal(n_tokens, 512), weight_of(type, 23, 512)
    got = skinny.multiply(x, [weight], dtype=torch.float32, tile=tile)
    assert_near(got, product(x, weight, torch.float32))


def test_scales_of_any_size() -> None:
    """MXFP4 with the scales 2^-128 ... 2^-118 and some that are large: what is subnormal on the way is not lost."""
    weight = weight_of(T.MXFP4, 1, 32 * 11)
    x = normal(1, 32 * 11)
    for exponents in (range(11), range(120, 131), range(200, 211)):
        weight.data[0, ::17] = torch.tensor(list(exponents), dtype=torch.uint8)
        got = skinny.multiply(x, [weight], dtype=torch.float32)
        unit = 2.0 ** (exponents[-1] - 128)
        assert_near((got.double() / unit).float(), product(x, weight, torch.float32) / unit)
