"""`--cache-ram` by the front door: a conversation that lost its slot goes on as if it had kept it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from overspill import LLM, SamplingParams
from overspill.engine.request import DoneEvent, TokenEvent
from tests.models.fixtures import Case, fixture

CASES = [
    Case(name) for name in ("qwen3moe", "gpt-oss", "deepseek_v3", "qwen35", "kimi_linear", "deepseek_v4", "qwen4_exp")
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, n_probs=5)


def opened(case: Case, devices: str, **options: object) -> LLM:
    sizes = {"n_ctx": 320, "n_ubatch": 16, "n_wave": 64} | options
    return LLM(fixture(f"{case.name}.gguf"), devices=devices, cpu_moe=case.name != "qwen35", **sizes)


def answer(llm: LLM, ids: Sequence[int], *, slot: int | None = None) -> tuple[int, list[TokenEvent]]:
    """Prompt tokens that were there, and what came of it, logprobs included."""
    events = list(llm.submit(llm.request(ids, GREEDY, slot=slot)))
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].reason in ("stop", "length")
    tokens = [e for e in events if isinstance(e, TokenEvent)]
    return events[-1].timings.cache_n, [TokenEvent("", *[getattr(e, f) for f in FIELDS]) for e in tokens]


FIELDS = ("token_id", "logprob", "top", "is_stop")


def prompts(case: Case) -> tuple[list[int], list[int], list[int]]:
    """A conversation of 100 tokens, one that has nothing in common with it, and the first one continued."""
    ids = case.expected("input_ids_1").tolist()
    first, other = ids[:100], ids[30:127]
    assert first[0] != other[0]
    return first, other, first + ids[10:40]


@pytest.mark.parametrize("devices", ["none", "virtual:2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_restored_slot_gives_the_bits_of_a_fresh_prompt(case: Case, devices: str) -> None:
    """Whole ubatches; text, logprobs and the likeliest tokens are compared without any tolerance."""
    first, other, longer = prompts(case)
    with opened(case, devices) as llm:
        fresh = [answer(llm, ids)[1] for ids in (first, other, longer)]
    with opened(case, devices, cache_ram_mib=4, prefix_reuse="whole-ubatches") as llm:
        assert answer(llm, first) == (0, fresh[0])
        assert answer(llm, other) == (0, fresh[1])
        assert answer(llm, longer) == (96, fresh[2])
        assert answer(llm, other) == (96, fresh[1])
        counts = llm.status.images
        assert (counts.n_saved, counts.n_loaded, counts.n_tokens_loaded) == (3, 2, 96 + 96)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_restored_slot_gives_the_bits_of_one_that_was_never_lost(case: Case) -> None:
    """Any point, with states at the end of prompts: beside a model that has a slot for each conversation."""
    first, other, longer = prompts(case)
    with opened(case, "virtual:2", n_ctx=640, n_parallel=2) as llm:
        expected = [answer(llm, ids, slot=slot) for ids, slot in ((first, 0), (other, 1), (longer, 0), (other, 1))]
    with opened(case, "virtual:2", cache_ram_mib=4) as llm:
        assert [answer(llm, ids) for ids in (first, other, longer, other)] == expected
        assert llm.status.images.n_loaded == 2
    assert expected[2][0] > 96


def test_images_take_the_memory_that_is_planned_and_no_more() -> None:
    host = []
    for mib in (0, 3):
        with opened(CASES[0], "virtual:2", cache_ram_mib=mib) as llm:
            host.append(llm.plan.placement.budgets[-1].kv_bytes)
            held = llm.devices.host.allocated_bytes
            assert host[-1] == held["kv"]  # type: ignore[index]
            for i in range(12):
                answer(llm, [(i + 7 * j) % 500 for j in range(90)])
            counts = llm.status.images
            assert llm.devices.host.allocated_bytes == held
    assert host[1] - host[0] == 3 << 20
    assert (counts.n_blocks, counts.n_blocks_total) == (3, 3)
    assert counts.n_saved == 11
    assert counts.n_dropped == 8


@pytest.mark.parametrize("seed", [0, 1])
def test_delays_change_nothing(seed: int) -> None:
    """Copies of slots and waves at random times; a copy that did not wait would bring poison."""
    first, other, longer = prompts(CASES[3])
    with opened(CASES[3], "none") as llm:
        fresh = answer(llm, longer)[1]
    options = {"cache_ram_mib": 4, "prefix_reuse": "whole-ubatches", "chaos_seed": seed}
    with opened(CASES[3], "virtual:3", **options) as llm:
        for ids in (first, other):
            answer(llm, ids)
        assert answer(llm, longer) == (96, fresh)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_cells_of_bytes_and_scales_are_restored_too(case: Case) -> None:
    first, other, longer = prompts(case)
    options = {"cache_type_k": "q8_0", "prefix_reuse": "whole-ubatches"}
    with opened(case, "virtual:2", **options) as llm:
        fresh = answer(llm, longer)
    with opened(case, "virtual:2", cache_ram_mib=4, **options) as llm:
        for ids in (first, other):
            answer(llm, ids)
        assert answer(llm, longer) == (96, fresh[1])
