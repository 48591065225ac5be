"""Rates of links and CPU with all at work: who reads what, that throttled links set the pace, and the saved file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overspill.calibration import ExpertShape, calibrate, hardware_of, with_saved_rates
from overspill.commands.calibrate import run_calibrate
from overspill.device.base import Devices
from overspill.device.factory import open_devices
from overspill.errors import UserError
from overspill.gguf.types import TensorType
from overspill.kernels import cpu
from overspill.options import Options
from overspill.pipeline import together
from overspill.pipeline.choose import Plan, choose
from overspill.pipeline.parties import n_experts_met
from overspill.pipeline.together import n_experts_in_part, picks
from overspill.placement.budget import KernelNeeds
from overspill.placement.rates import PartyRates
from overspill.saved_rates import file_of, load_rates, save_rates
from tests.pure.placement_models import make_machine, make_shape

SMALL = ExpertShape(n_expert=16, n_used=4, n_ff=64, n_embd=256)
EXPERT_BYTES = 3 * 64 * 256 * 34 // 32


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("overspill.calibration._AT_LEISURE_S", 0.02)
    monkeypatch.setattr("overspill.calibration._MADE_BYTES", 4 * SMALL.n_expert * EXPERT_BYTES)
    monkeypatch.setattr(together, "_CYCLE_BYTES", 16 * EXPERT_BYTES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def devices() -> Iterator[Devices]:
    opened = open_devices("virtual:2", h2d_gbps=0.05)
    yield opened
    opened.close()


# --- who reads what


@pytest.mark.parametrize(("n_expert", "n_used", "n_links"), [(128, 8, 2), (16, 4, 1), (8, 2, 8), (32, 4, 3)])
@pytest.mark.parametrize("n_tokens", [1, 4, 16])
def test_everybody_reads_an_equal_part_and_nobody_what_another_reads(
    n_expert: int, n_used: int, n_links: int, n_tokens: int
) -> None:
    part = n_experts_in_part(n_expert, n_used, n_tokens, n_links)
    assert part == int(np.ceil(round(n_experts_met(n_expert, n_used, n_tokens) / (n_links + 1), 6)))
    work = picks([3, 5, 9], n_expert, n_used, n_tokens, n_links, part_bytes=EXPERT_BYTES)
    assert len(work) == 16
    assert {pick.layer for pick in work} <= {3, 5, 9}
    for pick in work:
        assert pick.ids.shape == (n_tokens, n_used)
        assert all(len(set(row)) == n_used for row in pick.ids.tolist())
        own = np.flatnonzero(pick.who == n_links)
        assert 0 < len(own) <= part
        assert set(own) <= set(pick.ids.reshape(-1).tolist())
        assert all((pick.who == link).sum() <= part for link in range(n_links))
    assert all(any((pick.who == link).any() for pick in work) for link in range(n_links))


def test_throttled_links_bound_what_is_measured_and_all_memory_is_given_back(devices: Devices) -> None:
    before = [device.allocated_bytes for device in devices.all]
    found = calibrate(devices, lambda device: cpu.OPS, TensorType.Q8_0, 2, SMALL)
    assert [device.allocated_bytes for device in devices.all] == before
    assert [rates.n_tokens for rates in found.together] == [1, 4, 16]
    for rates, alone in zip(found.together, found.alone, strict=True):
        links = (*rates.links_gbps, *rates.links_beside_cpu_gbps, *alone.links_gbps)
        assert len(links) == 6
        assert all(0 < gbps < 0.05 * 1.01 for gbps in links)
        assert min(rates.cpu_gbps, rates.cpu_call_us, alone.cpu_gbps) > 0


def test_types_without_a_fast_kernel_are_measured_too(devices: Devices) -> None:
    """Rows of 20 values are not whole units of the CPU's prepared call."""
    odd = replace(SMALL, n_embd=20, n_ff=9)
    found = calibrate(devices, lambda device: cpu.OPS, TensorType.F32, 2, odd)
    assert all(rates.cpu_gbps > 0 for rates in found.together)


# --- the file

RATES = tuple(PartyRates(n, (50.0, 25.0), (40.0, 20.0), 30.0, 12.5) for n in (1, 4))


