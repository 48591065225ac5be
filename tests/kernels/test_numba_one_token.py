"""Layers, and halves of them, for one token in one call: the bits of the ops one by one, wherever the token is and
whoever calls."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from overspill.gguf.types import TensorType
from overspill.kernels import AttentionWeights, RoutedWeights, RouterWeights, TokenLayer, TokenLayers, cpu
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


def attention(w: AttentionWeights) -> TokenLayers:
    layers = cpu.token_layers([TokenLayer(w)], None)
    assert layers is not None
    return layers


def call(layers: TokenLayers, x, keys, values, position, angles, slot: int = 0) -> torch.Tensor:
    return layers(x, [(keys, values)], slot, position, [angles])


def inputs(seed: int):
    """x, keys and values of two sequences, angles."""
    random = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, G, C, A, generator=random), torch.randn(2, G, C, B, generator=random)
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
    attend = attention(w)
    for i, position in enumerate((0, 3, C - 1)):
        x, keys, values, angles = inputs(i)
        before, their_keys, their_values = x.clone(), keys.clone(), values.clone()
        slot = i % 2
        expected = one_by_one(w, x, their_keys[slot], their_values[slot], position, angles)
        assert torch.equal(call(attend, x, keys, values, position, angles, slot), expected)
        assert torch.equal(keys, their_keys)
        assert torch.equal(values, their_values)
        assert torch.equal(x, before)


@pytest.mark.parametrize("n_ring", [5, 6, 37])
def test_cells_of_a_ring_give_the_bits_of_cells_in_a_row(n_ring: int) -> None:
    w = weights(window=5, sinks=torch.linspace(-1, 1, H))
    attend = attention(w)
    for position in (0, 4, 5, n_ring - 1, n_ring, n_ring + 1, 2 * n_ring - 2, C - 1):
        x, keys, values, angles = inputs(position)
        rings = [torch.full((2, G, n_ring, dim), torch.nan) for dim in (A, B)]
        for p in range(max(0, position - n_ring), position):
            for ring, cells in zip(rings, (keys, values), strict=True):
                ring[1, :, p % n_ring] = cells[1, :, p]
        expected = one_by_one(w, x, keys[1], values[1], position, angles)
        assert torch.equal(call(attend, x, *rings, position, angles, 1), expected)
        assert torch.equal(rings[0][1, :, position % n_ring], keys[1, :, position])
        assert torch.equal(rings[1][1, :, position % n_ring], values[1, :, position])


def test_cells_of_another_cache_are_found() -> None:
    w = weights()
    attend = attention(w)
    x, keys, values, angles = inputs(3)
    for n_cells in (C, 50, C):
        some_keys, some_values = keys[:, :, :n_cells].clone(), values[:, :, :n_cells].clone()
        expected = one_by_one(w, x, some_keys[1].clone(), some_values[1].clone(), 30, angles)
        assert torch.equal(call(attend, x, some_keys, some_values, 30, angles, 1), expected)


def test_any_thread_with_any_number_of_threads_may_call() -> None:
    attend, results = attention(weights()), []

    def work(n_threads: int) -> None:
        use_threads(n_threads)
        for _ in range(2):
            results.append(call(attend, *inputs(7)[:3], 9, inputs(7)[3]))

    work(1)
    work(2)
    other = threading.Thread(target=work, args=(2,))
    other.start()
    other.join()
    assert len(results) == 6
    assert all(torch.equal(result, results[0]) for result in results)


def routed(seed: int, n_experts: int = 5) -> RoutedWeights:
    random = torch.Generator().manual_seed(seed)
    gate, up = (random_weight(TensorType.Q4_K, (n_experts, 96, D), seed=seed + i) for i in range(2))
    router = RouterWeights(
        gain=torch.rand(D, generator=random),
        router=random_weight(TensorType.F32, (n_experts, D), seed=seed),
        bias=None,
        eps=1e-6,
        n_used=2,
        gating=1,
        is_normalised=True,
        scale=1.0,
    )
    down = random_weight(TensorType.Q8_0, (n_experts, D, 96), seed=seed + 2)
    return RoutedWeights(router, ExpertWeights(gate, up, down), Activation.SILU)


def routed_one_by_one(w: RoutedWeights, x: torch.Tensor) -> torch.Tensor:
    r, out = w.router, x.clone()
    rule = {"n_used": r.n_used, "gating": r.gating, "is_normalised": r.is_normalised, "scale": r.scale}
    normed, ids, mix = cpu.route(x, r.gain, r.router.data.view(torch.float32), r.bias, None, eps=r.eps, **rule)
    cpu.experts(normed, ids, mix, w.weights, w.activation, out)
    return out


@pytest.mark.parametrize("n_threads", [1, 2])
def test_layers_of_one_token_have_the_bits_of_their_ops(n_threads: int) -> None:
    """Layers that differ in all that may differ: widths of heads, window, experts, angles."""
    all_weights = [weights(), weights(window=5, gains=(None, None)), weights(sinks=torch.linspace(-1, 1, H))]
    experts = [routed(1), routed(5, n_experts=9), None]
    layers = cpu.token_layers(
        [TokenLayer(w, e, i % 2) for i, (w, e) in enumerate(zip(all_weights, experts, strict=True))], None
    )
    assert layers is not None
    use_threads(n_threads)
    for position in (0, 7, 8, 30):
        given = [inputs(10 * position + i) for i in range(3)]
        x, angles = given[0][0], [given[0][3], given[1][3]]
        cells = [(keys, values) for _, keys, values, _ in given]
        theirs = [(keys.clone(), values.clone()) for keys, values in cells]
        expected = x
        for i, (w, e) in enumerate(zip(all_weights, experts, strict=True)):
            own = [part[position % 2] for part in theirs[i]]
            expected = one_by_one(w, expected, *own, position, angles[i % 2])
            expected = expected if e is None else routed_one_by_one(e, expected)
        for _ in range(2):
            assert torch.equal(layers(x, cells, position % 2, position, angles), expected)
        for own, other in zip(cells, theirs, strict=True):
            assert all(map(torch.equal, own, other))


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
    assert cpu.token_layers([TokenLayer(w)], None) is None
    assert cpu.token_layers([TokenLayer(weights()), TokenLayer(w)], None) is None


def test_cells_that_do_not_fit_are_refused() -> None:
    attend = attention(weights())
    x, keys, values, angles = inputs(1)
    with pytest.raises(ValueError, match="do not fit"):
        call(attend, x, keys[..., :16], values, 0, angles)
    with pytest.raises(ValueError, match="do not fit"):
        call(attend, x, keys, values[:, :, 1:], 0, angles)


@pytest.mark.parametrize(("slot", "position"), [(0, C), (2, 0), (-1, 0), (0, -1)])
def test_a_token_without_a_cell_is_refused(slot: int, position: int) -> None:
    attend = attention(weights())
    x, keys, values, angles = inputs(1)
    with pytest.raises(ValueError, match="has no cells"):
        call(attend, x, keys, values, position, angles, slot)


def test_experts_of_another_router_are_refused() -> None:
    mixed = routed(1)._replace(router=routed(1, n_experts=6).router)
    layers = cpu.token_layers([TokenLayer(weights(), mixed)], None)
    assert layers is not None
    x, keys, values, angles = inputs(1)
    with pytest.raises(ValueError, match="not those of a router"):
        call(layers, x, keys, values, 0, angles)


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
