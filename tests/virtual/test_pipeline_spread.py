"""Experts of few tokens that several parties compute: nothing is lost, nothing counted twice, nobody overtaken."""

from __future__ import annotations

import pytest
import torch

from overspill.kernels.spread import bounds, divide
from overspill.pipeline.schedule import Order, Policy
from tests.helpers.pipe import Shape, cut_waves, pipe, run_all
from tests.helpers.plain import plain_logits, plain_model
from tests.helpers.tiny_moe import N_EXPERT, tiny_source
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


@pytest.mark.parametrize("n_devices", [1, 2, 3])
def test_no_hazards(n_devices: int) -> None:
    shape = Shape(n_devices, slab_experts=N_EXPERT)
    with pipe(tiny_source(), shape, n_ubatch=2, n_ubatches=len(SIZES), n_cells=len(IDS), kind="null") as p:
        for wave in cut_waves(IDS, SIZES, 2):
            p.runner.run(wave, p.schedule(Order.BREADTH_FIRST, Policy.SPREAD))
        assert hazards(p) == []


def test_each_named_expert_has_one_party_and_the_first_are_the_first_partys() -> None:
    ids = torch.tensor([[7, 2, 30], [2, 11, 5]], dtype=torch.int32)
    who = torch.empty(32, dtype=torch.int32)

    divide(ids, [(1, 2), (0, 1), (2, 2)], who)

    named = {e: int(who[e]) for e in range(32) if who[e] >= 0}
    assert named == {2: 1, 5: 1, 7: 0, 11: 2, 30: 2}


def test_parts_are_as_large_as_the_weights() -> None:
    assert bounds([(0, 1), (1, 1), (2, 2)]) == [0, 256, 512, 1024]
