"""The engine on GPUs: one device against several under every schedule, bit for bit, and what it allocates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overspill import LLM
from tests.helpers.plain import DATA

MOES = ["mixtral", "qwen3moe"]


def n_gpus() -> int:
    return torch.cuda.device_count()


def logits(name: str, ids: list[int], **options: object) -> torch.Tensor:
    with LLM(DATA / "models" / f"{name}.gguf", n_ctx=256, **options) as llm:
        return llm.logits(ids)


@pytest.mark.parametrize("name", MOES)
@pytest.mark.parametrize("n_ubatch", [16, 64])
@pytest.mark.parametrize("schedule", ["serial", "depth-first", "breadth-first"])
@pytest.mark.parametrize("grain", [1, 2])
def test_two_gpus_equal_one(name: str, n_ubatch: int, schedule: str, grain: int) -> None:
    if n_gpus() < 2:
        pytest.skip("needs two GPUs")
    ids = [int(i) for i in np.load(DATA / "models" / f"{name}.npz")["input_ids_1"]]
    common = {"n_ubatch": n_ubatch, "n_wave": 256, "cpu_moe": True, "policy": "all", "schedule": schedule}
    one = logits(name, ids, devices="cuda:0", **common)
    two = logits(name, ids, devices="cuda:0,cuda:1", grain=grain, **common)
    assert torch.equal(one, two)


def test_greedy_text_with_experts_everywhere() -> None:
    npz = np.load(DATA / "models" / "qwen3moe.npz")
    ids = [int(i) for i in npz["input_ids_2"]]
    from overspill import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    texts = []
    for options in ({}, {"cpu_moe": True, "policy": "all"}, {"cpu_moe": True, "policy": "selected"}):
        with LLM(DATA / "models" / "qwen3moe.gguf", devices="cuda:0", n_ctx=256, n_ubatch=64, **options) as llm:
            texts.append(llm.generate(ids, params).tokens)
    assert texts[0] == texts[1] == texts[2]


def test_nothing_is_allocated_once_a_wave_was_seen_twice() -> None:
    """At second sight it is recorded."""
    with LLM(DATA / "models" / "qwen3moe.gguf", devices="cuda:0", n_ctx=256, n_ubatch=16, cpu_moe=True) as llm:
        for n in (100, 17, 33, 1) * 2:
            llm.logits(list(range(n)))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats(0).get("num_device_alloc", 0)
        llm.reset_counters()
        for n in (100, 17, 33, 1):
            llm.logits(list(range(n)))
        stats = torch.cuda.memory_stats(0)
        assert stats.get("num_device_alloc", 0) == before
        assert llm.counters()["device_syncs_after_warmup"] == 0
