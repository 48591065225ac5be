"""`--devices` and `--device-memory`: what is understood, and what is refused with which words."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from overspill.device import factory
from overspill.device.base import Device
from overspill.device.factory import open_devices, parse_memory
from overspill.device.virtual import VirtualDevice
from overspill.errors import OutOfMemory, UserError
from overspill.hardware import n_threads_for
from overspill.options import Options

GIB = 1024**3
MIB = 1024**2


@pytest.mark.parametrize(
    ("text", "n_devices", "expected"),
    [
        ("300MiB", 1, (300 * MIB,)),
        ("300MiB", 3, (300 * MIB,) * 3),
        ("300MiB,1GiB", 2, (300 * MIB, GIB)),
        (" 300 MiB , 1GiB ", 2, (300 * MIB, GIB)),
        ("24GB", 1, (24_000_000_000,)),
        ("1.5gib", 1, (3 * GIB // 2,)),
        ("0.1GB", 1, (100_000_000,)),
        ("1048576", 1, (1048576,)),
        ("64KiB,8kb,7B,0", 4, (65536, 8000, 7, 0)),
    ],
)
def test_memory(text: str, n_devices: int, expected: tuple[int, ...]) -> None:
    assert parse_memory(text, n_devices=n_devices) == expected


@pytest.mark.parametrize(
    ("text", "n_devices", "message"),
    [
        ("1GiB,2GiB", 3, "--device-memory 1GiB,2GiB: 2 sizes for 3 devices; give one for all or one for each"),
        ("24G", 1, "--device-memory 24G: '24G' is not a size; write 300MiB, 24GB or a number of bytes"),
        ("1GiB,", 2, "--device-memory 1GiB,: '' is not a size; write 300MiB, 24GB or a number of bytes"),
        ("-1GiB", 1, "--device-memory -1GiB: '-1GiB' is not a size; write 300MiB, 24GB or a number of bytes"),
        ("nan", 1, "--device-memory nan: 'nan' is not a size; write 300MiB, 24GB or a number of bytes"),
    ],
)
def test_bad_memory(text: str, n_devices: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_memory(text, n_devices=n_devices)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", "9" * 5000, "1e3", "\u0663GB", "1GiB;2GiB", "GiB"])
def test_bad_memory_is_a_user_error(text: str) -> None:
    with pytest.raises(UserError, match="--device-memory"):
        parse_memory(text, n_devices=1)


def test_cpu() -> None:
    devices = open_devices("cpu")
    assert devices.accelerators == ()
    assert devices.host.name == "cpu"
    assert devices.all == (devices.host,)
    assert 0 < devices.host.free_bytes <= devices.host.total_bytes
    devices.close()


def test_cpu_memory_caps_the_host() -> None:
    devices = open_devices("cpu", memory="1MiB")
    assert (devices.host.total_bytes, devices.host.free_bytes) == (MIB, MIB)
    with pytest.raises(OutOfMemory, match=r"^cpu: out of memory: staging/arena needs 2\.0 MiB, 1\.0 of 1\.0 MiB are"):
        devices.host.allocate_pinned(2 * MIB, name="arena")
    with pytest.raises(UserError, match="2 sizes for 1 devices"):
        open_devices("cpu", memory="1MiB,1MiB")


@pytest.mark.parametrize("kind", ["virtual", "null"])
def test_counted_kinds(kind: str) -> None:
    devices = open_devices(f"{kind}:3", memory="1MiB,2MiB,3MiB")
    assert [d.name for d in devices.all[:3]] == [f"{kind}:0", f"{kind}:1", f"{kind}:2"]
    assert [d.total_bytes for d in devices.accelerators] == [MIB, 2 * MIB, 3 * MIB]
    assert [d.is_host for d in devices.all] == [False, False, False, True]
    devices.close()


def test_virtual_options_reach_the_devices() -> None:
    devices = open_devices("virtual:2", chaos_seed=7, h2d_gbps=2.0)
    for device in devices.accelerators:
        assert isinstance(device, VirtualDevice)
        assert (device.rules.chaos_seed, device.rules.h2d_gbps) == (7, 2.0)
    devices.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("virtual:0", "--devices virtual:0: 0 devices; give 1 to 64"),
        ("null:65", "--devices null:65: 65 devices; give 1 to 64"),
        ("cuda:0,cuda:0", "--devices cuda:0,cuda:0: cuda:0 is named twice; name each device once"),
        *(
            (
                spec,
                f"--devices {spec}: '{part}' is not a device; use cpu, auto, cuda, cuda:0,cuda:1, virtual:N or null:N",
            )
            for spec, part in (
                ("virtual:-1", "virtual:-1"),
                ("virtual", "virtual"),
                ("", ""),
                ("cuda:0,", ""),
                ("cuda:-1", "cuda:-1"),
                ("cuda:0,cpu", "cpu"),
                ("cpu,virtual:2", "cpu"),
                ("gpu0", "gpu0"),
                ("virtual:" + "9" * 5000, "virtual:" + "9" * 5000),
            )
        ),
    ],
)
def test_bad_spec(spec: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_devices(spec)
    assert str(caught.value) == message


def test_virtual_options_elsewhere_are_refused() -> None:
    for options in ({"chaos_seed": 1}, {"h2d_gbps": 1}):
        with pytest.raises(UserError, match="--devices cpu: chaos and link rates are for virtual devices"):
            open_devices("cpu", **options)
    with pytest.raises(UserError, match="moves nothing"):
        open_devices("virtual:1", h2d_gbps=0.0)


# --- CUDA, without a GPU: what is asked of the module that opens it -------------------------------------------------


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    for spec in ("cuda", "cuda:0,cuda:1"):
        with pytest.raises(UserError, match=f"--devices {spec}: CUDA is not available here; use cpu or virtual:N"):
            open_devices(spec)
    devices = open_devices("auto")
    assert devices.accelerators == ()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs that are virtual devices, behind the names the factory calls."""

    def open_cuda(indices: Sequence[int], caps: Sequence[int | None]) -> tuple[Device, ...]:
        return tuple(VirtualDevice(i, total_bytes=cap or 1) for i, cap in zip(indices, caps, strict=True))

    module = ModuleType("overspill.device.cuda")
    module.open_cuda = open_cuda
    module.pinned_memory = lambda n_bytes: torch.full((n_bytes,), 42, dtype=torch.uint8)
    monkeypatch.setitem(sys.modules, "overspill.device.cuda", module)
    monkeypatch.setattr(factory, "_has_cuda", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)


