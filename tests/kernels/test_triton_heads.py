"""Norms, activations, rotation, routing and dense products in Triton against the reference."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.triton_device import DEVICE, DTYPES, assert_near

from overspill.gguf.types import TensorType
from overspill.kernels import ref
from overspill.kernels.triton.heads import Angles, HeadGains, prepare_heads, rope
from overspill.kernels.triton.linear import LinearOp
from overspill.kernels.triton.norm import rms_norm, swiglu
from overspill.kernels.triton.routing import Choice, pick_experts, route
from overspill.kernels.triton.workspace import Workspace
from overspill.models import router
from overspill.models.specs.router import Gating, RouterParams
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 1e-6


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 2880), (19, 3, 24)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape), normal(shape[-1])
    got = rms_norm(x, weight, EPS, dtype=dtype)
    assert got.dtype == dtype
    assert_near(got, ref.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    gate, up = 4 * normal(67, 45), normal(45, 67).T
    assert_near(swiglu(gate, up, dtype=dtype), ref.swiglu(gate, up))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "n_rot"), [(24, 24), (32, 16)])
def test_rope(head_dim: int, n_rot: int, is_interleaved: bool) -> None:
    x, cos, sin = normal(19, 3, head_dim), normal(19, n_rot // 2), normal(n_rot // 2, 19).T.contiguous()
    wanted = (ref.rope_pairs if is_interleaved else ref.rope_halves)(x, cos, sin)
    assert_near(rope(x, Angles(cos, sin, is_interleaved), dtype=torch.float32), wanted)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_normed_rotated_and_written_to_their_cells(has_norms: bool, is_interleaved: bool) -> None:
    T, H, G, A, B, first = 19, 6, 2, 24, 16, 5
    q, k, v = normal(T, H * A + G * A + G * B).split([H * A, G * A, G * B], 1)
    cos, sin = normal(T, 8), normal(8, T).T.contiguous()
    gains = HeadGains(normal(A), normal(A + 1)[:A], EPS) if has_norms else HeadGains(None, None, EPS)
    keys, values = torch.zeros(2, G, 40, A, device=DEVICE), torch.zeros(2, G, 40, B, device=DEVICE)
    cells = (keys[1, :, first : first + T], values[1, :, first : first + T])
    queries = prepare_heads(q, k, v, cells, Angles(cos, sin, is_interleaved), gains)

    def wanted(x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        x = x.reshape(T, -1, A)
        x = x if gain is None else ref.rms_norm(x, gain, EPS)
        return (ref.rope_pairs if is_interleaved else ref.rope_halves)(x, cos, sin)

    assert_near(queries, wanted(q, gains.q))
    assert_near(cells[0], wanted(k, gains.k).transpose(0, 1))
    assert torch.equal(cells[1], v.reshape(T, G, B).transpose(0, 1))
    for cache in (keys, values):
        assert not cache[0].any()
        assert not cache[1, :, :first].any()
        assert not cache[1, :, first + T :].any()


CHOICES = [
    {"gating": gating, "is_normalised": is_normalised, "has_bias": has_bias}
    for gating in Gating
    for is_normalised in (False, True)
    for has_bias in (False, True)
]


def rule_and_choice(E: int, K: int, case: dict[str, Any]) -> tuple[RouterParams, Choice, torch.Tensor | None]:
    bias = 0.3 * normal(E) if case["has_bias"] else None
    common = {"n_used": K, "is_normalised": case["is_normalised"], "scale": 1.7}
    rule = RouterParams(gating=case["gating"], n_groups=1, n_groups_used=1, **common)
    return rule, Choice(gating=int(case["gating"]), bias=bias, **common), bias


@pytest.mark.parametrize("case", CHOICES, ids=str)
@pytest.mark.parametrize(("n_experts", "n_used"), [(60, 4), (8, 3)])
def test_choice_of_experts(n_experts: int, n_used: int, case: dict[str, Any]) -> None:
    rule, choice, bias = rule_and_choice(n_experts, n_used, case)
    logits = 3 * normal(37, n_experts)
    ids, mix = pick_experts(logits, choice)
    wanted_ids, wanted_mix = router.pick_experts(logits, rule, bias)
    assert torch.equal(ids, wanted_ids)
    assert_near(mix, wanted_mix)


@pytest.mark.parametrize("gating", [1, 2, 3, 4])
@pytest.mark.parametrize("n_expert", [16, 20])
def test_ids_exist_and_differ_whatever_the_logits(n_expert: int, gating: int) -> None:
    """Broken weights make NaN; experts that do not exist would be read."""
    nan, inf = float("nan"), float("inf")
    logits = torch.randn(5, n_expert, generator=torch.Generator().manual_seed(1))
    logits[1], logits[2, 3:], logits[3], logits[4, ::2] = nan, nan, -inf, inf
    ids, _ = pick_experts(logits.to(DEVICE), Choice(4, gating))
    assert ((ids >= 0) & (ids < n_expert)).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert set(ids[2].tolist()) >= {0, 1, 2}


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    ids, mix = pick_experts(torch.zeros(3, 20, device=DEVICE), Choice(4))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    assert_near(mix, torch.full((3, 4), 0.25, device=DEVICE))


@pytest.mark.parametrize("n_tokens", [1, 5, 35])
@pytest.mark.parametrize("n_experts", [8, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_router_and_choice_in_one(n_experts: int, n_tokens: int, has_bias: bool) -> None:
    """Few tokens take another way than many."""
    x, gain, matrix = 5 * normal(n_tokens, 80), normal(80), normal(n_experts, 80)
    bias = 30 * normal(n_experts) if has_bias else None
    got = route(x, gain, EPS, matrix, Choice(3, is_normalised=False, logit_bias=bias), dtype=torch.float32)
    normed = ref.rms_norm(x, gain, EPS)
    logits = normed @ matrix.T
    mix, ids = (logits if bias is None else logits + bias).softmax(-1).topk(3, -1)
    assert torch.equal(got.ids, ids.int())
    assert_near(got.mix, mix)
    assert_near(got.normed, normed)


def weight_of(type: TensorType, *shape: int) -> QTensor:
    """A float weight."""
    dtypes = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}
    return QTensor(normal(*shape).to(dtypes[type]).view(torch.uint8), type, shape)


def q8_0(*shape: int) -> QTensor:
    """A Q8_0 weight with scales near 2^-8."""
    raw = torch.randint(0, 256, (*shape[:-1], TensorType.Q8_0.row_bytes(shape[-1])), dtype=torch.uint8)
    raw.unflatten(-1, (-1, 34))[..., 1] = 0x1C
    return QTensor(raw.to(DEVICE), TensorType.Q8_0, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_tokens", [1, 5, 16, 33])
def test_linear_with_quantised_weights(n_tokens: int, dtype: torch.dtype) -> None:
    """Few tokens go through the decoding product, which for one does not round weights; many through scratch memory
    that holds 10 rows of the weight."""
    op = LinearOp(Workspace(DEVICE, weight_bytes=10 * 288 * dtype.itemsize), dtype)
    x, weight = normal(n_tokens, 288), q8_0(37, 288)
    values = dequantize(weight) if n_tokens == 1 else dequantize(weight).to(dtype).float()
    wanted = x.to(dtype).float() @ values.T
    got = op.linear(x, weight)
    assert got.dtype == torch.float32
    assert_near(got, wanted)


@pytest.mark.parametrize("type", [TensorType.F32, TensorType.F16, TensorType.BF16], ids=lambda t: t.name)
def test_linear_with_float_weights(type: TensorType) -> None:
    op = LinearOp(Workspace(DEVICE), torch.float32)
    x, weight = normal(20, 48), weight_of(type, 9, 48)
    assert_near(op.linear(x, weight), ref.linear(x, weight))


def test_linear_with_a_matrix_for_each_head() -> None:
    op = LinearOp(Workspace(DEVICE), torch.float32)
    x, weight = normal(5, 3, 64), q8_0(3, 7, 64)
    assert_near(op.linear_heads(x, weight), ref.linear_heads(x, weight))
