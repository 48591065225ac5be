"""`-lm` and `-tl` through `LLM`, and a host that cannot pin all: told, counted, and the same answer."""

from __future__ import annotations

import json
import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from overspill import cli
from overspill.device import factory
from overspill.device.base import Buffer, Event
from overspill.device.virtual import VirtualHost
from overspill.errors import UserError
from overspill.llm import LLM
from overspill.pipeline import arena, host_matrices, weights
from overspill.pipeline.reading import LoadMode, ReadInto
from overspill.pipeline.ring import LoadRing
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
IDS = [(11 * i + 5) % 500 for i in range(40)]
OPTIONS = {"devices": "virtual:2", "cpu_moe": True, "n_ubatch": 16, "n_wave": 64, "n_ctx": 64, "policy": "all"}
KIB = 1 << 10


@pytest.fixture(scope="module")
def wanted() -> torch.Tensor:
    with LLM(MODEL, **OPTIONS) as llm:
        assert llm.counters()["pinned_bytes"] == llm.host_expert_bytes > 0
        assert llm.counters()["pageable_bytes"] == 0
        return llm.logits(IDS)


@pytest.mark.parametrize("mode", list(LoadMode))
def test_modes(mode: LoadMode, wanted: torch.Tensor) -> None:
    with LLM(MODEL, **OPTIONS, load_mode=mode.value, load_threads=2) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert llm.residence.mode is mode
        assert (llm.residence.mapped_bytes > 0) == mode.is_mapped
        assert llm.counters()["pinned_bytes"] == llm.host_expert_bytes


@pytest.mark.parametrize("mode", [LoadMode.AUTO, LoadMode.MLOCK, LoadMode.NONE])
def test_what_stays_in_the_file_is_read_ahead_unless_it_is_locked(mode: LoadMode) -> None:
    with patch("overspill.llm.read_ahead") as read_ahead, LLM(MODEL, **OPTIONS, load_mode=mode.value) as llm:
        (views, budget), _ = read_ahead.call_args
        assert sum(len(view) for view in views) == (llm.residence.mapped_bytes if mode is LoadMode.AUTO else 0)
        assert budget > 0
        assert llm.residence.locked_bytes == 0 or mode is LoadMode.MLOCK


