"""Short prompts on GPUs, as rows of recorded steps: the numbers of the CPU, and of the same prompts issued."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.cache.cells import Segment
from overspill.device.lane import Lane
from overspill.pipeline.wave import Ubatch, Wave
from tests.gpu.test_cuda_prompts import ids_of, late, model
from tests.gpu.test_models_gpu import NEAR, ONE, TWO, check_exact, divergence, in_float32
from tests.helpers.reference import Reference
from tests.models.fixtures import Case, fixture

LENGTHS = (2, 5, 17, 32)
PLACES = [{"devices": ONE}, {"devices": ONE, "cpu_moe": True}]
if torch.cuda.device_count() > 1:
    PLACES += [{"devices": TWO, "grain": 1}, {"devices": TWO, "cpu_moe": True}]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_short_prompts_as_steps_are_near_those_that_are_issued(place: dict[str, object]) -> None:
    """The first of a length is issued, the others are replayed, the last on late streams."""
    with LLM(model(), n_ctx=512, n_ubatch=64, n_wave=128, **place) as llm:
        assert llm.runner._steps is not None
        # Whatever a plan for so small a model finds faster.
        llm.plan._gains_as_step.update(dict.fromkeys(range(1, 33), True))
        for i, n in enumerate(LENGTHS):
            assert llm.plan.step_rows(n, n) >= n
            issued, recorded, replayed = (llm.logits(ids_of(n)) for _ in range(3))
            assert len(llm.runner._steps._programs) == i + 1
            with late(Lane.COMPUTE):
                assert torch.equal(llm.logits(ids_of(n)), replayed), n
            assert torch.equal(recorded, replayed), n
            assert replayed.isfinite().all(), n
            assert float(divergence(issued, replayed).median()) <= NEAR, n
        # Lengths that were not there, by what is recorded.
        for n in (3, 7, 20, 27):
            assert llm.logits(ids_of(n)).isfinite().all()


@pytest.mark.parametrize("devices", [ONE, TWO])
@pytest.mark.parametrize("case", [Case("qwen3moe"), Case("gpt-oss"), Case("gemma3"), Case("deepseek_v3")], ids=str)
def test_a_conversation_in_short_turns_in_float32(case: Case, devices: str) -> None:
    """Every turn a step, past where windows end; two sequences share one; logits of all rows."""
    if devices == TWO and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ids, first_pos = case.expected("input_ids_1").tolist(), 0
    reference = Reference(case.model, n_slots=2, n_cells=128)
    sizes = {"n_ctx": 256, "n_parallel": 2, "n_ubatch": 32, "n_wave": 64, "prefix_reuse": "whole-ubatches"}
    with in_float32(), LLM(fixture(f"{case.name}.gguf"), devices=devices, grain=1, **sizes) as llm:
        assert llm.runner._steps is not None
        for n in (17, 2, 32, 5, 1, 9, 24):
            turn = Ubatch(tuple(ids[first_pos : first_pos + n]), (Segment(0, first_pos, n),), tuple(range(n)))
            beside = Ubatch(tuple(ids[first_pos : first_pos + 3]), (Segment(1, 0, 3),), (2,))
            for wave in (Wave((turn,)), Wave((turn, beside))):
                if wave.n_tokens <= 32:
                    check_exact(torch.cat(reference.run(wave)), torch.cat(llm.run_wave(wave)), 5 * case.hf)
            first_pos += n
        kinds = {key[:2] for key in llm.runner._steps._programs}
        assert max(n_rows for n_rows, _ in kinds) == 32
