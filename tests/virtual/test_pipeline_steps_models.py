"""Decoding by replay, of every architecture: three sequences, past where windows and blocks of keys end."""

from __future__ import annotations

import pytest
import torch

from overspill.cache.cells import CellType
from overspill.pipeline.memory import Precision
from overspill.pipeline.schedule import Order, Policy
from tests.helpers.decoding import N_CELLS, N_SLOTS, N_UBATCH, decoded, is_step
from tests.helpers.pipe import FLOAT32, Shape, pipe
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.reference import Reference
from tests.models.fixtures import MODELS, Case

SIZED = {"deepseek_v4", "qwen4_exp"}
SEVERAL = {"deepseek_v2-lite", "deepseek_v2-qlora", "glm4_moe-air", "mixtral", "qwen3-yarn"}  # others have their layers


def replayed(case: Case, n_devices: int, policy: Policy, precision: Precision = FLOAT32) -> torch.Tensor:
    """Logits of steps after prompts, by replay; experts in host RAM unless all of them would go up."""
    hp, is_resident = case.model.hparams, policy is Policy.ALL
    moe = frozenset(i for i in range(hp.n_layer) if hp.is_moe(i) and not is_resident)
    sizes = {"n_ubatch": N_UBATCH, "n_ubatches": 1, "n_cells": N_CELLS, "n_slots": N_SLOTS, "n_trials": 1}
    shape = Shape(n_devices, host_layers=moe)
    with recording(), pipe(case.source, shape, ops=STEP_OPS, precision=precision, **sizes) as p:
        p.poison()
        prompts, steps = p.schedule(Order.BREADTH_FIRST), p.schedule(Order.BREADTH_FIRST, policy)
        rows = decoded(lambda wave: p.runner.run(wave, steps if is_step(wave) else prompts), case)
        assert p.runner._steps is not None
        assert len(p.runner._steps._programs) == 2
        p.runner.close()
        return rows


@pytest.mark.parametrize("name", sorted({case.name.removesuffix("-mtp") for case in MODELS} - SEVERAL - SIZED))
def test_steps_of_every_architecture(name: str) -> None:
    """On two devices, experts on the host: the bits of the plain model."""
    case = Case(name)
    expected = decoded(Reference(case.model, n_slots=N_SLOTS, n_cells=N_CELLS).run, case)
    assert torch.equal(replayed(case, 2, Policy.CPU), expected)


@pytest.mark.parametrize("name", sorted(SIZED))
def test_steps_that_look_at_all_there_could_be(name: str) -> None:
    """Their sums have zeros where those of the plain model end, so bits may differ from its; not from each other."""
    case = Case(name)
    expected = decoded(Reference(case.model, n_slots=N_SLOTS, n_cells=N_CELLS).run, case)
    found = replayed(case, 3, Policy.CPU)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert torch.equal(replayed(case, 1, Policy.ALL), found)


@pytest.mark.parametrize("name", ["deepseek_v4", "kimi_linear", "qwen3next-mtp", "qwen4_exp"])
def test_spread_experts_of_layers_with_states_and_streams(name: str) -> None:
    case = Case(name)
    expected = decoded(Reference(case.model, n_slots=N_SLOTS, n_cells=N_CELLS).run, case)
    torch.testing.assert_close(replayed(case, 2, Policy.SPREAD), expected, rtol=0, atol=5 * case.hf)


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek_v3", "gemma3", "llama4", "qwen35", *sorted(SIZED)])
def test_steps_with_cells_of_bytes(name: str) -> None:
    """q8_0: windows, sinks, chunks, latent keys, blocks, and states between; what steps write, prompts' attention
    reads, and the other way round."""
    case = Case(name)
    reference = Reference(case.model, n_slots=N_SLOTS, n_cells=N_CELLS, cells=CellType.Q8_0)
    expected = decoded(reference.run, case)
    found = replayed(case, 2, Policy.CPU, Precision(kv=torch.uint8))
    # Where sums end differently (see above), a value may be rounded to the next byte.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if name in SIZED else 0)
    plain = decoded(Reference(case.model, n_slots=N_SLOTS, n_cells=N_CELLS).run, case)
    assert not torch.equal(expected, plain)
