"""A model whose experts several parties share, on virtual devices: rates at load, shares by them, memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from overspill import LLM
from overspill.calibration import hardware_of
from overspill.device.factory import open_devices
from overspill.engine.params import SamplingParams
from overspill.engine.request import TokenEvent
from overspill.placement.budget import KernelNeeds
from overspill.placement.rates import PartyRates
from overspill.saved_rates import file_of, save_rates
from tests.helpers.plain import plain_logits, plain_model
from tests.helpers.recorded import STEP_OPS, recording
from tests.helpers.tiny_moe import tiny_source

IDS = [5, 9, 30, 17, 2, 8, 8, 21]
OPTIONS: dict[str, Any] = {
    "devices": "virtual:2", "cpu_moe": True, "n_ctx": 16, "threads": 2, "policy": "spread", "n_ubatch": 2, "n_wave": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def spreads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("overspill.llm.needs_on", lambda *_: lambda n: KernelNeeds(n_spread_tokens=2))
    monkeypatch.setattr("overspill.calibration._AT_LOAD_S", 0.01)
    return


def save(type_name: str, rates: tuple[PartyRates, ...]) -> Path:
    devices = open_devices("virtual:2")
    try:
        hardware = hardware_of(devices.accelerators, devices.host, 2)
    finally:
        devices.close()
    save_rates(hardware, {type_name: rates})
    return file_of(hardware)


def test_without_saved_rates_the_models_own_experts_are_measured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "overspill"), LLM(tiny_source(), **OPTIONS) as llm:
        assert llm.plan.party_rates_from == "measured at load"
        assert [rates.n_tokens for rates in llm.plan.machine.party_rates] == [1]
        logits = llm.logits(IDS)
        assert llm.counters()["uploaded_bytes"] == 0
    assert "rates of links and CPU: measured at load" in caplog.text
    torch.testing.assert_close(logits, plain_logits(plain_model(tiny_source()), IDS, 8), rtol=1e-4, atol=1e-4)


def test_saved_rates_set_the_shares() -> None:
    """Links so slow that the CPU computes all but what the owner must; then the CPU, which gets nothing."""
    for links, cpu, wanted in ((1e-6, 50.0, {2}), (50.0, 1e-6, {0, 1})):
        save("F32", (PartyRates(2, (links, links), (links, links), cpu, 1.0),))
        with LLM(tiny_source(), **OPTIONS) as llm:
            assert llm.plan.party_rates_from.startswith("saved 2")
            shares = llm.plan.step_schedule(2).shares
            assert all({party for party, count in of_owner if count} <= wanted for of_owner in shares)
            logits = llm.logits(IDS)
        torch.testing.assert_close(logits, plain_logits(plain_model(tiny_source()), IDS, 8), rtol=1e-4, atol=1e-4)


def test_a_damaged_file_is_told_and_the_model_measured(caplog: pytest.LogCaptureFixture) -> None:
    path = save("F32", ())
    path.write_text("{")
    with LLM(tiny_source(), **OPTIONS) as llm:
        assert llm.plan.party_rates_from == "measured at load"
    assert [str(path) in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        True
    ]


# --- memory

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"devices": "virtual:1"},
    {"devices": "virtual:3", "n_wave": 8, "host_stage": "1"},
    {"n_parallel": 2, "n_ctx": 32},
    {"cpu_moe": False, "n_cpu_moe": 1},
    {"policy": "auto", "n_gpu_layers": 3},
]


@pytest.mark.parametrize("takes_steps", [False, True])
@pytest.mark.parametrize("more", LAYOUTS, ids=str)
def test_every_buffer_of_decoding_is_in_the_plan(
    more: dict[str, Any], takes_steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = KernelNeeds(n_spread_tokens=2, takes_steps=takes_steps, n_trials=1)
    monkeypatch.setattr("overspill.llm.needs_on", lambda *_: lambda n: needs)
    monkeypatch.setattr("overspill.llm.ops_for", lambda devices: lambda device: STEP_OPS)
    with recording() if takes_steps else nullcontext(), LLM(tiny_source(), **OPTIONS | more) as llm:
        params = SamplingParams(max_tokens=4, temperature=0.0)
        requests = [llm.submit(llm.request(IDS[i : i + 5], params)) for i in range(more.get("n_parallel", 1))]
        for events in requests:
            with events:
                assert sum(isinstance(event, TokenEvent) for event in events) == 4
        budgets = llm.plan.placement.budgets
        peaks = [device.peak_bytes for device in llm.devices.all]
        assert peaks[:-1] == [budget.used_bytes for budget in budgets[:-1]]
        in_file = llm.residence.mapped_bytes
        # What weights are loaded through is counted too, and given back before letters are reserved.
        assert budgets[-1].used_bytes - in_file - 16_000 < peaks[-1] <= budgets[-1].used_bytes - in_file
        assert llm.counters()["device_allocations_after_warmup"] == 0
