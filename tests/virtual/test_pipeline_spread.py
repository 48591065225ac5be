"""Experts of few tokens that several parties compute: nothing is lost, nothing counted twice, nobody overtaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from overspill.gguf import open_gguf
from overspill.kernels.sharing import CacheState
from overspill.kernels.spread import bounds, divide, stacks_in
from overspill.pipeline.schedule import Order, Policy
from overspill.quant.experts import ExpertVectors, ExpertWeights
from tests.helpers.pipe import OPS, Shape, cut_waves, pipe, run_all
from tests.helpers.plain import DATA, plain_logits, plain_model
from tests.helpers.tiny_moe import N_EXPERT, N_USED, tiny_source
from tests.virtual.test_pipeline_hazards import hazards

IDS, SIZES = [5, 9, 30, 17, 2, 8, 8, 21], (2, 1, 2, 1, 1, 1)


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("order", list(Order))
def test_spread_experts_add_up(n_devices: int, order: Order) -> None:
    expected = plain_logits(plain_model(tiny_source()), IDS, 8)
    for chaos_seed in range(5):
        shape = Shape(n_devices, slab_experts=N_EXPERT)
        settings = {"n_ubatch": 2, "n_ubatches": len(SIZES), "n_cells": len(IDS), "chaos_seed": chaos_seed}
        with pipe(tiny_source(), shape, **settings) as p:
            p.poison()
            logits = run_all(p, IDS, SIZES, p.schedule(order, Policy.SPREAD), 2)
            assert sum(p.uploaded_bytes()) == 0
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_cached", [N_USED, N_EXPERT - 1, N_EXPERT])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_experts_kept_on_devices_add_up_too(n_devices: int, n_cached: int) -> None:
    expected = plain_logits(plain_model(tiny_source()), IDS, 8)
    shape = Shape(n_devices, slab_experts=N_EXPERT, n_cached=n_cached)
    for chaos_seed in range(3):
        settings = {"n_ubatch": 2, "n_ubatches": len(SIZES), "n_cells": len(IDS), "chaos_seed": chaos_seed}
        with pipe(tiny_source(), shape, ops=SPOILING_OPS, **settings) as p:
            p.poison()
            schedule = p.schedule(Order.BREADTH_FIRST, Policy.SPREAD)
            logits = [run_all(p, IDS, SIZES, schedule, 2) for _ in range(2)]
        torch.testing.assert_close(torch.cat(logits), expected.repeat(2, 1), rtol=1e-4, atol=1e-4)


def _spoil_and_fill(
    source: ExpertWeights, state: CacheState, memory: torch.Tensor, vectors: ExpertVectors
) -> ExpertWeights:
    """Slots that are about to be filled, or hold nothing, hold NaN."""
    kept = state.slot_of[(state.slot_of >= 0) & (state.fills < 0)]
    others = sorted({*range(state.n_slots)} - {*kept.tolist()})
    for stack in stacks_in(memory, source.parts, state.n_slices):
        stack.data[others] = 0xFF
    return OPS.fill(source, state, memory, vectors)


SPOILING_OPS = replace(OPS, fill=_spoil_and_fill)


def test_a_wave_that_ends_in_the_middle_leaves_nothing_in_slots() -> None:
    """It has given slots to experts that nobody has fetched."""
    expected = plain_logits(plain_model(tiny_source()), IDS, 8)
    shape = Shape(1, slab_experts=N_EXPERT, n_cached=N_EXPERT)
    settings = {"n_ubatch": 2, "n_ubatches": len(SIZES), "n_cells": len(IDS)}
    with pipe(tiny_source(), shape, ops=SPOILING_OPS, **settings) as p:
        p.poison()
        schedule = p.schedule(Order.BREADTH_FIRST, Policy.SPREAD)
        states = p.buffers("cache")[1::2]
        for state in states:
            state.raw()[0] = 0  # as if all were in the first slot
        p.runner._is_interrupted = True
        logits = run_all(p, IDS, SIZES, schedule, 2)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_cached", [0, 2, 6])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_halves_of_experts_add_up(n_devices: int, n_cached: int) -> None:
    """Of 8 experts, 2 a token; the CPU takes whole ones."""
    source = open_gguf(DATA / "models" / "qwen3moe.gguf")
    expected = plain_logits(plain_model(source), IDS, 8)
    shape = Shape(n_devices, slab_experts=8, n_cached=n_cached, n_slices=2)
    for chaos_seed in range(2):
        settings = {"n_ubatch": 2, "n_ubatches": len(SIZES), "n_cells": len(IDS), "chaos_seed": chaos_seed}
        with pipe(source, shape, ops=SPOILING_OPS, **settings) as p:
            p.poison()
            assert p.tally is not None
            p.tally.reset_host()
            schedule = p.schedule(Order.BREADTH_FIRST, Policy.SPREAD)
            logits = [run_all(p, IDS, SIZES, schedule, 2) for _ in range(2)]
            counts = p.tally.read_host()
            assert (sum(counts.n_hits.values()) > 0) == (n_cached > 0)
            assert counts.n_read["virtual:0"] > 0
        torch.testing.assert_close(torch.cat(logits), expected.repeat(2, 1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_cached", [0, N_USED])
def test_parties_are_counted(n_cached: int) -> None:
    """Each expert that a ubatch names in a layer is read by one party or lies in a cache."""
    shape = Shape(2, slab_experts=N_EXPERT, n_cached=n_cached)
    n_named = 0

    def count(found: Callable[..., None], ids: torch.Tensor, *args: object) -> None:
        nonlocal n_named
        n_named += len(ids.unique())
        found(ids, *args)

    ops = replace(OPS, look_up=partial(count, OPS.look_up), divide=partial(count, OPS.divide))
    with pipe(tiny_source(), shape, ops=ops, n_ubatch=2, n_ubatches=len(SIZES), n_cells=len(IDS)) as p:
        assert p.tally is not None
        run_all(p, IDS, SIZES, p.schedule(Order.BREADTH_FIRST, Policy.SPREAD), 2)
        counts = p.tally.read_host()
        n_hits = sum(counts.n_hits.values())
        assert n_hits + sum(counts.n_read.values()) == n_named
        assert sum(counts.n_missed.values()) == sum(counts.n_read.values())
        assert [*counts.n_hits] == [*counts.n_missed] == ["virtual:0", "virtual:1"]
        assert [*counts.n_read] == ["virtual:0", "virtual:1", "cpu"]
        assert min(list(counts.n_read.values())[:2]) > 0
        assert counts.read_bytes == {name: n * 3 * 720 for name, n in counts.n_read.items()}
        assert (min(counts.n_hits.values()) > 0) == (n_cached > 0)
        shown = counts.as_dict(len(IDS))
        assert shown["hit_rate"] == n_hits / n_named
        assert sum(shown["bytes_per_token"].values()) == pytest.approx((n_named - n_hits) * 2160 / len(IDS), abs=3)
        assert p.runner.counters.n_spread_tokens == len(IDS)
        p.tally.reset_host()
        assert sum(p.tally.read_host().n_missed.values()) == 0


@pytest.mark.parametrize("n_cached", [0, N_USED])
@pytest.mark.parametrize("n_devices", [1, 2, 3])
def test_no_hazards(n_devices: int, n_cached: int) -> None:
    shape = Shape(n_devices, slab_experts=N_EXPERT, n_cached=n_cached)
    with pipe(tiny_source(), shape, n_ubatch=2, n_ubatches=len(SIZES), n_cells=len(IDS), kind="null") as p:
        for wave in cut_waves(IDS, SIZES, 2):
            p.runner.run(wave, p.schedule(Order.BREADTH_FIRST, Policy.SPREAD))
        assert hazards(p) == []


def test_each_named_expert_has_one_party_and_the_first_are_the_first_partys() -> None:
    ids = torch.tensor([[7, 2, 30], [2, 11, 5]], dtype=torch.int32)
    who = torch.empty(32, dtype=torch.int32)

    divide(ids, [(1, 2), (0, 1), (2, 2)], who, torch.zeros(4, dtype=torch.int64))

    named = {e: int(who[e]) for e in range(32) if who[e] >= 0}
    assert named == {2: 1, 5: 1, 7: 0, 11: 2, 30: 2}


def test_parts_are_as_large_as_the_weights() -> None:
    assert bounds([(0, 1), (1, 1), (2, 2)]) == [0, 256, 512, 1024]
