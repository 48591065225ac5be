"""Decoding by replay gives what the runner gives that issues every action, whoever computes the experts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from overspill.cache.cells import Segment
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.pipe import Pipe, Shape, pipe
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.tiny_moe import N_EXPERT, N_LAYER, N_USED, tiny_source
from tests.models.fixtures import Case

PROMPTS = [[5, 9, 30, 17, 2], [8, 8, 21], [1, 2, 3, 4, 5, 6, 7]]
STEPS = [[3, 14, 15], [9, 2, 6], [5, 3, 5], [8, 9, 7]]


def prefill(p: Pipe, prompts: Sequence[Sequence[int]]) -> None:
    for slot, ids in enumerate(prompts):
        ubatch = Ubatch(tuple(ids), (Segment(slot, 0, len(ids)),))
        p.runner.run(Wave((ubatch,)), p.schedule(Order.BREADTH_FIRST))


def decode(p: Pipe, policy: Policy, n_sequences: int) -> list[torch.Tensor]:
    logits = []
    for i, ids in enumerate(STEPS):
        segments = tuple(Segment(s, len(PROMPTS[s]) + i, 1) for s in range(n_sequences))
        ubatch = Ubatch(tuple(ids[:n_sequences]), segments, tuple(range(n_sequences)))
        logits += p.runner.run(Wave((ubatch,)), p.schedule(Order.BREADTH_FIRST, policy))
    return logits


def logits_of(shape: Shape, policy: Policy, n_sequences: int, *, has_steps: bool, seed: int | None) -> torch.Tensor:
    settings = {"n_ubatch": 8, "n_ubatches": 1, "n_cells": 16, "n_slots": 3, "chaos_seed": seed}
    with recording(), pipe(tiny_source(), shape, ops=STEP_OPS, n_trials=int(has_steps), **settings) as p:
        p.poison()
        prefill(p, PROMPTS)
        rows = torch.cat(decode(p, policy, n_sequences))
        p.runner.close()
        return rows


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("host_layers", "policy"),
    [("none", Policy.ALL), ("all", Policy.CPU), ("all", Policy.SPREAD)],
)
def test_replayed_steps_give_the_same_bits(n_sequences: int, n_devices: int, host_layers: str, policy: Policy) -> None:
    shape = Shape(n_devices, host_layers=host_layers, slab_experts=N_EXPERT)  # type: ignore[arg-type]
    expected = logits_of(shape, policy, n_sequences, has_steps=False, seed=None)
    for seed in range(3):
        assert torch.equal(logits_of(shape, policy, n_sequences, has_steps=True, seed=seed), expected)


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize(("n_expert", "n_cached", "n_slices"), [(N_EXPERT, N_USED, 1), (N_EXPERT, 4, 1), (8, 3, 2)])
def test_replayed_steps_with_cached_experts_give_the_same_bits(
    n_sequences: int, n_devices: int, n_expert: int, n_cached: int, n_slices: int
) -> None:
    """From the same contents of the cache on: what is recorded runs once before, and leaves experts in it."""
    source = tiny_source() if n_slices == 1 else Case("qwen3moe").source
    shape = Shape(n_devices, slab_experts=n_expert, n_cached=n_cached, n_slices=n_slices)
    settings = {"n_ubatch": 8, "n_ubatches": 1, "n_cells": 16, "n_slots": 3}
    results, counts = [], []
    for has_steps in (False, True, True):
        seed = len(results) if has_steps else None
        with (
            recording(),
            pipe(source, shape, ops=STEP_OPS, n_trials=int(has_steps), chaos_seed=seed, **settings) as p,
        ):
            assert p.tally is not None
            p.poison()
            prefill(p, PROMPTS)
            if has_steps:
                decode(p, Policy.SPREAD, n_sequences)
            p.caches.empty_host()
            p.tally.reset_host()
            results.append(torch.cat(decode(p, Policy.SPREAD, n_sequences)))
            counts.append(p.tally.read_host())
            p.runner.close()
    assert torch.equal(results[1], results[2])
    # Of the fixture's experts the CPU's are computed by compiled kernels in recorded steps, unlike in issued ones.
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0 if n_slices == 1 else 1e-4)
    assert counts[1] == counts[2] == counts[0]
    assert min(counts[0].n_hits.values()) > 0


def test_recording_counts_no_experts() -> None:
    shape = Shape(1, slab_experts=N_EXPERT)
    settings = {"n_ubatch": 8, "n_ubatches": 1, "n_cells": 16, "n_slots": 3}
    with recording(), pipe(tiny_source(), shape, ops=STEP_OPS, n_trials=1, **settings) as p:
        assert p.tally is not None
        prefill(p, PROMPTS)
        decode(p, Policy.SPREAD, 1)
        assert sum(p.tally.read_host().n_read.values()) == len(STEPS) * N_LAYER * N_USED
        p.runner.close()