@pytest.mark.usefixtures("fake_cuda")
def test_cuda_specs() -> None:
    for spec, indices in (("cuda", [0, 1, 2]), ("auto", [0, 1, 2]), ("cuda:2,cuda:0", [2, 0])):
        devices = open_devices(spec)
        assert [d.name for d in devices.accelerators] == [f"virtual:{i}" for i in indices]
        assert [d.total_bytes for d in devices.accelerators] == [1] * len(indices)
        devices.close()


@pytest.mark.usefixtures("fake_cuda")
def test_cuda_caps_and_pinned_memory() -> None:
    devices = open_devices("cuda:1,cuda:2", memory="1MiB,2MiB")
    assert [d.total_bytes for d in devices.accelerators] == [MIB, 2 * MIB]
    assert devices.host.allocate_pinned(3, name="p").host_tensor.tolist() == [42, 42, 42]
    with pytest.raises(UserError, match="--devices cuda:3: no cuda:3 here; the last one is cuda:2"):
        open_devices("cuda:3")


@pytest.mark.parametrize(
    ("devices", "n_cores", "asked", "wanted"),
    [
        ("cpu", 32, None, 32),
        ("none", 32, None, 32),
        ("virtual:2", 32, 40, 32),
        ("auto", 32, None, 32),
        ("cuda:0,cuda:1", 32, None, 30),
        ("cuda", 32, 32, 30),
        ("cuda", 32, 16, 16),
        ("cuda:0", 16, None, 15),
        ("cuda:0", 1, None, 1),
    ],
)
def test_threads_of_the_cpu(
    devices: str, n_cores: int, asked: int | None, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside GPUs some cores are left to others, whatever is asked for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(n_cores))
    monkeypatch.setattr(factory, "_has_cuda", lambda: False)
    assert n_threads_for(Options(devices=devices, threads=asked)) == wanted
