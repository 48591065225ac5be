"""Rates of real links and the CPU with all at work, and a model that shares its experts out by them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from overspill import LLM
from overspill.bench.synth import synthetic
from overspill.calibration import ExpertShape, calibrate
from overspill.device.factory import open_devices
from overspill.engine.params import SamplingParams
from overspill.engine.request import TokenEvent
from overspill.gguf.types import TensorType
from overspill.hardware import ops_for

SHAPE = ExpertShape(n_expert=32, n_used=4, n_ff=768, n_embd=2048)


def test_links_and_cpu_are_measured_and_all_memory_is_given_back() -> None:
    devices = open_devices("cuda")
    try:
        before = [device.allocated_bytes for device in devices.all]
        found = calibrate(devices, ops_for(devices), TensorType.Q8_0, len(os.sched_getaffinity(0)), SHAPE)
        assert [device.allocated_bytes for device in devices.all] == before
        for rates, alone in zip(found.together, found.alone, strict=True):
            assert len(rates.links_gbps) == torch.cuda.device_count()
            assert all(2 < gbps < 130 for gbps in (*rates.links_gbps, *alone.links_gbps))  # PCIe 3 x4 to 6 x16
            assert all(1 < gbps < 130 for gbps in rates.links_beside_cpu_gbps)
            assert 0.5 < rates.cpu_gbps < 2000
            assert 1 < rates.cpu_call_us < 10_000
        assert all("link unknown" not in device.description for device in devices.accelerators)
    finally:
        devices.close()


def test_a_model_measures_its_own_experts_then_takes_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = {"devices": "cuda", "cpu_moe": True, "n_ctx": 256, "n_ubatch": 64, "n_wave": 64}
    with LLM(synthetic("qwen3-30b-a3b", quant="Q8_0", n_layer=4), **options) as llm:
        assert llm.plan.party_rates_from == "measured at load"
        rates = llm.plan.machine.party_rates
        assert [r.n_tokens for r in rates] == [1, 4, 16]
        print([r.as_record() for r in rates], llm.plan.step_schedule(1).shares)
        schedule = llm.plan.step_schedule(1)
        shares = [of_owner for of_owner in schedule.shares if of_owner]
        assert all(sum(count for _, count in of_owner) == 8 * schedule.n_slices for of_owner in shares)
        with llm.submit(llm.request([1, 2, 3], SamplingParams(max_tokens=4))) as events:
            assert sum(isinstance(event, TokenEvent) for event in events) == 4
