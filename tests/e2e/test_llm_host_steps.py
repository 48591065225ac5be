"""A CPU that has the whole model computes a token in one go: the bits of the actions of a wave."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.pipeline.host_steps import HostSteps
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.models.fixtures import Case, fixture

CASES = [Case(name) for name in ("qwen3moe", "olmoe", "gpt-oss", "gemma3", "qwen35", "deepseek_v4", "qwen4_exp")]
IDS = [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def opened(case: Case, **options: object) -> LLM:
    return LLM(fixture(f"{case.name}.gguf"), devices="none", n_ctx=64, n_ubatch=8, n_wave=8, **options)


def logits(llm: LLM) -> torch.Tensor:
    """Of a prompt of eight and of every token after it, `[4, V]`."""
    prompt = Ubatch(tuple(IDS[:8]), (Segment(0, 0, 8),), (7,))
    steps = [Ubatch((IDS[i],), (Segment(0, i, 1),), (0,)) for i in range(8, len(IDS))]
    return torch.cat([llm.run_wave(Wave((ubatch,)))[0] for ubatch in (prompt, *steps)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_have_the_bits_of_waves(case: Case) -> None:
    with opened(case) as llm, opened(case, cpu_moe=True) as other, opened(case) as issued:
        for served in (llm, other):
            assert isinstance(served.runner._steps, HostSteps)
        issued.runner._steps = None
        found, expected = logits(llm), logits(issued)
        assert torch.equal(found, expected)
        assert torch.equal(logits(other), expected)
        assert llm.runner.counters.n_tokens == issued.runner.counters.n_tokens == len(IDS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_may_be_the_first_and_need_no_logits(case: Case) -> None:
    first, second = Ubatch((3,), (Segment(0, 0, 1),), (0,)), Ubatch((4,), (Segment(0, 1, 1),))
    with opened(case) as llm, opened(case) as issued:
        issued.runner._steps = None
        for wave in (Wave((first,)), Wave((second,))):
            (found,), (expected,) = llm.run_wave(wave), issued.run_wave(wave)
            assert torch.equal(found, expected)
