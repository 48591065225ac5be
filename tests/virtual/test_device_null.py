"""Null devices: what they write down, what they count, and that they hold no memory and run no work."""

from __future__ import annotations

import pytest
import torch

from overspill.device.base import MemoryKind, Part
from overspill.device.factory import open_devices
from overspill.device.hazard import HOST, Entry, Verb
from overspill.device.lane import Lane
from overspill.device.null import NullHost, open_null
from overspill.device.virtual import VirtualDevice
from overspill.errors import OutOfMemory

MIB = 1024**2


def never() -> None:
    raise AssertionError("null devices execute nothing")


def test_every_verb_is_written_down_in_the_order_of_issue() -> None:
    devices, log = open_null([MIB, MIB], host_bytes=MIB)
    (a, b), host = devices.accelerators, devices.host
    arena = host.allocate_pinned(64, name="arena")
    slot = a.allocate((64,), torch.uint8, kind=MemoryKind.STAGING, name="slot")
    x, y = (d.allocate((4,), torch.float32, kind=MemoryKind.COMPUTE, name="x") for d in (a, b))
    upload, compute = a.stream(Lane.UPLOAD), a.stream(Lane.COMPUTE)
    upload.upload(slot, [Part(arena, 0, 0, 8), Part(arena, 32, 8, 8)], label="slab")
    ready = upload.record()
    compute.wait(ready)
    compute.launch(never, label="step", reads=[slot], writes=[x])
    computed = compute.record()
    b.stream(Lane.HAND_OFF).wait(computed)
    b.stream(Lane.HAND_OFF).copy(y, x, n_bytes=16, label="hand-off")
    computed.wait_host()
    arena.host_tensor.zero_()
    assert log.entries == [
        Entry(verb=Verb.UPLOAD, stream="null:0/upload", label="slab", reads=(arena,), writes=(slot,), n_bytes=16),
        Entry(verb=Verb.RECORD, stream="null:0/upload", event=0),
        Entry(verb=Verb.WAIT, stream="null:0/compute", event=0),
        Entry(verb=Verb.LAUNCH, stream="null:0/compute", label="step", reads=(slot,), writes=(x,)),
        Entry(verb=Verb.RECORD, stream="null:0/compute", event=1),
        Entry(verb=Verb.WAIT, stream="null:1/hand_off", event=1),
        Entry(verb=Verb.COPY, stream="null:1/hand_off", label="hand-off", reads=(x,), writes=(y,), n_bytes=16),
        Entry(verb=Verb.WAIT_HOST, stream=HOST, event=1),
        Entry(verb=Verb.TOUCH_HOST, stream=HOST, label="arena", writes=(arena,)),
    ]
    assert (a.counters.uploaded_bytes, b.counters.handed_off_bytes) == (16, 16)
    assert (a.counters.n_host_waits, a.counters.n_device_syncs) == (1, 0)


def test_an_event_is_done_once_the_host_has_waited_for_it_or_a_later_one() -> None:
    devices, _ = open_null([MIB], host_bytes=MIB)
    compute, upload = (devices.accelerators[0].stream(lane) for lane in (Lane.COMPUTE, Lane.UPLOAD))
    first, other, second, third = compute.record(), upload.record(), compute.record(), compute.record()
    assert not first.is_done()
    second.wait_host()
    assert [e.is_done() for e in (first, second, third, other)] == [True, True, False, False]
    devices.accelerators[0].synchronize_host()
    assert [e.is_done() for e in (third, other)] == [True, True]


def test_memory_is_counted_and_never_there() -> None:
    devices, _ = open_null([10**15], host_bytes=10**15)
    device = devices.accelerators[0]
    huge = device.allocate((10**14,), torch.float32, kind=MemoryKind.WEIGHTS, name="huge")
    arena = devices.host.allocate_pinned(9 * 10**14, name="arena")
    assert (huge.n_bytes, huge.raw().device.type, huge.raw().shape) == (4 * 10**14, "meta", (10**14,))
    assert (arena.n_bytes, arena.is_pinned, arena.raw().device.type) == (9 * 10**14, True, "meta")
    assert (device.free_bytes, device.allocated_bytes[MemoryKind.WEIGHTS]) == (6 * 10**14, 4 * 10**14)
    with pytest.raises(OutOfMemory, match="null:0: out of memory: weights/more"):
        device.allocate((7 * 10**14,), torch.uint8, kind=MemoryKind.WEIGHTS, name="more")
    device.free(huge)
    assert device.free_bytes == 10**15


def test_faults_are_caught_without_running() -> None:
    devices, log = open_null([MIB, MIB], host_bytes=MIB)
    a, host = devices.accelerators[0], devices.host
    mapped = host.wrap(torch.zeros(4, dtype=torch.uint8), name="mapped")
    slot = a.allocate((4,), torch.uint8, kind=MemoryKind.STAGING, name="slot")
    with pytest.raises(RuntimeError, match=r"upload from Buffer\(mapped, .*, which is not pinned"):
        a.stream(Lane.UPLOAD).upload(slot, [Part(mapped, 0, 0, 4)], label="u")
    with pytest.raises(ValueError, match="copy of 5 bytes"):
        a.stream(Lane.UPLOAD).copy(slot, mapped, n_bytes=5, label="c")
    real = VirtualDevice(0, total_bytes=0)
    with pytest.raises(TypeError, match="null:0/compute cannot wait for an event of another back end"):
        a.stream(Lane.COMPUTE).wait(real.stream(Lane.COMPUTE).record())
    real.close()
    assert log.entries == []


def test_factory_gives_one_log_to_all() -> None:
    devices = open_devices("null:2")
    assert isinstance(devices.host, NullHost)
    for device in devices.all:
        device.stream(Lane.COMPUTE).launch(never, label="x")
    assert [e.stream for e in devices.host.log.entries] == ["null:0/compute", "null:1/compute", "null:host/compute"]
    devices.close()
    devices.close()
