"""Prompts that find experts in the devices' caches: the bits of prompts that upload all, and fewer bytes by those."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from overspill.cache.cells import Segment
from overspill.device.hazard import HazardKind
from overspill.gguf.source import ModelSource
from overspill.models.base import Model
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.blind import blind_to
from tests.helpers.pipe import Pipe, Shape, cut_waves, expert_bytes, pipe, rare_delays, run_all
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.reference import Reference, reference_logits
from tests.helpers.tiny_moe import N_EXPERT, N_VOCAB, tiny_model, tiny_source
from tests.models.fixtures import Case
from tests.virtual.test_pipeline_hazards import NO_THROTTLE, hazards

PROMPT, STEPS, OTHER = 0, 1, 2
"""Sequences: of the prompt, of steps, of a prompt of few tokens."""

SIZES = (3, 2, 3)
UPLOADS = [(order, policy) for order in Order for policy in (Policy.ALL, Policy.SELECTED)]
FIXTURE = Case("qwen3moe")
SHAPES = {
    "whole layers": Shape(2, slab_experts=N_EXPERT, n_cached=2),
    "slabs of one": Shape(1, slab_experts=1, n_cached=3),
    "slabs of three, dequantised": Shape(2, slab_experts=3, n_cached=2, widens=True),
    "all kept": Shape(3, slab_experts=N_EXPERT, n_cached=N_EXPERT, n_staging=3),
    "odd layers": Shape(2, grain=2, slab_experts=2, n_cached=3, host_layers="odd", embeds=True),
}
HALVES = Shape(2, slab_experts=8, n_cached=5, n_slices=2)


def prompt(which: int) -> list[int]:
    return [((7 + 4 * which) * i + 3 + which) % N_VOCAB for i in range(sum(SIZES))]


def source_of(shape: Shape) -> ModelSource:
    return tiny_source() if shape.n_slices == 1 else FIXTURE.source


def model_of(shape: Shape) -> Model:
    return tiny_model() if shape.n_slices == 1 else FIXTURE.model


def n_expert_of(shape: Shape) -> int:
    return model_of(shape).hparams.n_expert


@cache
def expected(which: int, shape: Shape, n_waves: int) -> torch.Tensor:
    return reference_logits(model_of(shape), cut_waves(prompt(which), SIZES, n_waves), n_cells=16)


def open_pipe(shape: Shape, *, n_trials: int = 0, kind: str = "virtual") -> AbstractContextManager[Pipe]:
    sizes = {"n_ubatch": max(SIZES), "n_ubatches": len(SIZES), "n_cells": 16, "n_slots": 3, "n_trials": n_trials}
    in_flight = NO_THROTTLE if kind == "null" else 64
    how = {"ops": STEP_OPS} if n_trials else {}
    return pipe(source_of(shape), shape, kind=kind, max_in_flight=in_flight, **how, **sizes)


def step(p: Pipe, i: int) -> None:
    """One token, whose experts are shared out, and fetched into slots."""
    ubatch = Ubatch((5 * i * i % N_VOCAB,), (Segment(STEPS, i, 1),), (0,))
    p.runner.run(Wave((ubatch,)), p.schedule(Order.BREADTH_FIRST, Policy.SPREAD))


def spoil_staging(p: Pipe) -> None:
    p.runner.synchronize_host()
    for buffer in p.buffers("slot", "wide"):
        buffer.raw().fill_(0xFF)


def slot_of(p: Pipe) -> dict[int, torch.Tensor]:
    """Of each layer with a cache, the slots `[E, n_slices]` of its experts: as they are, not as the host knows them."""
    p.runner.synchronize_host()
    n_slices, n_expert = p.shape.n_slices, n_expert_of(p.shape)
    layers = [i for i in range(p.layout.n_layer) if p.memory.any_of(("cache", i))]
    rows = {i: p.memory["cache", i][1].raw()[0] for i in layers}
    return {i: row[: n_expert * n_slices].view(n_expert, n_slices).clone() for i, row in rows.items()}


def held(p: Pipe) -> dict[int, set[int]]:
    return {i: set((slots >= 0).all(1).nonzero()[:, 0].tolist()) for i, slots in slot_of(p).items()}


@pytest.mark.parametrize("shape", [*SHAPES.values(), HALVES], ids=[*SHAPES, "halves"])
def test_prompts_after_steps_after_prompts_have_the_bits_of_the_model_alone(shape: Shape) -> None:
    with open_pipe(shape) as p:
        p.poison()
        n_steps = 0
        for seed, (order, policy) in product(range(2), UPLOADS):
            with rare_delays(seed, share=0.12):
                for which in (0, 1):
                    spoil_staging(p)
                    logits = run_all(p, prompt(which), SIZES, p.schedule(order, policy), 1 + seed)
                    assert torch.equal(logits, expected(which, shape, 1 + seed)), (seed, order, policy)
                step(p, n_steps % 16)
                n_steps += 1
        assert p.runner.counters.placed_bytes > 0


@pytest.mark.parametrize("shape", [SHAPES["whole layers"], HALVES], ids=["whole", "halves"])
def test_prompts_after_recorded_steps(shape: Shape) -> None:
    with recording(), open_pipe(replace(shape, slab_experts=8), n_trials=1) as p:
        p.poison()
        for i in range(6):
            spoil_staging(p)
            logits = run_all(p, prompt(i), SIZES, p.schedule(Order.BREADTH_FIRST), 1)
            assert torch.equal(logits, expected(i, shape, 1))
            step(p, i)
        assert p.runner.counters.placed_bytes > 0
        p.runner.close()


def named(shape: Shape, order: Order, wave: Wave) -> list[list[set[int]]]:
    """Per pass over the layers, which experts the routers of each layer name."""
    reference = Reference(model_of(shape), n_cells=16)
    reference.run(wave)
    groups = [[m] for m in range(len(SIZES))] if order is not Order.BREADTH_FIRST else [list(range(len(SIZES)))]
    n_layer = len(reference.chosen[0])
    return [[set().union(*(reference.chosen[m][i] for m in group)) for i in range(n_layer)] for group in groups]


@pytest.mark.parametrize("shape", [*SHAPES.values(), HALVES], ids=[*SHAPES, "halves"])
@pytest.mark.parametrize(("order", "policy"), UPLOADS)
def test_what_is_kept_does_not_go_up_and_nothing_else_is_missing(shape: Shape, order: Order, policy: Policy) -> None:
    (wave,) = cut_waves(prompt(0), SIZES, 1)
    with open_pipe(shape) as p:
        for i in range(4):
            step(p, i)
        kept = held(p)
        sizes = {i: sum(expert_bytes(source_of(shape), i, shape)) for i in kept}
        p.runner.reset_counters()
        for device in p.devices.all:
            device.reset_counters()
        p.runner.run(wave, p.schedule(order, policy))
        wanted, placed = [0] * shape.n_devices, 0
        for names in named(shape, order, wave):
            for i, size in sizes.items():
                go_up = names[i] if policy is Policy.SELECTED else set(range(n_expert_of(shape)))
                wanted[shape.device_of(i)] += size * len(go_up - kept[i])
                placed += size * len(go_up & kept[i])
        assert p.uploaded_bytes() == wanted
        assert p.runner.counters.placed_bytes == placed > 0


def test_prompts_leave_the_caches_as_they_were_and_ask_once() -> None:
    with open_pipe(SHAPES["slabs of three, dequantised"]) as p:
        step(p, 0)
        p.runner.synchronize_host()
        before = [buffer.raw().clone() for buffer in p.buffers("cache")]
        read_bytes = []
        for order in Order:
            for device in p.devices.all:
                device.reset_counters()
            (wave,) = cut_waves(prompt(1), SIZES, 1)
            without_logits = Wave(tuple(Ubatch(u.ids, u.segments) for u in wave.ubatches))
            p.runner.run(without_logits, p.schedule(order, Policy.ALL))
            read_bytes.append(sum(device.counters.downloaded_bytes for device in p.devices.accelerators))
        p.runner.synchronize_host()
        after = [buffer.raw() for buffer in p.buffers("cache")]
    assert read_bytes == [4 * N_EXPERT * len(before) // 2, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_prompt_of_few_tokens_that_is_shared_out_is_not_overlooked() -> None:
    """It turns over what lies in slots, too."""
    shape = SHAPES["whole layers"]
    with open_pipe(shape) as p:
        p.poison()
        for i in range(4):
            step(p, i)
            run_all(p, prompt(0), SIZES, p.schedule(Order.BREADTH_FIRST), 1)
            few = Ubatch((i, 30 + i), (Segment(OTHER, 2 * i, 2),), (1,))
            p.runner.run(Wave((few,)), p.schedule(Order.BREADTH_FIRST, Policy.SPREAD))
            spoil_staging(p)
            logits = run_all(p, prompt(1), SIZES, p.schedule(Order.BREADTH_FIRST), 1)
            assert torch.equal(logits, expected(1, shape, 1))


def test_after_a_wave_that_ended_in_the_middle_all_goes_up() -> None:
    shape = SHAPES["all kept"]
    with open_pipe(shape) as p:
        step(p, 0)
        assert any(held(p).values())
        p.runner._is_interrupted = True
        logits = run_all(p, prompt(0), SIZES, p.schedule(Order.BREADTH_FIRST), 1)
        assert torch.equal(logits, expected(0, shape, 1))
        assert sum(p.uploaded_bytes()) == p.n_host_expert_bytes
        assert p.runner.counters.placed_bytes == 0


def test_a_schedule_without_a_cache_uploads_all() -> None:
    shape = SHAPES["whole layers"]
    with open_pipe(shape) as p:
        step(p, 0)
        spoil_staging(p)
        without = replace(p.schedule(Order.BREADTH_FIRST), n_cached=())
        assert torch.equal(run_all(p, prompt(0), SIZES, without, 1), expected(0, shape, 1))
        assert sum(p.uploaded_bytes()) == p.n_host_expert_bytes


def run_null(p: Pipe, uploads: Sequence[tuple[Order, Policy]]) -> None:
    """Null devices read no state: what the host finds in its place is that every other expert lies in a slot."""
    for buffer in p.buffers("host_cached"):
        buffer.raw().view(torch.int32).view(-1, 2).copy_(torch.tensor([0, -1]))
    for order, policy in uploads:
        step(p, 0)
        run_all(p, prompt(0), SIZES, p.schedule(order, policy), 2)
        assert p.runner.counters.placed_bytes > 0
        p.runner.reset_counters()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_hazards(shape: Shape) -> None:
    with open_pipe(shape, kind="null") as p:
        run_null(p, UPLOADS * 2)
        assert hazards(p) == []


@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_a_ledger_that_overlooks_slots_is_found_out(order: Order) -> None:
    """Placing writes into a slot that is being filled, too."""
    with blind_to(["slot"]), open_pipe(SHAPES["slabs of three, dequantised"], kind="null") as p:
        run_null(p, [(order, Policy.ALL)])
        found = {(h.kind, h.buffer.name.rstrip("0123456789")) for h in hazards(p)}
    assert (HazardKind.WRITE_AFTER_WRITE, "slot") in found
