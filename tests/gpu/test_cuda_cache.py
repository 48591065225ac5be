"""Decoding with experts kept on GPUs: the numbers of decoding without them, and experts found there."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.cache.cells import Segment
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.plain import DATA

N_PROMPT, N_STEPS = 8, 40


def step_logits(devices: str, moe_cache_mib: str, n_sequences: int) -> tuple[torch.Tensor, dict[str, object]]:
    """Logits of steps with tokens that are given."""
    ids = torch.randint(0, 200, (n_sequences, N_PROMPT + N_STEPS), generator=torch.Generator().manual_seed(1)).tolist()
    sizes = {"n_ctx": 64 * n_sequences, "n_parallel": n_sequences, "n_ubatch": 32, "n_wave": 32}
    options = {"devices": devices, "cpu_moe": True, "moe_cache_mib": moe_cache_mib, "policy": "spread"}
    rows = []
    with LLM(DATA / "models" / "qwen3moe.gguf", **options, **sizes) as llm:
        assert any(llm.plan.placement.n_cached) == (moe_cache_mib != "0")
        for s, known in enumerate(ids):
            llm.run_wave(Wave((Ubatch(tuple(known[:N_PROMPT]), (Segment(s, 0, N_PROMPT),)),)))
        llm.reset_counters()
        for i in range(N_PROMPT, N_PROMPT + N_STEPS):
            segments = tuple(Segment(s, i, 1) for s in range(n_sequences))
            tokens = tuple(known[i] for known in ids)
            rows += llm.run_wave(Wave((Ubatch(tokens, segments, tuple(range(n_sequences))),)))
        counters = llm.counters()
    return torch.cat(rows), counters["experts"]


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_kept_experts_give_the_same_numbers(n_devices: int, n_sequences: int) -> None:
    if torch.cuda.device_count() < n_devices:
        pytest.skip("needs more GPUs")
    devices = ",".join(f"cuda:{i}" for i in range(n_devices))
    wanted, without = step_logits(devices, "0", n_sequences)
    got, counted = step_logits(devices, "auto", n_sequences)
    error = (got - wanted).norm() / wanted.norm()
    assert error < 2e-2
    assert without["hits"] == 0
    assert counted["hits"] > 0.5 * without["misses"]  # all experts have slots, and steps name them again and again
    assert counted["hits"] + counted["misses"] == without["misses"]