def test_auto_moves_what_fills_huge_pages_while_half_of_the_free_memory_is_left(
    wanted: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(MODEL, **OPTIONS, load_mode="mmap") as llm:
        mapped_bytes, copied_bytes = llm.residence.mapped_bytes, llm.residence.copied_bytes
    monkeypatch.setattr(host_matrices, "_LEAST_FILE_BYTES", 1)
    monkeypatch.setattr(host_matrices, "_LEAST_BYTES", 1)
    with LLM(MODEL, **OPTIONS) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert llm.residence.mapped_bytes == 0
        assert llm.residence.copied_bytes == copied_bytes + mapped_bytes
    monkeypatch.setattr(weights, "reserve_bytes", lambda total_bytes: total_bytes)
    with LLM(MODEL, **OPTIONS) as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        assert llm.residence.mapped_bytes == mapped_bytes


@pytest.mark.parametrize("how", ["auto", "on", "off"])
def test_weights_go_up_while_the_next_are_read_unless_told_not_to(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, arrivals, late = LoadRing.send, list[Event](), list[bool]()

    def send(ring: LoadRing, target: Buffer, read: ReadInto) -> Event:
        late.extend(not arrived.is_done() for arrived in arrivals[-1:])
        arrivals.append(real(ring, target, read))
        return arrivals[-1]

    monkeypatch.setattr(LoadRing, "send", send)
    with LLM(MODEL, **OPTIONS, async_load=how, h2d_gbps=0.02):
        assert any(late) == (how != "off")


@pytest.mark.parametrize("threads", [1, 3])
def test_load_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = arena.ThreadPoolExecutor
    monkeypatch.setattr(arena, "ThreadPoolExecutor", lambda n: asked.append(n) or real(n))
    with LLM(MODEL, **OPTIONS, load_threads=threads):
        assert asked == [threads]


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> int:
    """A host that has 500 KiB beside what the engine holds without weights, and small rings to go with it."""
    with LLM(MODEL, **OPTIONS) as llm:
        cap_bytes = sum(llm.devices.host.allocated_bytes.values()) - llm.host_expert_bytes + 500 * KIB
        assert llm.host_expert_bytes > 600 * KIB
    monkeypatch.setattr(factory, "VirtualHost", partial(VirtualHost, cap_bytes=cap_bytes))
    monkeypatch.setattr(arena, "_CHUNK_BYTES", 10_000)
    return cap_bytes


def test_a_host_that_can_pin_a_part(small_host: int, wanted: torch.Tensor, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), LLM(MODEL, **OPTIONS, load_mode="mmap") as llm:
        assert torch.equal(llm.logits(IDS), wanted)
        counters = llm.counters()
        assert counters["pinned_bytes"] + counters["pageable_bytes"] == llm.host_expert_bytes
        assert min(counters["pinned_bytes"], counters["pageable_bytes"]) > 100 * KIB
        assert counters["uploaded_bytes"] == llm.host_expert_bytes * counters["waves"]
        assert counters["device_allocations_after_warmup"] == counters["device_syncs_after_warmup"] == 0
        assert llm.devices.host.peak_bytes <= small_host - small_host // 16
        assert f"{counters['pageable_bytes'] / KIB**2:,.1f} MiB pageable" in str(llm.residence)
    (record,) = caplog.records
    assert "are pinned" in record.getMessage()


@pytest.mark.usefixtures("small_host")
def test_a_host_that_cannot_hold_all_is_refused_before_loading_unless_the_file_stays_mapped() -> None:
    for mode in ("auto", "none"):
        with pytest.raises(UserError, match=r"the model does not fit: host needs .*-lm mmap"):
            LLM(MODEL, **OPTIONS, load_mode=mode)


def test_run_says_how_it_has_loaded(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = [
        "run",
        "-m",
        str(MODEL),
        "-p",
        "hi",
        "-n",
        "1",
        "--devices",
        "virtual:2",
        "-cmoe",
        "-c",
        "64",
        "-lm",
        "none",
    ]
    monkeypatch.setattr("sys.argv", ["overspill", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("load mode "))
    assert line.startswith("load mode none: ")
    assert "MiB pinned" in line
    assert "MiB copied for the CPU" in line


def test_a_bench_record_has_the_bytes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    args = ["bench", "-m", str(MODEL), "-p", "4", "-n", "0", "-r", "1", "-o", "json", "--devices", "virtual:2", "-cmoe"]
    monkeypatch.setattr("sys.argv", ["overspill", *args])
    with pytest.raises(SystemExit):
        cli.main()
    (record,) = json.loads(capsys.readouterr().out)
    assert record["pinned_bytes"] > 0 == record["pageable_bytes"]


def test_a_file_that_shrinks_while_it_is_loaded(tmp_path: Path) -> None:
    copy = tmp_path / "model.gguf"
    copy.write_bytes(MODEL.read_bytes())

    def shrink(done: int, total: int) -> None:
        if copy.stat().st_size > 200_000:
            copy.write_bytes(copy.read_bytes()[:200_000])

    with pytest.raises(UserError, match=r"model\.gguf: ended while tensor .* was read"):
        LLM(copy, **OPTIONS, load_mode="none", progress=shrink)


BUDGETS = [
    {"devices": "cpu", "n_ctx": 64, "load_mode": "none"},
    {"devices": "virtual:2", "n_gpu_layers": 2, "n_ctx": 64, "load_mode": "none"},
    {"devices": "virtual:3", "device_memory": "800KiB", "n_ctx": 160},
    {"devices": "virtual:2", "cpu_moe": True, "n_ctx": 64, "host_stage": "1", "load_mode": "dio"},
    {"devices": "virtual:2", "cpu_moe": True, "n_ctx": 128, "n_parallel": 2, "policy": "selected"},
]


@pytest.mark.parametrize("options", BUDGETS, ids=str)
def test_no_device_and_no_host_takes_more_than_was_projected(options: dict[str, Any]) -> None:
    with LLM(MODEL, **options, n_ubatch=16, n_wave=64) as llm:
        llm.logits(IDS)
        budgets = llm.plan.placement.budgets
        peaks = [device.peak_bytes for device in llm.devices.all]
        for peak, budget in zip(peaks[:-1], budgets[:-1], strict=True):
            assert peak == budget.used_bytes
        in_file = llm.residence.mapped_bytes
        assert budgets[-1].used_bytes - in_file - 10_000 < peaks[-1] <= budgets[-1].used_bytes - in_file


def test_buffers_of_the_host_are_part_of_what_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave that the host's buffers are too large for gets smaller, and the plan says so; asked for, it is refused."""
    options = {"devices": "virtual:2", "cpu_moe": True, "n_ctx": 4096, "n_ubatch": 16}
    with LLM(MODEL, **options) as llm:
        budget, wished = llm.plan.placement.budgets[-1], llm.plan.placement.n_wave
        assert not [note for note in llm.plan.placement.notes if note.startswith("wave")]
    monkeypatch.setattr(factory, "VirtualHost", partial(VirtualHost, cap_bytes=budget.used_bytes - 100_000))
    with LLM(MODEL, **options) as llm:
        n_wave = llm.plan.placement.n_wave
        assert wished / 4 <= n_wave < wished
        assert f"wave lowered from {wished} to {n_wave} tokens to fit; -b overrides" in llm.plan.placement.notes
        assert llm.devices.host.peak_bytes <= budget.used_bytes - 100_000
    with pytest.raises(UserError, match=r"the model does not fit: host needs .* for buffers, .*lower -b or -c"):
        LLM(MODEL, **options, n_wave=wished)


def test_a_closed_model_holds_no_memory() -> None:
    """Two models one after the other need room for one, also when somebody still asks the first for its counters."""
    with LLM(MODEL, **OPTIONS) as llm:
        llm.logits(IDS)
        held = [weakref.ref(buffer.raw()) for device in llm.devices.all for buffer in device._live]  # type: ignore[attr-defined]
        assert len(held) > 50
    assert [tensor for tensor in held if tensor() is not None] == []
    assert llm.counters()["tokens"] == len(IDS)
    llm.close()


@pytest.mark.parametrize("mode", ["auto", "none", "dio"])
def test_devices_that_execute_nothing_can_be_loaded(mode: str) -> None:
    with LLM(MODEL, devices="null:2", cpu_moe=True, n_ctx=64, load_mode=mode) as llm:
        assert llm.residence.pinned_bytes == llm.host_expert_bytes > 0
