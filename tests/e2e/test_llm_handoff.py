"""`-hs`, `--host-stage-tile-mib`, `--force-xdev-sync`: right whatever a pair of devices does to copies."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from overspill.device import factory
from overspill.device.virtual import VirtualDevice
from overspill.llm import LLM
from overspill.pipeline.split import detours
from tests.helpers.broken import BrokenDevice, Fault
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
IDS = [(11 * i + 5) % 500 for i in range(40)]
# Experts go up, and hidden states from device to device; the CPU would take them out of the way of the fault.
OPTIONS = {"devices": "virtual:3", "device_memory": "800KiB", "n_ubatch": 16, "n_wave": 64, "n_ctx": 64, "grain": 1}
OPTIONS |= {"policy": "all"}
PAIR = (0, 1)


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    with LLM(MODEL, **OPTIONS) as llm:
        assert detours(llm.plan.layout) == []
        return llm.logits(IDS)


@pytest.fixture(params=[Fault.ZEROS, Fault.DROPPED])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual devices of which copies of one ordered pair go wrong."""

    def make(index: int, **options: Any) -> VirtualDevice:
        if index != PAIR[1]:
            return VirtualDevice(index, **options)
        fault, source = request.param, f"virtual:{PAIR[0]}"
        return BrokenDevice(index, fault=fault, source=source, total_bytes=options["total_bytes"])

    monkeypatch.setattr(factory, "VirtualDevice", make)


@pytest.mark.usefixtures("broken")
def test_a_broken_pair_is_found_told_and_avoided(wanted: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(MODEL, **OPTIONS) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert detours(llm.plan.layout) == [PAIR]
        assert "hand-offs through host memory (direct copies fail): virtual:0 -> virtual:1" in llm.plan.placement.notes
    (record,) = caplog.records
    assert "hand-off virtual:0 -> virtual:1" in record.getMessage()


@pytest.mark.usefixtures("broken")
def test_direct_copies_can_be_forced_and_are_as_broken_as_they_are(
    wanted: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(MODEL, **OPTIONS, host_stage="0") as llm:
        assert detours(llm.plan.layout) == []
        assert not torch.equal(llm.logits(IDS), wanted)
    assert caplog.records == []


@pytest.mark.usefixtures("broken")
def test_all_pairs_can_be_sent_through_the_host(wanted: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(MODEL, **OPTIONS, host_stage="1", host_stage_tile_mib=1) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert {(0, 1), (1, 2), (2, 0)} <= {*detours(llm.plan.layout)}
        assert llm.plan.layout.detour.tile_bytes == 1 << 20
        assert any(note.startswith("hand-offs through host memory (-hs 1): ") for note in llm.plan.placement.notes)
    assert caplog.records == []


def test_waiting_on_the_host_changes_no_bit(wanted: torch.Tensor) -> None:
    with LLM(MODEL, **OPTIONS) as llm:
        llm.logits(IDS)
        n_waits = llm.counters()["host_waits"]
    with LLM(MODEL, **OPTIONS, force_xdev_sync=True) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert llm.counters()["host_waits"] > n_waits
