"""Short prompts of ever-changing lengths: computed as steps from the second of a kind on, by few recordings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.device.topology import Rates
from overspill.engine.request import DoneEvent, TokenEvent
from overspill.gguf.source import ModelSource
from overspill.pipeline.steps import StepRunner
from overspill.placement.budget import KernelNeeds
from tests.helpers.plain import plain_logits, plain_model
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source
from tests.models.fixtures import Case

OPTIONS: dict[str, Any] = {
    "devices": "virtual:2", "cpu_moe": True, "policy": "spread", "n_ctx": 128, "n_ubatch": 32, "n_wave": 64,
}  # fmt: skip
# Of two cores that nothing else uses: what is gained as a step does not depend on what runs beside the tests.
RATES = Rates((6.0,) * 2, 6.5, 7.0, (0.0025,) * 2, (0.14,) * 2, cpu_gbps=0.5, cpu_gflops=5.0, call_us=45.0)
NEEDS = KernelNeeds(n_spread_tokens=32, takes_steps=True, n_trials=1)


@contextmanager
def opened(source: ModelSource, **options: object) -> Iterator[tuple[LLM, list[int]]]:
    """On virtual devices that can record steps, which cost nothing beyond their work. The list is of their rows."""
    n_rows: list[int] = []
    real = StepRunner.run_host

    def run_host(self: StepRunner, wave: Any, schedule: Any) -> list[torch.Tensor]:
        n_rows.append(wave.ubatches[0].n_tokens)
        return real(self, wave, schedule)

    with (
        recording(),
        patch("overspill.hardware.measure", lambda devices, sample: RATES),
        patch("overspill.llm.needs_on", lambda *_: lambda n: NEEDS),
        patch("overspill.llm.ops_for", lambda devices: lambda device: STEP_OPS),
        patch("overspill.llm.with_rates", lambda plan, *_: plan),
        patch("overspill.pipeline.simulate._STEP_US", 0.0),
        patch("overspill.pipeline.simulate._STEP_LAYER_US", 0.0),
        patch.object(StepRunner, "run_host", run_host),
        LLM(source, **OPTIONS | options) as llm,
    ):
        yield llm, n_rows


def ids_of(n: int) -> list[int]:
    return [(7 * i * i + 3 * i + n) % N_VOCAB for i in range(n)]


def test_prompts_are_steps_from_the_second_of_a_kind_on() -> None:
    with opened(tiny_source()) as (llm, n_rows):
        for n in (17, 2, 32, 33, 20, 3, 30, 4, 2, 24):
            torch.testing.assert_close(
                llm.logits(ids_of(n)), plain_logits(tiny_model(), ids_of(n), 64), rtol=0, atol=1e-4
            )
        assert n_rows == [24, 32, 4, 2, 24]
        assert llm.runner._steps is not None
        assert len(llm.runner._steps._programs) == 4
        assert llm.counters()["tokens"] == sum((17, 2, 32, 33, 20, 3, 30, 4, 2, 24))


def test_turns_of_conversations_that_come_together() -> None:
    """Greedy tokens are those of the engine without steps, whichever requests share a wave."""
    turns = [ids_of(n) for n in (9, 4, 6)]
    params = SamplingParams(temperature=0.0, max_tokens=6)

    def answers(llm: LLM) -> list[list[int]]:
        found: list[list[int]] = [[], [], []]
        for i_turn in range(3):
            prompts = [turns[i] + found[i][: 6 * i_turn] + ids_of(5 + i)[:i_turn] for i in range(3)]
            streams = [llm.submit(llm.request(ids, params, slot=i)) for i, ids in enumerate(prompts)]
            for i, events in enumerate(streams):
                for event in events:
                    if isinstance(event, TokenEvent):
                        found[i].append(event.token_id)
                    elif isinstance(event, DoneEvent):
                        assert event.reason == "length"
        return found

    sizes = {"n_parallel": 3, "n_ctx": 3 * 64}
    with LLM(tiny_source(), **OPTIONS | sizes | {"policy": "auto"}) as llm:
        expected = answers(llm)
    with opened(tiny_source(), **sizes) as (llm, n_rows):
        assert answers(llm) == expected
        assert max(n_rows) > 3


@pytest.mark.parametrize("name", ["qwen3next-mtp", "kimi_linear"])
def test_recurrent_models_keep_their_waves(name: str) -> None:
    case = Case(name)
    ids = case.expected("input_ids_0").tolist()[:3]
    with opened(case.source, policy="cpu") as (llm, n_rows):
        first, *others = (llm.logits(ids) for _ in range(3))
        assert all(torch.equal(logits, first) for logits in others)
        torch.testing.assert_close(first, plain_logits(plain_model(case.source), ids, 64), rtol=0, atol=5 * case.hf)
        assert n_rows == []
