"""Memory and links of real GPUs: direct copies pass their test, detours and pageable experts change no bit."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest
import torch

from overspill import LLM
from overspill.device.base import MemoryKind
from overspill.device.cpu import CpuDevice
from overspill.device.factory import open_devices
from overspill.device.handoff import failing_pairs
from overspill.errors import OutOfMemory
from overspill.pipeline.reading import LoadMode
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
IDS = [(11 * i + 5) % 500 for i in range(100)]
ONE = {"devices": "cuda:0", "cpu_moe": True, "policy": "all", "n_ubatch": 16, "n_wave": 128, "n_ctx": 128}
TWO = ONE | {"devices": "cuda:0,cuda:1", "grain": 1}

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def logits(**options: object) -> torch.Tensor:
    with LLM(MODEL, **options) as llm:
        return llm.logits(IDS)


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    return logits(**ONE)


@needs_two
def test_direct_copies_of_this_machine_pass() -> None:
    devices = open_devices("cuda")
    assert failing_pairs(devices) == frozenset()
    devices.close()


@needs_two
@pytest.mark.parametrize(
    "options", [{"host_stage": "0"}, {"host_stage": "1", "host_stage_tile_mib": 1}, {"force_xdev_sync": True}], ids=str
)
def test_hand_offs_change_no_bit(options: dict[str, object], wanted: torch.Tensor) -> None:
    assert torch.equal(logits(**TWO, **options), wanted)


@pytest.mark.parametrize("mode", list(LoadMode))
def test_load_modes_change_no_bit(mode: LoadMode, wanted: torch.Tensor) -> None:
    assert torch.equal(logits(**ONE, load_mode=mode.value), wanted)


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_a_driver_that_refuses_to_pin_changes_no_bit(
    mode: str, wanted: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    real = CpuDevice.allocate_pinned

    def refuse(host: CpuDevice, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> object:
        if kind is MemoryKind.WEIGHTS and "ffn_down" in name:
            raise OutOfMemory("refused")
        return real(host, n_bytes, name=name, kind=kind)

    with (
        patch.object(CpuDevice, "allocate_pinned", refuse),
        caplog.at_level(logging.WARNING),
        LLM(MODEL, **ONE, load_mode=mode) as llm,
    ):
        assert llm.counters()["pageable_bytes"] > llm.counters()["pinned_bytes"] > 0
        assert torch.equal(llm.logits(IDS), wanted)
    assert any("are pinned" in record.getMessage() for record in caplog.records)
