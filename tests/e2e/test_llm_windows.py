"""Layers with a window by the front door: their cells are rings, and text is that of a cache of all positions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.engine.request import DoneEvent, TokenEvent
from tests.models.fixtures import Case, fixture
from tests.models.test_long_prompts import LONG, TOLERANCES

CASES = [Case("gpt-oss"), Case("gemma3"), Case("deepseek_v4")]
IDS = LONG["ids"].tolist()
WINDOW = 16


def opened(case: Case, devices: str, **options: object) -> LLM:
    sizes = {"n_ctx": 512, "n_ubatch": 100, "n_wave": 200} | options
    return LLM(fixture(f"{case.name}.gguf"), devices=devices, cpu_moe=True, **sizes)


def answer(llm: LLM, ids: Sequence[int], n: int = 8) -> tuple[int, list[tuple[object, ...]]]:
    """Prompt tokens that were there, and what came of it: ids, logprobs, the likeliest tokens."""
    params = SamplingParams(temperature=0, max_tokens=n, n_probs=5, ignore_eos=True)
    *events, done = llm.submit(llm.request(ids, params))
    assert isinstance(done, DoneEvent)
    assert done.reason == "length"
    return done.timings.cache_n, [(e.token_id, e.logprob, e.top) for e in events if isinstance(e, TokenEvent)]


@pytest.mark.parametrize(
    ("case", "devices"), [*((case, "virtual:3") for case in CASES), (CASES[0], "none"), (CASES[1], "none")], ids=str
)
def test_logits_do_not_depend_on_rings(case: Case, devices: str) -> None:
    """The same bits, near llama.cpp's; windows cross ubatches of 100."""
    with opened(case, devices) as llm, opened(case, devices, swa_full=True) as full:
        for n in (1, 127, 128, 129, 300):
            assert torch.equal(llm.logits(IDS[:n]), full.logits(IDS[:n])), n
        rows = [i for i, row in enumerate(LONG[f"{case.name}_rows"]) if row < 300]
        expected = torch.from_numpy(LONG[f"{case.name}_logits"][rows])
        found = llm.logits(IDS[:300])[LONG[f"{case.name}_rows"][rows]]
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCES.get(case.name, 5e-4))


@pytest.mark.parametrize("cells", ["f32", "q8_0"])
@pytest.mark.parametrize("devices", ["none", "virtual:2"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_text_after_rings_have_come_round(case: Case, devices: str, cells: str) -> None:
    """Rings of 32 cells, four times over; logprobs are compared bit for bit."""
    sizes = {"n_ctx": 256, "n_ubatch": 16, "n_wave": 64, "cache_type_k": cells}
    with opened(case, devices, **sizes) as llm, opened(case, devices, swa_full=True, **sizes) as full:
        assert answer(llm, IDS[:37], 90) == answer(full, IDS[:37], 90)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_prompts_go_back_as_far_as_rings_hold(case: Case) -> None:
    """A hit at token 200; one at 50 is too far back, and computed anew; an image of what was there serves it later."""
    prompts = [IDS[:230], IDS[:200] + IDS[300:330], IDS[:50] + IDS[330:400], IDS[:220] + IDS[400:430]]
    with opened(case, "virtual:2", swa_full=True) as full:
        expected = [answer(full, ids) for ids in prompts]
    with opened(case, "virtual:2", cache_ram_mib=4) as llm:
        found = [answer(llm, ids) for ids in prompts]
    assert [n for n, _ in expected] == [0, 200, 50, 50]
    assert [n for n, _ in found] == [0, 200, 0, 200]
    for (_, tokens), (_, wanted) in zip(found, expected, strict=True):
        assert [token_id for token_id, *_ in tokens] == [token_id for token_id, *_ in wanted]


@pytest.mark.parametrize("devices", ["none", "virtual:2"])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_rings_take_what_is_planned_and_no_more(case: Case, devices: str) -> None:
    """A window and a ubatch for each of two sequences, in layers that have one; `--swa-full`: all positions."""
    taken = {}
    for is_full in (False, True):
        with opened(case, devices, swa_full=is_full, n_parallel=2) as llm:
            memory, hp = llm.runner._memory, llm.hparams
            for i in range(hp.n_layer):
                n_cells = 256 if is_full or hp.window(i) is None else WINDOW + 100
                assert [b.raw().shape[0] * b.raw().shape[2] for b in memory["kv", i]] == [2 * n_cells] * 2
            taken[is_full] = sum(budget.kv_bytes for budget in llm.plan.placement.budgets)
            assert taken[is_full] == sum(b.n_bytes for i in range(hp.n_layer) for b in memory["kv", i])
    assert taken[False] < taken[True]
