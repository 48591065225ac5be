"""Half a layer for one token in one call: the bits of the ops one by one, wherever the token is and whoever calls."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from overspill.gguf.types import TensorType
from overspill.kernels import AttentionWeights, RouterWeights, cpu
from overspill.kernels.numba import use_threads
from overspill.quant.experts import Activation, ExpertWeights
from tests.kernels.weights import random_weight

D, H, G, A, B, C = 256, 6, 2, 32, 64, 400


def weights(**changes: object) -> AttentionWeights:
    random = torch.Generator().manual_seed(1)
    plain = AttentionWeights(
        gain=torch.rand(D, generator=random),
        q=random_weight(TensorType.Q4_K, (H * A, D), seed=1),
        k=random_weight(TensorType.Q8_0, (G * A, D), seed=2),
        v=random_weight(TensorType.F16, (G * B, D), seed=3),
        output=random_weight(TensorType.Q5_0, (D, H * B), seed=4),
        gains=(torch.rand(A, generator=random), torch.rand(A, generator=random)),
        sinks=None,
        eps=1e-5,
        scale=0.2,
        window=None,
        is_interleaved=False,
    )
    return replace(plain, **changes)


def one_by_one(w: AttentionWeights, x, keys, values, position, angles) -> torch.Tensor:
    normed = cpu.rms_norm(x, w.gain, w.eps)
    q, k, v = cpu.linears(normed, (w.q, w.k, w.v))
    cells = slice(position, position + 1)
    own = keys[:, cells], values[:, cells]
    queries = cpu.prepare_heads(q, k, v, own, angles, w.gains, eps=w.eps, is_interleaved=w.is_interleaved)
    seen = slice(0 if w.window is None else max(0, position - w.window + 1), position + 1)
    attended = cpu.attention(queries, keys[:, seen], values[:, seen], scale=w.scale, window=w.window, sinks=w.sinks)
    return cpu.add_linear(x, attended, w.output)


def inputs(seed: int):
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, G, C, A, generator=random)[1], torch.randn(G, C, B, generator=random)
    theta = torch.randn(1, A // 2, generator=random)
    return torch.randn(1, D, generator=random), keys, values, (theta.cos(), theta.sin())


CHANGES = {
    "plain": {},
    "pairs": {"is_interleaved": True, "gains": (None, None)},
    "window": {"window": 5},
    "sinks": {"sinks": torch.linspace(-1, 1, H)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_attention_of_one_token_has_the_bits_of_its_ops(name: str) -> None:
    w = weights(**CHANGES[name])
    attend = cpu.token_attention(w)
    assert attend is not None
    for i, position in enumerate((0, 3, C - 1)):
        x, keys, values, angles = inputs(i)
        before, their_keys, their_values = x.clone(), keys.clone(), values.clone()
        expected = one_by_one(w, x, their_keys, their_values, position, angles)
        assert torch.equal(attend(x, keys, values, position, angles), expected)
        assert torch.equal(keys, their_keys)
        assert torch.equal(values, their_values)
        assert torch.equal(x, before)


@pytest.mark.parametrize("n_ring", [5, 6, 37])
def test_cells_of_a_ring_give_the_bits_of_cells_in_a_row(n_ring: int) -> None:
    w = weights(window=5, sinks=torch.linspace(-1, 1, H))
    attend = cpu.token_attention(w)
    assert attend is not None
    for position in (0, 4, 5, n_ring - 1, n_ring, n_ring + 1, 2 * n_ring - 2, C - 1):
        x, keys, values, angles = inputs(position)
        rings = [torch.full((G, n_ring, dim), torch.nan) for dim in (A, B)]
        for p in range(max(0, position - n_ring), position):
            for ring, cells in zip(rings, (keys, values), strict=True):
                ring[:, p % n_ring] = cells[:, p]
        expected = one_by_one(w, x, keys, values, position, angles)
        assert torch.equal(attend(x, *rings, position, angles), expected)
        assert torch.equal(rings[0][:, position % n_ring], keys[:, position])
        assert torch.equal(rings[1][:, position % n_ring], values[:, position])


def test_cells_of_another_cache_are_found() -> None:
    w = weights()
    attend = cpu.token_attention(w)
    assert attend is not None
    x, keys, values, angles = inputs(3)
    for n_cells in (C, 50, C):
        some_keys, some_values = keys[:, :n_cells].clone(), values[:, :n_cells].clone()
        expected = one_by_one(w, x, some_keys.clone(), some_values.clone(), 30, angles)
        assert torch.equal(attend(x, some_keys, some_values, 30, angles), expected)


def test_any_thread_with_any_number_of_threads_may_call() -> None:
    w = weights()
    attend = cpu.token_attention(w)
    assert attend is not None
    results = []

    def work(n_threads: int) -> None:
        use_threads(n_threads)
        for _ in range(2):
            x, keys, values, angles = inputs(7)
            results.append(attend(x, keys, values, 9, angles))

    work(1)
    work(2)
    other = threading.Thread(target=work, args=(2,))
    other.start()
    other.join()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gating", [1, 2, 3])
def test_router_of_one_token_has_the_bits_of_its_ops(gating: int, has_bias: bool) -> None:
    random = torch.Generator().manual_seed(2)
    router = random_weight(TensorType.F32, (40, D))
    w = RouterWeights(
        gain=torch.rand(D, generator=random),
        router=router,
        bias=torch.randn(40, generator=random) if has_bias else None,
        eps=1e-6,
        n_used=4,
        gating=gating,
        is_normalised=True,
        scale=1.5,
    )
    route = cpu.token_router(w)
    assert route is not None
    results = []
    for seed in (1, 2):
        x = torch.randn(1, D, generator=torch.Generator().manual_seed(seed))
        plain = router.data.view(torch.float32)
        rule = {"n_used": 4, "gating": gating, "is_normalised": True, "scale": 1.5}
        results.append((route(x), cpu.route(x, w.gain, plain, w.bias, None, eps=w.eps, **rule)))
    assert all(torch.equal(a, b) for got, expected in results for a, b in zip(got, expected, strict=True))


def test_tokens_that_are_no_whole_units_go_another_way() -> None:
    w = weights(gain=torch.rand(40), q=random_weight(TensorType.F32, (H * A, 40)))
    assert cpu.token_attention(w) is None


def test_cells_that_do_not_fit_are_refused() -> None:
    attend = cpu.token_attention(weights())
    assert attend is not None
    x, keys, values, angles = inputs(1)
    with pytest.raises(ValueError, match="do not fit"):
        attend(x, keys[..., :16], values, 0, angles)


@pytest.mark.parametrize("slot_of", [None, [1, -1, 0, 2, -1]], ids=["all", "some"])
def test_experts_of_one_token_have_the_bits_of_the_op(slot_of: list[int] | None) -> None:
    n_slots, n_hidden = 5 if slot_of is None else 3, 96
    gate, up = (random_weight(TensorType.Q4_K, (n_slots, n_hidden, D), seed=seed) for seed in (1, 2))
    down = random_weight(TensorType.Q8_0, (n_slots, D, n_hidden), seed=3)
    weights = ExpertWeights(gate, up, down, None if slot_of is None else np.array(slot_of, np.int32))
    experts = cpu.token_experts(weights, Activation.SILU)
    assert experts is not None
    for seed in (1, 2, 3):
        random = torch.Generator().manual_seed(seed)
        x, out, mix = (torch.randn(1, n, generator=random) for n in (D, D, 2))
        ids = torch.randperm(5, generator=random)[:2][None].to(torch.int32)
        expected = out.clone()
        cpu.experts(x, ids, mix, weights, Activation.SILU, expected)
        experts(x, ids.long() if seed == 3 else ids, mix, out)
        assert torch.equal(out, expected)
    with pytest.raises(IndexError, match="expert ids"):
        experts(x, torch.tensor([[0, 5]], dtype=torch.int32), mix, out)
    with pytest.raises(ValueError, match="one token"):
        experts(x.expand(2, D), ids.expand(2, 2), mix.expand(2, 2), out.expand(2, D))
    experts(x, ids, mix, out)
