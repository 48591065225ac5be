"""`--max-wave-ms` by the front door: how many tokens of a long prompt a decoding sequence waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from overspill import LLM, SamplingParams
from overspill.engine.request import TokenEvent
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
LONG = [(7 * i + 3) % 480 for i in range(900)]


def counted(llm: LLM, ms_of: Callable[[int], float]) -> list[tuple[int, int]]:
    """Tokens of prompts, and of sequences that decode, in each wave from now on; the engine's clock is `ms_of` them."""
    waves: list[tuple[int, int]] = []
    engine, now_s = llm._engine, [0.0]
    run_wave = engine._run_wave

    def run(wave: Any) -> Any:
        n_decoding = sum(len(u.output_rows) for u in wave.ubatches if all(s.n_tokens == 1 for s in u.segments))
        waves.append((wave.n_tokens - n_decoding, n_decoding))
        now_s[0] += 1e-3 * ms_of(wave.n_tokens)
        return run_wave(wave)

    engine._run_wave, engine._clock = run, lambda: now_s[0]
    return waves


@pytest.mark.parametrize("devices", ["none", "virtual:2"])
@pytest.mark.parametrize("n_ubatch", [64, 512])
def test_a_decoding_sequence_never_waits_longer_than_the_bound_once_it_is_known(devices: str, n_ubatch: int) -> None:
    """A token takes 1 ms, so the bound is 100 tokens, which a ubatch may be longer or shorter than. Where a ubatch is
    as long as a wave, prompt and talker take turns."""
    sizes = {"n_ctx": 4096, "n_parallel": 2, "n_ubatch": n_ubatch, "n_wave": 512, "threads": 1}
    with LLM(MODEL, devices=devices, max_wave_ms=100.0, **sizes) as llm:
        waves = counted(llm, ms_of=float)
        n_least = llm.plan.beside(100.0)[1]
        talker = llm.submit(llm.request([5, 6, 7], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)))
        assert any(isinstance(event, TokenEvent) for event in talker)
        long = list(llm.submit(llm.request(LONG, SamplingParams(max_tokens=2, temperature=0))))
        talker.close()
        assert long[-1].reason == "length"  # type: ignore[union-attr]
    assert waves[0] == (3, 0)
    beside = [n for n, _ in waves[1:] if n]
    assert sum(beside) == len(LONG)
    settled = beside[2:-1]
    assert settled
    assert max(settled) <= max(125, n_least)
    assert min(settled) >= min(64, n_ubatch)


def test_what_a_plan_predicts_for_the_bound() -> None:
    """A long bound lets whole waves pass; one that cannot be kept is not a reason for waves of few tokens."""
    sizes = {"n_ctx": 4096, "n_ubatch": 64, "n_wave": 512, "threads": 1}
    with LLM(MODEL, devices="virtual:2", cpu_moe=True, h2d_gbps=0.01, policy="all", **sizes) as llm:
        assert llm.plan.beside(1e9)[0] == 512
        n_first, n_least = llm.plan.beside(1e-6)
        assert n_first == n_least >= 64, "uploads of 10 MB/s take nearly all the time of a wave, whatever is in it"
