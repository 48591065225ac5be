"""Layers with a window on GPUs: their cells are rings, and give the bits of cells for all positions, issued and
replayed, until they have come round many times.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.device.base import MemoryKind
from overspill.engine.request import TokenEvent
from tests.gpu.test_models_gpu import ONE, TWO, check_exact, in_float32, issued, needs_two
from tests.helpers.decoding import LONG_CELLS, LONG_UBATCH, N_SLOTS, is_step, long_waves
from tests.helpers.reference import Reference
from tests.models.fixtures import Case, fixture

CASES = [Case("gpt-oss"), Case("gemma3"), Case("deepseek_v4")]
CLEAR = 1e-2
"""Of two logprobs, so much makes one token likelier than another wherever they were computed."""


def opened(case: Case, devices: str, **options: object) -> LLM:
    sizes = {"n_ctx": N_SLOTS * LONG_CELLS, "n_parallel": N_SLOTS, "n_ubatch": LONG_UBATCH, "n_wave": 32} | options
    return LLM(fixture(f"{case.name}.gguf"), devices=devices, schedule="breadth-first", grain=1, **sizes)


def steps(llm: LLM, case: Case) -> torch.Tensor:
    """Logits of steps of three sequences, after their prompts, by recordings made anew."""
    assert llm.runner._steps is not None
    llm.runner._steps._programs.clear()
    llm.short_prompts.forget()
    rows = [(wave, llm.run_wave(wave)) for wave in long_waves(case)]
    return torch.cat([row for wave, found in rows if is_step(wave) for row in found])


@pytest.mark.parametrize("cells", ["auto", "q8_0"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rings_give_the_bits_of_all_positions(case: Case, cells: str) -> None:
    """Prompts issued, recorded and replayed; steps replayed and issued; and a cache that keeps everything."""
    with opened(case, ONE, cache_type_k=cells) as llm:
        assert llm.runner._memory.rings is not None
        found = steps(llm, case)
        for how in ("recorded", "replayed"):
            assert torch.equal(steps(llm, case), found), how
        taken = llm.devices.accelerators[0].allocated_bytes[MemoryKind.KV]
    with issued(), opened(case, ONE, cache_type_k=cells) as llm:
        assert torch.equal(steps(llm, case), found), "replayed steps are not those that are issued"
    with opened(case, ONE, cache_type_k=cells, swa_full=True) as llm:
        assert torch.equal(steps(llm, case), found), "rings do not give the bits of all positions"
        assert taken < llm.devices.accelerators[0].allocated_bytes[MemoryKind.KV]


@needs_two
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_gpus(case: Case) -> None:
    with opened(case, ONE) as llm, opened(case, TWO) as both:
        assert torch.equal(steps(both, case), steps(llm, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_the_reference(case: Case) -> None:
    """In float32; the reference has cells for all positions."""
    reference = Reference(case.model, n_slots=N_SLOTS, n_cells=LONG_CELLS)
    rows = [(wave, reference.run(wave)) for wave in long_waves(case)]
    wanted = torch.cat([row for wave, found in rows if is_step(wave) for row in found])
    with in_float32(), opened(case, ONE) as llm:
        check_exact(wanted, steps(llm, case), 5 * case.hf)


def answer(llm: LLM, ids: Sequence[int], n_tokens: int) -> list[tuple[int, float]]:
    """Greedy tokens, and by how much each is likelier than the next."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, n_probs=2, ignore_eos=True)
    tokens = [event for event in llm.submit(llm.request(ids, params)) if isinstance(event, TokenEvent)]
    return [(token.token_id, token.top[0][1] - token.top[1][1]) for token in tokens]


@pytest.mark.parametrize(("case", "experts"), [(CASES[0], "resident"), (CASES[0], "host"), (CASES[1], "none")], ids=str)
def test_a_long_answer_is_that_of_the_cpu(case: Case, experts: str) -> None:
    """Rings of 32 cells, and 400 positions; up to the first near-tie that falls the other way, if any."""
    sizes = {"n_ctx": 512, "n_parallel": 1, "n_ubatch": 16, "n_wave": 64}
    ids = case.expected("input_ids_1").tolist()[:100]
    with opened(case, "none", **sizes) as llm:
        wanted = answer(llm, ids, 300)
    # Slabs that go up are dequantised to bfloat16, whatever else is float32; experts that are shared out are not.
    host = {"cpu_moe": True, "policy": "spread"} if experts == "host" else {}
    with in_float32(), opened(case, ONE, **sizes | host) as llm:
        found = answer(llm, ids, 300)
    for (token_id, _), (expected, gap) in zip(found, wanted, strict=True):
        if token_id != expected:
            assert gap < CLEAR
            break
