"""Copies and uploads of virtual devices: bytes, counts, faults, and the poison that precedes the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from overspill.device import virtual
from overspill.device.base import Devices, MemoryKind, Part, WrongDevice
from overspill.device.factory import open_devices
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualDevice
from tests.helpers.buffers import floats, pinned

MIB = 1024**2
TIMEOUT_S = 20


@pytest.fixture
def devices() -> Iterator[Devices]:
    opened = open_devices("virtual:2", memory="1MiB")
    yield opened
    opened.close()


def test_copies_move_leading_bytes_whatever_the_dtypes_and_are_counted(devices: Devices) -> None:
    (a, b), host = devices.accelerators, devices.host
    source = pinned(devices, torch.arange(4, dtype=torch.float32))
    on_a, on_b, back = floats(a, 4), b.allocate((16,), torch.uint8, kind=MemoryKind.KV, name="bytes"), floats(host, 4)
    back.host_tensor.fill_(7)
    stream = a.stream(Lane.HAND_OFF)
    stream.copy(on_a, source, n_bytes=16, label="host to a")
    stream.copy(on_b, on_a, n_bytes=12, label="a to b")
    b.stream(Lane.HAND_OFF).wait(stream.record())
    b.stream(Lane.HAND_OFF).copy(back, on_b, n_bytes=12, label="b to host")
    b.synchronize_host()
    assert back.host_tensor.tolist() == [0, 1, 2, 7]
    assert (a.counters.handed_off_bytes, a.counters.downloaded_bytes, a.counters.uploaded_bytes) == (28, 0, 0)
    assert (b.counters.handed_off_bytes, b.counters.downloaded_bytes, b.counters.uploaded_bytes) == (0, 12, 0)
    source.host_tensor.fill_(0)
    assert on_a.raw().tolist() == [0, 1, 2, 3]


def test_copies_within_a_device_and_by_the_host_count_by_what_they_cross(devices: Devices) -> None:
    a, host = devices.accelerators[0], devices.host
    first, second, on_host = floats(a), floats(a), floats(host)
    on_host.host_tensor.fill_(2)
    host.stream(Lane.HAND_OFF).copy(first, on_host, n_bytes=16, label="by the host's stream")
    host.synchronize_host()
    a.stream(Lane.COMPUTE).copy(second, first, n_bytes=16, label="within")
    a.synchronize_host()
    assert second.raw().tolist() == [2, 2, 2, 2]
    assert (a.counters.handed_off_bytes, host.counters.handed_off_bytes) == (0, 16)


def test_a_trace_has_the_bytes_of_copies(devices: Devices) -> None:
    a = devices.accelerators[0]
    a.start_trace()
    a.stream(Lane.UPLOAD).copy(floats(a), pinned(devices, torch.ones(4)), n_bytes=8, label="half")
    a.synchronize_host()
    assert [(s.lane, s.label, s.n_bytes) for s in a.take_trace()] == [(Lane.UPLOAD, "half", 8)]


def test_upload_gathers_parts_and_leaves_the_rest(devices: Devices) -> None:
    a = devices.accelerators[0]
    first = pinned(devices, torch.arange(10, dtype=torch.uint8), "first")
    second = pinned(devices, torch.arange(100, 110, dtype=torch.uint8), "second")
    slot = a.allocate((8,), torch.uint8, kind=MemoryKind.STAGING, name="slot")
    slot.raw().fill_(9)
    stream = a.stream(Lane.UPLOAD)
    stream.upload(slot, [Part(first, 2, 1, 3), Part(second, 0, 5, 2)], label="slab")
    stream.synchronize_host()
    assert slot.raw().tolist() == [9, 2, 3, 4, 9, 100, 101, 9]
    assert (a.counters.uploaded_bytes, a.counters.handed_off_bytes) == (5, 0)


def test_bad_copies_raise_at_once(devices: Devices) -> None:
    (a, b), host = devices.accelerators, devices.host
    on_a, on_b, source = floats(a), floats(b), pinned(devices, torch.ones(4))
    mapped = host.wrap(torch.ones(16, dtype=torch.uint8), name="blk.0.ffn_up_exps")
    upload, copy = a.stream(Lane.UPLOAD).upload, a.stream(Lane.HAND_OFF).copy
    with pytest.raises(RuntimeError, match=r"upload from Buffer\(blk\.0\.ffn_up_exps, .*, which is not pinned"):
        upload(on_a, [Part(mapped, 0, 0, 16)], label="u")
    with pytest.raises(WrongDevice, match="which is not host memory"):
        upload(on_a, [Part(on_b, 0, 0, 16)], label="u")
    with pytest.raises(WrongDevice, match="a stream of virtual:0 cannot upload to"):
        upload(on_b, [Part(source, 0, 0, 16)], label="u")
    for part in (Part(source, 1, 0, 16), Part(source, 0, 1, 16), Part(source, -1, 0, 4), Part(source, 0, 0, -1)):
        with pytest.raises(ValueError, match="upload"):
            upload(on_a, [part], label="u")
    with pytest.raises(WrongDevice, match="a stream of virtual:0 cannot copy"):
        copy(on_b, source, n_bytes=4, label="c")
    for dst, n_bytes in ((on_b, 17), (on_b, -1), (on_a, 4)):
        with pytest.raises(ValueError, match="copy of"):
            copy(dst, on_a, n_bytes=n_bytes, label="c")
    assert (a.counters.uploaded_bytes, a.counters.handed_off_bytes) == (0, 0)
    a.synchronize_host()


@pytest.mark.parametrize("by_upload", [True, False])
def test_poison_is_seen_by_who_does_not_wait(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, by_upload: bool
) -> None:
    """The target held good values before; the copy stands between its poison and its bytes while the reader reads."""
    a = devices.accelerators[0]
    source, slot = pinned(devices, torch.full((4,), 5.0)), a.allocate((16,), torch.uint8, kind=MemoryKind.KV, name="s")
    slot.raw().view(torch.float32).fill_(5)
    has_begun, may_go_on, move = threading.Event(), threading.Event(), virtual.move_parts

    def held(*args: object) -> None:
        has_begun.set()
        assert may_go_on.wait(TIMEOUT_S)
        move(*args)

    monkeypatch.setattr(virtual, "move_parts", held)
    upload, compute = a.stream(Lane.UPLOAD), a.stream(Lane.COMPUTE)
    if by_upload:
        upload.upload(slot, [Part(source, 0, 0, 16)], label="slab")
    else:
        upload.copy(slot, source, n_bytes=16, label="hand-off")
    ready = upload.record()
    assert has_begun.wait(TIMEOUT_S)
    seen: list[torch.Tensor] = []
    read = lambda: seen.append(slot.tensor.view(torch.float32).clone())  # noqa: E731
    compute.launch(read, label="reads too early", reads=(slot,))
    compute.record().wait_host()
    compute.wait(ready)
    compute.launch(read, label="reads in time", reads=(slot,))
    may_go_on.set()
    compute.record().wait_host()
    assert seen[0].isnan().all()
    assert seen[1].tolist() == [5, 5, 5, 5]


def test_without_poison_memory_stays_as_it_is(devices: Devices) -> None:
    device = VirtualDevice(0, total_bytes=MIB, poison=False)
    buffer = floats(device)
    buffer.raw().fill_(3)
    device.free(buffer)
    assert buffer.raw().tolist() == [3, 3, 3, 3]
