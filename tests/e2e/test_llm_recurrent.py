"""Models with recurrent layers by the front door: tokens of the oracles, whatever an earlier prompt left behind."""

from __future__ import annotations

import pytest

from overspill import LLM, SamplingParams
from tests.models.fixtures import Case, fixture

CASES = [Case("qwen35"), Case("qwen3next-mtp"), Case("kimi_linear"), Case("deepseek_v4"), Case("qwen4_exp")]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def opened(case: Case, devices: str, n_ctx: int = 512, **options: object) -> LLM:
    return LLM(fixture(f"{case.name}.gguf"), devices=devices, n_ctx=n_ctx, n_ubatch=16, n_wave=64, **options)


@pytest.mark.parametrize("devices", ["none", "virtual:3"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_greedy_tokens_now_and_again(case: Case, devices: str) -> None:
    """The second time most of the prompt is there already."""
    with opened(case, devices, cpu_moe=case.name != "qwen35", swa_full=True) as llm:
        for prompt, n_cached in ((1, 128), (0, 32), (2, 16)):
            ids, expected = case.expected(f"input_ids_{prompt}").tolist(), case.expected(f"hf_greedy_{prompt}").tolist()
            for n in (0, n_cached):
                done = llm.generate(ids, GREEDY)
                assert done.timings.cache_n == n
                assert done.tokens == expected[: len(done.tokens)]
                assert len(done.tokens) == 24 or done.finish_reason == "stop"


@pytest.mark.parametrize(("n_kept", "reused"), [(0, (0, 0, 0)), (3, None), (9, (112, 96, 32))])
def test_prompts_that_part_ways(n_kept: int, reused: tuple[int, ...] | None) -> None:
    """Each goes on from the last kept state before the first token that differs, or from the beginning.

    Ten states are enough for all whole ubatches and the end; with four, the last two are kept and some before.
    """
    case = CASES[0]
    ids = case.expected("input_ids_1").tolist()
    others = [ids[:n] + ids[:20] for n in (115, 100, 40)]
    with opened(case, "virtual:2", ctx_checkpoints=n_kept) as llm, opened(case, "none", ctx_checkpoints=0) as plain:
        for other, n_reused in zip(others, reused or (112, None, None), strict=True):
            llm.generate(ids, SamplingParams(temperature=0, max_tokens=1))
            done = llm.generate(other, GREEDY)
            assert n_reused is None or done.timings.cache_n == n_reused
            assert done.tokens == plain.generate(other, GREEDY).tokens
            assert plain.generate(other, GREEDY).timings.cache_n == 0


def test_several_requests_at_once() -> None:
    case = CASES[1]
    prompts = [case.expected(f"input_ids_{i}").tolist() for i in range(3)]
    with opened(case, "virtual:2", n_ctx=600, n_parallel=3, cpu_moe=True) as llm:
        for _ in range(2):
            streams = [llm.submit(llm.request(ids, GREEDY)) for ids in prompts]
            tokens = [[e.token_id for e in stream if hasattr(e, "token_id")] for stream in streams]
            for i, got in enumerate(tokens):
                assert got == case.expected(f"hf_greedy_{i}").tolist()[: len(got)]


def test_kept_states_take_memory_that_the_plan_counts() -> None:
    kv = []
    for n_kept in (0, 4):
        with opened(CASES[0], "virtual:1", n_parallel=2, ctx_checkpoints=n_kept) as llm:
            kv.append(llm.plan.placement.budgets[0].kv_bytes)
            assert llm.plan.placement.budgets[0].kv_bytes == sum(
                buffer.n_bytes for i in range(8) for buffer in llm.runner._memory["kv", i]
            )
    assert kv[1] - kv[0] == 2 * 4 * 6 * 4 * (3 * 256 + 4 * 32 * 32)