def test_saved_rates_come_back_and_other_types_stay(devices: Devices, tmp_path: Path) -> None:
    hardware = hardware_of(devices.accelerators, devices.host, 2)
    path = save_rates(hardware, {"Q8_0": RATES})
    assert path.parent == tmp_path / "cache" / "overspill"
    save_rates(hardware, {"Q4_K": RATES[:1]})
    loaded = load_rates(hardware)
    assert {name: saved.party_rates for name, saved in loaded.items()} == {"Q8_0": RATES, "Q4_K": RATES[:1]}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_other_hardware_finds_none(devices: Devices, caplog: pytest.LogCaptureFixture) -> None:
    hardware = hardware_of(devices.accelerators, devices.host, 2)
    path = save_rates(hardware, {"Q8_0": RATES})
    others = [
        replace(hardware, n_threads=3),
        replace(hardware, cpu="another"),
        replace(hardware, n_cores=hardware.n_cores + 1),
        replace(hardware, memory_gib=hardware.memory_gib + 1),
        replace(hardware, devices=hardware.devices[:1]),
        replace(hardware, devices=("virtual, link 7 GB/s",) * 2),
    ]
    for other in others:
        assert load_rates(other) == {}
        file_of(other).write_text(path.read_text())  # a copy from another machine
        assert load_rates(other) == {}
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "version": 0}))
    assert load_rates(hardware) == {}
    assert caplog.records == []


def changed(record: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    rates = {**record["rates"]["Q8_0"]["party_rates"][0], name: value}
    return {**record, "rates": {"Q8_0": {"measured": "now", "party_rates": [rates]}}}


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "{",
        lambda record: "[1]",
        lambda record: "",
        lambda record: json.dumps({**record, "rates": [1]}),
        lambda record: json.dumps({**record, "rates": {"Q8_0": {}}}),
        lambda record: json.dumps(changed(record, "cpu_gbps", -1)),
        lambda record: json.dumps(changed(record, "links_gbps", [1.0])),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "rates"}),
    ],
)
def test_a_damaged_file_is_one_line_and_measured_anew(
    damage: Any, devices: Devices, caplog: pytest.LogCaptureFixture
) -> None:
    hardware = hardware_of(devices.accelerators, devices.host, 2)
    path = save_rates(hardware, {"Q8_0": RATES})
    path.write_text(damage(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING):
        assert load_rates(hardware) == {}
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    save_rates(hardware, {"Q8_0": RATES})
    assert load_rates(hardware)["Q8_0"].party_rates == RATES


def test_a_folder_that_cannot_be_written(devices: Devices, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        save_rates(hardware_of(devices.accelerators, devices.host, 2), {"Q8_0": RATES})


# --- the command, and a plan


def test_the_command_prints_and_saves(tmp_path: Path) -> None:
    options = {"devices": "virtual:2", "h2d_gbps": "0.05", "threads": "2"}
    text = run_calibrate("Q8_0,Q4_0", as_json=False, options=options, shape=SMALL)
    assert text.count("GB/s\n| tokens") == 2
    assert f"saved: {tmp_path}" in text
    record = json.loads(run_calibrate("Q8_0", as_json=True, options=options, shape=SMALL))
    saved = json.loads(Path(record["file"]).read_text())
    assert saved["rates"].keys() == {"Q8_0", "Q4_0"}
    assert saved["rates"]["Q8_0"]["party_rates"] == record["rates"]["Q8_0"]["party_rates"]
    assert [alone["n_tokens"] for alone in record["rates"]["Q8_0"]["alone"]] == [1, 4, 16]


@pytest.mark.parametrize(("quant", "spec"), [("Q8_0,Q9", "virtual:1"), ("Q8_0", "cpu"), ("Q8_0", "null:1")])
def test_what_cannot_be_measured(quant: str, spec: str) -> None:
    with pytest.raises(UserError, match=r"^(--quant Q9|calibrate: no links)"):
        run_calibrate(quant, as_json=False, options={"devices": spec}, shape=SMALL)


def plan_of(n_devices: int) -> Plan:
    shape = make_shape(8, n_expert=16, n_expert_used=4)
    machine = make_machine(*[24.0] * n_devices)
    return choose(shape, machine, Options(cpu_moe=True), lambda n: KernelNeeds(n_spread_tokens=16))


def test_a_plan_takes_saved_rates_of_the_devices_that_read(devices: Devices) -> None:
    plan = plan_of(2)
    assert with_saved_rates(plan, devices, 2, "Q8_0") is plan
    save_rates(hardware_of(devices.accelerators, devices.host, 2), {"Q8_0": RATES})
    assert with_saved_rates(plan, devices, 2, "Q4_K") is plan
    found = with_saved_rates(plan, devices, 2, "Q8_0")
    assert found.machine.party_rates == RATES
    assert found.party_rates_from.startswith("saved 2")
    assert found.step_schedule(1).shares != plan.step_schedule(1).shares
