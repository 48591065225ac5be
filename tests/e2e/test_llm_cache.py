"""A model whose devices keep experts, from the options to the counters, on virtual devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.pipeline.wave import Segment, Ubatch, Wave
from overspill.placement.budget import KernelNeeds
from overspill.server.metrics import metrics_of_experts
from tests.helpers.plain import DATA, plain_logits, plain_model
from tests.helpers.tiny_moe import N_EXPERT, N_LAYER, N_USED, tiny_source

IDS = [5, 9, 30, 17, 2, 8, 8, 21]
OPTIONS: dict[str, Any] = {
    "devices": "virtual:2", "cpu_moe": True, "n_ctx": 16, "threads": 2, "n_ubatch": 2, "n_wave": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _spreading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.llm.needs_on", lambda *_: lambda n: KernelNeeds(n_spread_tokens=2))


def decode(llm: LLM) -> torch.Tensor:
    """Logits of IDS, one by one."""
    rows = []
    for i, token in enumerate(IDS):
        rows += llm.run_wave(Wave((Ubatch((token,), (Segment(0, i, 1),), (0,)),)))
    return torch.cat(rows)


def test_kept_experts_are_found_and_counted() -> None:
    with LLM(tiny_source(), **OPTIONS, moe_cache_mib=1, policy="spread") as llm:
        assert llm.plan.placement.n_cached == (N_EXPERT, N_EXPERT)
        llm.reset_counters()
        logits = decode(llm)
        experts = llm.counters()["experts"]
        llm.reset_counters()
        assert llm.counters()["experts"]["hits"] == 0
    torch.testing.assert_close(logits, plain_logits(plain_model(tiny_source()), IDS, 8), rtol=1e-4, atol=1e-4)
    assert experts["hits"] + experts["misses"] == len(IDS) * N_LAYER * N_USED
    # Whenever experts are missing the owner fetches one at least, and that once; with it goes at most another.
    assert experts["misses"] <= N_LAYER * N_EXPERT * N_USED
    assert experts["hit_rate"] == experts["hits"] / (len(IDS) * N_LAYER * N_USED)
    assert {*experts["hit_rates"]} == {"virtual:0", "virtual:1"}
    n_read = sum(experts["read_bytes"].values())
    assert n_read == 3 * 720 * experts["misses"]
    assert sum(experts["bytes_per_token"].values()) == pytest.approx(n_read / len(IDS), abs=3)
    assert 0.0 <= experts["cpu_share"] <= 1.0
    ratios, read = metrics_of_experts(experts)
    assert {s.labels["device"]: s.value for s in ratios.samples} == experts["hit_rates"]
    assert {s.labels["device"]: s.value for s in read.samples} == experts["read_bytes"]


def test_the_text_is_that_of_the_model_without_a_cache() -> None:
    params, texts = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), []
    for n_devices, moe_cache_mib in [(1, 0), (1, 1), (2, 1), (2, 2)]:
        options = OPTIONS | {"devices": f"virtual:{n_devices}", "n_ctx": 64, "policy": "spread"}
        with LLM(DATA / "models" / "qwen3moe.gguf", **options, moe_cache_mib=moe_cache_mib) as llm:
            n_cached = {*llm.plan.placement.n_cached}
            texts.append(llm.generate(list(range(7, 19)), params).tokens)
        assert n_cached == {0: set(), 1: {5}, 2: {8}}[moe_cache_mib]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("n_devices", [1, 2])
def test_prompts_do_not_upload_what_steps_have_left(n_devices: int) -> None:
    """Of a prompt in one wave, which goes up once; the numbers are those without a cache."""
    options = OPTIONS | {"devices": f"virtual:{n_devices}", "policy": "spread", "schedule": "breadth-first"}
    with LLM(tiny_source(), **options) as llm:
        wanted = llm.logits(IDS)
    with LLM(tiny_source(), **options, moe_cache_mib=1) as llm:
        llm.reset_counters()
        assert torch.equal(llm.logits(IDS), wanted)
        assert (llm.counters()["uploaded_bytes"], llm.counters()["placed_bytes"]) == (llm.host_expert_bytes, 0)
        decode(llm)
        llm.reset_counters()
        assert torch.equal(llm.logits(IDS), wanted)
        counters = llm.counters()
    assert counters["placed_bytes"] > 0
    assert counters["uploaded_bytes"] + counters["placed_bytes"] == llm.host_expert_bytes


def test_without_a_cache_all_are_read() -> None:
    with LLM(tiny_source(), **OPTIONS, policy="spread") as llm:
        assert not any(llm.plan.placement.n_cached)
        llm.reset_counters()
        decode(llm)
        experts = llm.counters()["experts"]
    assert (experts["hits"], experts["misses"]) == (0, len(IDS) * N_LAYER * N_USED)


def test_no_experts_on_the_host_no_counts() -> None:
    with LLM(tiny_source(), devices="virtual:1", n_ctx=16, moe_cache_mib="auto") as llm:
        assert llm.counters()["experts"] is None
