"""The small CPU ops of few tokens against the specification: odd sizes, several kv heads, views of a cache."""

from __future__ import annotations

import pytest
import torch

from overspill.gguf.types import TensorType
from overspill.kernels import cpu, ref
from overspill.kernels import numba as fast
from overspill.models.router import pick_experts
from overspill.models.specs.router import Gating, RouterParams
from tests.kernels.weights import random_weight

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("shape", [(1, 576), (3, 7), (2, 5, 33), (4, 1)])
def test_norm_rows(shape):
    x, gain = random(*shape), random(shape[-1])
    got = fast.norm_rows(x, gain, 1e-3)
    torch.testing.assert_close(got, ref.rms_norm(x, gain, 1e-3), **TOLERANCE)


def test_norm_rows_reads_a_view_and_refuses_what_does_not_fit():
    x, gain = random(5, 3, 16), random(16)
    got = fast.norm_rows(x[:, 1], gain, 1e-6)
    torch.testing.assert_close(got, ref.rms_norm(x[:, 1], gain, 1e-6), **TOLERANCE)
    with pytest.raises(ValueError, match="gain"):
        fast.norm_rows(x, random(15), 1e-6)
    with pytest.raises(ValueError, match="float32"):
        fast.norm_rows(x.double(), gain, 1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_gains", [False, True])
@pytest.mark.parametrize(
    ("T", "H", "G", "A", "B", "n_rot"), [(1, 4, 2, 64, 64, 64), (3, 6, 3, 12, 5, 8), (8, 2, 1, 18, 18, 18)]
)
def test_prepare_heads(T, H, G, A, B, n_rot, has_gains, is_interleaved):
    q, k, v = random(T, H * A), random(T, G * A, seed=1), random(T, G * B, seed=2)
    angles = random(T, n_rot // 2), random(T, n_rot // 2, seed=3)
    gains = (random(A), random(A, seed=4)) if has_gains else (None, None)
    caches = [(torch.zeros(2, G, 20, A), torch.zeros(2, G, 20, B)) for _ in range(2)]
    outs = [
        prepare(
            q, k, v, tuple(c[1, :, 7 : 7 + T] for c in cache), angles, gains, eps=1e-5, is_interleaved=is_interleaved
        )
        for prepare, cache in zip((fast.prepare_heads, ref.prepare_heads), caches, strict=True)
    ]
    torch.testing.assert_close(*outs, **TOLERANCE)
    for got, expected in zip(*caches, strict=True):
        assert expected.count_nonzero() == T * expected.shape[1] * expected.shape[3]
        torch.testing.assert_close(got, expected, **TOLERANCE)


def test_prepare_heads_refuses_what_does_not_fit():
    angles, cells = (random(2, 4), random(2, 4)), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="do not fit"):
        fast.prepare_heads(
            random(2, 16), random(2, 16), random(2, 8), cells, angles, (None, None), eps=1e-5, is_interleaved=False
        )


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize(
    ("T", "C", "H", "G", "A", "B"),
    [(1, 1, 2, 1, 8, 8), (1, 37, 9, 3, 64, 64), (5, 40, 4, 2, 24, 17), (8, 8, 3, 3, 7, 9), (1, 300, 8, 1, 128, 128)],
)
def test_attend_few(T, C, H, G, A, B, window, has_sinks):
    q, sinks = 3 * random(T, H, A), random(H) if has_sinks else None
    k, v = random(2, G, C + 9, A)[1, :, 4 : C + 4], random(2, G, C + 9, B)[0, :, 5 : C + 5]
    options = {"scale": A**-0.5, "window": window, "sinks": sinks}
    got = fast.attend_few(q, k, v, **options)
    torch.testing.assert_close(got, ref.attention(q, k, v, **options), **TOLERANCE)


def test_attend_few_of_a_token_does_not_depend_on_the_others():
    q, k, v = random(4, 6, 32), random(2, 50, 32), random(2, 50, 32)
    together = fast.attend_few(q, k, v, scale=0.2)
    for t in range(4):
        assert torch.equal(together[t], fast.attend_few(q[t : t + 1], k[:, : 47 + t], v[:, : 47 + t], scale=0.2)[0])


def test_attend_few_survives_large_scores():
    q, k, v = random(1, 2, 8) * 1e4, random(1, 20, 8), random(1, 20, 8)
    torch.testing.assert_close(fast.attend_few(q, k, v, scale=1.0), ref.attention(q, k, v, scale=1.0), **TOLERANCE)


@pytest.mark.parametrize("gating", list(Gating))
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("T", "E", "K"), [(1, 8, 2), (5, 128, 8), (3, 5, 5), (2, 33, 1)])
@pytest.mark.parametrize("is_normalised", [False, True])
def test_pick_experts(T, E, K, gating, has_bias, is_normalised):
    logits, bias = 2 * random(T, E), random(E) if has_bias else None
    rule = RouterParams(gating=gating, n_used=K, is_normalised=is_normalised, scale=2.5, n_groups=1, n_groups_used=1)
    ids, mix = fast.pick_experts(logits, bias, n_used=K, gating=gating, is_normalised=is_normalised, scale=2.5)
    expected_ids, expected_mix = pick_experts(logits, rule, bias)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(mix, expected_mix, **TOLERANCE)


