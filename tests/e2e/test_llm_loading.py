"""`-lm` and `-tl` through `LLM`, and a host that cannot pin all: told, counted, and the same answer."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch

from overspill import cli
from overspill.device import factory
from overspill.device.virtual import VirtualHost
from overspill.errors import UserError
from overspill.llm import LLM
from overspill.pipeline import arena
from overspill.pipeline.reading import LoadMode
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
