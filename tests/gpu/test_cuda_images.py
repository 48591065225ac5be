"""`--cache-ram` on GPUs: slots are saved to pinned host memory and loaded again, beside steps that are recorded."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.engine.request import DoneEvent, TokenEvent
from overspill.pipeline.choose import Plan
from tests.models.fixtures import Case, fixture

CASES = [Case(name) for name in ("qwen3moe", "gpt-oss", "deepseek_v3", "qwen35")]
GREEDY = SamplingParams(temperature=0, max_tokens=12, n_probs=5)


def answer(llm: LLM, ids: list[int], *, reuses_cells: bool = True) -> tuple[int, list[tuple[int, float, object]]]:
    """Prompt tokens that were there, and what came of it, logprobs included."""
    events = list(llm.submit(llm.request(ids, GREEDY, reuses_cells=reuses_cells)))
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].reason in ("stop", "length"), events[-1].message
    tokens = [(e.token_id, e.logprob, e.top) for e in events if isinstance(e, TokenEvent)]
    return events[-1].timings.cache_n, tokens


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_restored_slot_gives_the_bits_of_a_fresh_prompt(
    case: Case, n_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.device_count() < n_devices:
        pytest.skip("needs more GPUs")
    ids = case.expected("input_ids_1").tolist()
    # Few tokens beyond whole ubatches would be computed as a step, by other kernels than a prompt's last ubatch.
    monkeypatch.setattr(Plan, "step_rows", lambda *_: 0)
    first, other, longer = ids[:100], ids[30:128], ids[:100] + ids[10:40]
    sizes = {"n_ctx": 320, "n_ubatch": 16, "n_wave": 64, "cache_ram_mib": 8, "prefix_reuse": "whole-ubatches"}
    devices = ",".join(f"cuda:{i}" for i in range(n_devices))
    with LLM(fixture(f"{case.name}.gguf"), devices=devices, **sizes) as llm:
        fresh = {n: answer(llm, p, reuses_cells=False)[1] for n, p in (("longer", longer), ("other", other))}
        llm._engine._scheduler.forget_images()
        answer(llm, first, reuses_cells=False)
        assert answer(llm, other, reuses_cells=False)[1] == fresh["other"], "equal requests get equal answers"
        assert answer(llm, longer) == (96, fresh["longer"])
        assert answer(llm, other) == (96, fresh["other"])
        counts = llm.status.images
        assert counts.n_loaded == 2
        assert counts.n_saved >= 3