def test_pick_experts_gives_ids_that_exist_and_differ_whatever_the_logits():
    logits = torch.full((3, 9), float("nan"))
    logits[1] = float("-inf")
    logits[2] = 1.0
    ids, _ = fast.pick_experts(logits, None, n_used=4, gating=2, is_normalised=True, scale=1.0)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("n_tokens", [1, 3, 700])
def test_route(n_tokens):
    x, gain, router = random(n_tokens, 96), random(96), random(16, 96)
    normed, ids, mix = cpu.route(
        x, gain, router, None, None, eps=1e-5, n_used=3, gating=1, is_normalised=True, scale=1.0
    )
    expected = ref.rms_norm(x, gain, 1e-5)
    torch.testing.assert_close(normed, expected, **TOLERANCE)
    weights, best = (normed @ router.T).topk(3, -1)
    assert torch.equal(ids, best.int())
    torch.testing.assert_close(mix, weights.softmax(-1), **TOLERANCE)


@pytest.mark.parametrize("n_tokens", [1, 2, 41, 200])
def test_matmuls_give_what_each_gives_alone(n_tokens):
    types = (TensorType.Q8_0, TensorType.Q6_K, TensorType.F32)
    weights = [random_weight(type, (n, 256), seed=n) for type, n in zip(types, (33, 8, 200), strict=True)]
    x = random(n_tokens, 256)
    for got, weight in zip(fast.matmuls(x, weights), weights, strict=True):
        assert torch.equal(got, fast.matmul(x, weight))


@pytest.mark.parametrize("n_tokens", [1, 5, 150])
def test_add_matmul(n_tokens):
    weight, x, y = random_weight(TensorType.Q4_K, (45, 256), seed=1), random(n_tokens, 256), random(n_tokens, 45)
    out = y.clone()
    fast.add_matmul(out, x, weight)
    assert torch.equal(out, y + fast.matmul(x, weight))
    assert torch.equal(cpu.add_linear(y, x, weight), out)
    with pytest.raises(ValueError, match="output"):
        fast.add_matmul(out[:, 1:], x, weight)


@pytest.mark.parametrize("type", [t for t in TensorType if fast.has_kernel(t)], ids=lambda t: t.name)
def test_rows_of_a_matrix_have_the_bits_of_the_reference(type):
    weight = random_weight(type, (50, 768 if type.block.n_elements > 1 else 777))
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32)
    assert torch.equal(fast.rows_of(weight, ids), ref.embed(weight, ids))


def test_rows_that_are_not_there_are_refused():
    weight = random_weight(TensorType.Q8_0, (5, 32))
    for wrong in (5, -1):
        with pytest.raises(IndexError, match="0 to 4"):
            fast.rows_of(weight, torch.tensor([0, wrong]))
    assert fast.rows_of(weight, torch.tensor([], dtype=torch.int64)).shape == (0, 32)
