"""Experts of which the CPU computes some while the others go up: nothing lost, nothing twice, nobody overtaken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overspill.pipeline.schedule import Order, Policy
from tests.helpers.pipe import Shape, cut_waves, pipe, run_all
from tests.helpers.plain import plain_logits, plain_model
from tests.helpers.tiny_moe import N_EXPERT, tiny_source
from tests.virtual.test_pipeline_hazards import hazards

IDS, SIZES = [5, 9, 30, 17, 2, 8, 8, 21], (2, 1, 2, 1, 1, 1)
SETTINGS = {"n_ubatch": 2, "n_ubatches": len(SIZES), "n_cells": len(IDS)}
EXPERT_BYTES = 3 * 720
N_LAYERS = 4


@pytest.mark.parametrize("n_on_cpu", [1, N_EXPERT // 2, N_EXPERT - 1])
@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("order", list(Order))
def test_parts_add_up(order: Order, n_devices: int, n_on_cpu: int) -> None:
    expected = plain_logits(plain_model(tiny_source()), IDS, 8)
    for chaos_seed in range(2):
        shape = Shape(n_devices, slab_experts=N_EXPERT, widens=chaos_seed == 1)
        with pipe(tiny_source(), shape, chaos_seed=chaos_seed, **SETTINGS) as p:
            schedule = replace(p.schedule(order, Policy.HYBRID), n_on_cpu=n_on_cpu)
            for n_waves in (1, 2):
                p.poison()
                logits = run_all(p, IDS, SIZES, schedule, n_waves)
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_on_cpu", [1, N_EXPERT - 1])
def test_the_parts_of_the_cpu_do_not_go_up(n_on_cpu: int) -> None:
    with pipe(tiny_source(), Shape(2, slab_experts=N_EXPERT), **SETTINGS) as p:
        schedule = replace(p.schedule(Order.BREADTH_FIRST, Policy.HYBRID), n_on_cpu=n_on_cpu)
        run_all(p, IDS, SIZES, schedule, 1)
        assert sum(p.uploaded_bytes()) == N_LAYERS * (N_EXPERT - n_on_cpu) * EXPERT_BYTES
        run_all(p, IDS, SIZES, p.schedule(Order.BREADTH_FIRST), 1)
        assert sum(p.uploaded_bytes()) == N_LAYERS * (2 * N_EXPERT - n_on_cpu) * EXPERT_BYTES


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("widens", [False, True])
def test_no_hazards(n_devices: int, widens: bool) -> None:
    shape = Shape(n_devices, slab_experts=N_EXPERT, widens=widens)
    with pipe(tiny_source(), shape, kind="null", **SETTINGS) as p:
        for wave in cut_waves(IDS, SIZES, 3):
            p.runner.run(wave, replace(p.schedule(Order.BREADTH_FIRST, Policy.HYBRID), n_on_cpu=1))
        assert hazards(p) == []
