"""Short prompts as rows of steps that are replayed: what the plain model gives, whoever computes the experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from overspill.cache.cells import CellType
from overspill.pipeline.memory import Precision
from overspill.pipeline.rows import Rows, n_step_rows
from overspill.pipeline.schedule import Order, Policy, WaveSchedule
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.helpers.pipe import FLOAT32, Pipe, Shape, pipe
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.reference import Reference
from tests.helpers.tiny_moe import N_EXPERT, N_VOCAB, tiny_model, tiny_source
from tests.models.fixtures import Case

N_CELLS, N_UBATCH, N_SLOTS = 96, 32, 3
LENGTHS = (1, 2, 5, 17, 32)


def ids_of(n: int, first: int, n_vocab: int = N_VOCAB) -> tuple[int, ...]:
    return tuple((7 * i * i + 3 * i + first) % n_vocab for i in range(first, first + n))


def prompt(slot: int, first_pos: int, n: int, n_outputs: int, n_vocab: int = N_VOCAB) -> Ubatch:
    """With logits of the last so many rows."""
    ids = ids_of(n, first_pos + 5 * slot, n_vocab)
    return Ubatch(ids, (Segment(slot, first_pos, n),), tuple(range(n))[n - n_outputs :])


def as_rows(p: Pipe, wave: Wave, schedule: WaveSchedule) -> list[torch.Tensor]:
    rows = Rows.of(wave, n_step_rows(wave.n_tokens, wave.end_pos, 32))
    (found,) = p.runner.run(rows.step, schedule)
    return [found[list(wanted)] for wanted in rows.wanted]


@contextmanager
def opened(shape: Shape, seed: int | None = None) -> Iterator[Pipe]:
    sizes = {"n_ubatch": N_UBATCH, "n_ubatches": 3, "n_cells": N_CELLS, "n_slots": N_SLOTS, "n_trials": 1}
    with recording(), pipe(tiny_source(), shape, ops=STEP_OPS, chaos_seed=seed, **sizes) as p:
        p.poison()
        yield p
        p.runner.close()


def waves() -> list[Wave]:
    """Prompts of all lengths: logits of all rows; after earlier cells, of the last row; the same, of none."""
    found, first_pos = [], 0
    for n in LENGTHS:
        found.append(Wave((prompt(1, 0, n, n),)))
        for slot, n_outputs in ((0, 1), (2, 0)):
            found.append(Wave((prompt(slot, first_pos, n, n_outputs),)))
        first_pos += n
    return found


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize(("host_layers", "policy"), [("none", Policy.ALL), ("all", Policy.CPU), ("all", Policy.SPREAD)])
def test_prompts_of_every_length(n_devices: int, host_layers: str, policy: Policy) -> None:
    reference = Reference(tiny_model(), n_slots=N_SLOTS, n_cells=N_CELLS)
    shape = Shape(n_devices, host_layers=host_layers, slab_experts=N_EXPERT)
    with opened(shape, seed=n_devices) as p:
        schedule = p.schedule(Order.BREADTH_FIRST, policy)
        for wave in waves():
            for found, wanted in zip(as_rows(p, wave, schedule), reference.run(wave), strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
        assert p.runner._steps is not None
        assert len(p.runner._steps._programs) == 2 * len(LENGTHS) - 1  # of one row, all are the last


@pytest.mark.parametrize("policy", [Policy.CPU, Policy.SPREAD])
def test_prompts_beside_each_other_and_sequences_that_decode(policy: Policy) -> None:
    """Two prompts, one of them in two ubatches, and a sequence that goes on; then all of them go on."""
    first = Wave((prompt(2, 0, 9, 0),))
    mixed = Wave((prompt(0, 0, 6, 0), prompt(0, 6, 5, 1), prompt(1, 0, 3, 1), prompt(2, 9, 1, 1)))
    after = Wave((Ubatch((3, 4, 5), (Segment(0, 11, 1), Segment(1, 3, 1), Segment(2, 10, 1)), (0, 1, 2)),))
    reference = Reference(tiny_model(), n_slots=N_SLOTS, n_cells=N_CELLS)
    reference.run(first)
    with opened(Shape(2, slab_experts=N_EXPERT)) as p:
        schedule = p.schedule(Order.BREADTH_FIRST, policy)
        p.runner.run(first, schedule)
        for wave, run in ((mixed, as_rows), (after, lambda p, wave, schedule: p.runner.run(wave, schedule))):
            found, wanted = run(p, wave, schedule), reference.run(wave)
            assert [len(rows) for rows in found] == [len(rows) for rows in wanted]
            torch.testing.assert_close(torch.cat(found), torch.cat(wanted), rtol=0, atol=1e-4)
        assert p.runner.counters.n_tokens == 9 + 15 + 3


@pytest.mark.parametrize("cells", [CellType.F32, CellType.Q8_0])
@pytest.mark.parametrize("name", ["gpt-oss", "gemma3", "llama4", "deepseek_v3"])
def test_windows_chunks_and_latent_keys(name: str, cells: CellType) -> None:
    """One conversation in short turns, past where rings come round."""
    case = Case(name)
    hp, turns = case.model.hparams, (17, 2, 32, 5, 1, 9, 24)
    reference = Reference(case.model, n_cells=N_CELLS, cells=cells)
    moe = frozenset(i for i in range(hp.n_layer) if hp.is_moe(i))
    precision = FLOAT32 if cells is CellType.F32 else Precision(kv=torch.uint8)
    sizes = {"n_ubatch": N_UBATCH, "n_ubatches": 1, "n_cells": N_CELLS, "n_trials": 1}
    with (
        recording(),
        pipe(case.source, Shape(2, host_layers=moe), ops=STEP_OPS, precision=precision, **sizes) as p,
    ):
        p.poison()
        schedule, first_pos = p.schedule(Order.BREADTH_FIRST, Policy.CPU), 0
        for n in turns:
            wave = Wave((prompt(0, first_pos, n, n, hp.n_vocab),))
            (found,), (wanted,) = as_rows(p, wave, schedule), reference.run(wave)
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3 if cells is CellType.F32 else 2e-2)
            first_pos += n
        p.runner.close()
