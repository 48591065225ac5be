"""Virtual devices: isolation, declared access, capacity, poison, the hook, overlap, chaos, link rates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind, Part, UndeclaredAccess, WrongDevice
from overspill.device.factory import open_devices
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualDevice, VirtualHost
from overspill.errors import OutOfMemory
from tests.helpers.buffers import floats, pinned
from tests.helpers.ring import N_VALUES, SLOT_BYTES, Ring, expected

MIB = 1024**2
TIMEOUT_S = 20


@pytest.fixture
def devices() -> Iterator[Devices]:
    opened = open_devices("virtual:2", memory="1MiB")
    yield opened
    opened.close()


def run(device: Device, work: Callable[[], object], *, reads: tuple[Buffer, ...] = (), **named: tuple[Buffer]) -> None:
    """One launch, and wait for it."""
    stream = device.stream(Lane.COMPUTE)
    stream.launch(lambda: _drop(work()), label="work", reads=reads, **named)
    stream.record().wait_host()


def _drop(_: object) -> None:
    return None


# --- isolation and declared access ----------------------------------------------------------------------------------


def test_a_buffer_yields_its_tensor_on_its_own_device_only(devices: Devices) -> None:
    a, b = devices.accelerators
    buffer = floats(a)
    run(a, lambda: buffer.tensor, reads=(buffer,))
    with pytest.raises(WrongDevice, match=r"Buffer\(b, virtual:0, \(4,\)\) read by work of None"):
        _ = buffer.tensor
    with pytest.raises(WrongDevice, match="read by the host"):
        _ = buffer.host_tensor
    with pytest.raises(WrongDevice, match="read by work of virtual:1"):
        run(b, lambda: buffer.tensor, reads=(buffer,))
    with pytest.raises(WrongDevice, match="read by work of cpu"):
        run(devices.host, lambda: buffer.tensor, reads=(buffer,))


def test_work_touches_only_what_it_names(devices: Devices) -> None:
    for device in (devices.accelerators[0], devices.host):
        named, other = floats(device, name="named"), floats(device, name="other")
        run(device, lambda b=named: b.tensor.fill_(0), writes=(named,))
        with pytest.raises(UndeclaredAccess, match=r"Buffer\(other, .*touched by work whose launch does not name it"):
            run(device, lambda b=other: b.tensor, reads=(named,))


def test_weights_need_not_be_named(devices: Devices) -> None:
    weight = floats(devices.accelerators[0], kind=MemoryKind.WEIGHTS)
    run(devices.accelerators[0], lambda: weight.tensor)


def test_writing_what_is_named_as_read_raises(devices: Devices) -> None:
    buffer = floats(devices.accelerators[0])
    with pytest.raises(UndeclaredAccess, match=r"Buffer\(b, .* changed during work that names it as read only"):
        run(devices.accelerators[0], lambda: buffer.tensor.view(2, 2)[0].add_(1), reads=(buffer,))


def test_a_write_by_another_stream_during_a_read_raises(devices: Devices) -> None:
    device = devices.accelerators[0]
    buffer, written = floats(device), threading.Event()

    def read() -> None:
        device.stream(Lane.UPLOAD).launch(lambda: _drop(buffer.tensor.zero_()), label="write", writes=(buffer,))
        device.stream(Lane.UPLOAD).launch(written.set, label="tell")
        assert written.wait(TIMEOUT_S)

    with pytest.raises(UndeclaredAccess, match="or another stream did and no event keeps them apart"):
        run(device, read, reads=(buffer,))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_capacity(devices: Devices) -> None:
    device = devices.accelerators[0]
    half = device.allocate((MIB // 2,), torch.uint8, kind=MemoryKind.WEIGHTS, name="blk.0.ffn_up_exps")
    kv = device.allocate((2, MIB // 16), torch.float16, kind=MemoryKind.KV, name="kv")
    held = {
        MemoryKind.WEIGHTS: MIB // 2,
        MemoryKind.KV: MIB // 4,
        MemoryKind.COMPUTE: 0,
        MemoryKind.STAGING: 0,
        MemoryKind.CACHE: 0,
    }
    assert device.allocated_bytes == held
    assert (device.total_bytes, device.free_bytes, device.peak_bytes) == (MIB, MIB // 4, 3 * MIB // 4)
    with pytest.raises(OutOfMemory) as caught:
        device.allocate((MIB // 2,), torch.uint8, kind=MemoryKind.STAGING, name="slot0")
    assert str(caught.value) == (
        "virtual:0: out of memory: staging/slot0 needs 0.5 MiB, 0.2 of 1.0 MiB are free; place less on this device"
    )
    assert device.allocated_bytes == held
    device.free(half)
    assert (device.free_bytes, device.peak_bytes) == (3 * MIB // 4, 3 * MIB // 4)
    device.allocate((3 * MIB // 4,), torch.uint8, kind=MemoryKind.STAGING, name="fits exactly")
    assert (device.free_bytes, device.peak_bytes, device.counters.n_allocations) == (0, MIB, 3)
    assert device.allocated_bytes[MemoryKind.KV] == kv.n_bytes


def test_a_device_without_memory_holds_nothing() -> None:
    device = VirtualDevice(0, total_bytes=0)
    assert device.free_bytes == 0
    assert device.allocate((0,), torch.float32, kind=MemoryKind.KV, name="empty").n_bytes == 0
    with pytest.raises(OutOfMemory):
        floats(device, 1)


def test_free_wants_a_live_buffer_of_its_own(devices: Devices) -> None:
    a, b = devices.accelerators
    buffer = floats(a)
    with pytest.raises(RuntimeError, match="is not allocated on virtual:1"):
        b.free(buffer)
    a.free(buffer)
    with pytest.raises(RuntimeError, match="or was already freed"):
        a.free(buffer)
    assert (a.allocated_bytes[MemoryKind.COMPUTE], b.allocated_bytes[MemoryKind.COMPUTE]) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fresh_and_freed_memory_is_nan(devices: Devices, dtype: torch.dtype) -> None:
    for device in (devices.accelerators[0], devices.host):
        buffer = device.allocate((3, 5), dtype, kind=MemoryKind.COMPUTE, name="b")
        assert buffer.raw().isnan().all()
        buffer.raw().fill_(1)
        device.free(buffer)
        assert buffer.raw().isnan().all()


def test_fresh_pinned_memory_and_integers_are_poisoned(devices: Devices) -> None:
    assert devices.host.allocate_pinned(5, name="p").host_tensor.tolist() == [255] * 5
    scalar = devices.accelerators[0].allocate((), torch.int64, kind=MemoryKind.COMPUTE, name="scalar")
    assert scalar.raw().item() == -1


# --- the hook, overlap, chaos, links --------------------------------------------------------------------------------


def test_before_is_called_with_lane_and_label_on_the_worker(devices: Devices) -> None:
    a = devices.accelerators[0]
    assert isinstance(a, VirtualDevice)
    calls: list[tuple[Lane, str, str]] = []
    a.before = lambda lane, label: calls.append((lane, label, threading.current_thread().name))
    source = pinned(devices, torch.ones(4))
    a.stream(Lane.COMPUTE).launch(lambda: None, label="step")
    a.stream(Lane.COMPUTE).synchronize_host()
    a.stream(Lane.UPLOAD).upload(floats(a), [Part(source, 0, 0, 16)], label="slab")
    a.synchronize_host()
    assert calls == [
        (Lane.COMPUTE, "step", "virtual:0/compute"),
        (Lane.UPLOAD, "slab", "virtual:0/upload"),
    ]


def test_upload_and_compute_overlap_without_clocks(devices: Devices) -> None:
    """The upload may begin only when compute has begun, and compute may end only when the upload has begun."""
    a = devices.accelerators[0]
    assert isinstance(a, VirtualDevice)
    begun = {Lane.COMPUTE: threading.Event(), Lane.UPLOAD: threading.Event()}

    def meet(lane: Lane, label: str) -> None:
        begun[lane].set()
        assert all(event.wait(TIMEOUT_S) for event in begun.values()), "compute and upload took turns"

    a.before = meet
    a.stream(Lane.COMPUTE).launch(lambda: None, label="step")
    a.stream(Lane.UPLOAD).upload(floats(a), [Part(pinned(devices, torch.ones(4)), 0, 0, 16)], label="slab")
    a.synchronize_host()


def test_an_error_in_before_is_the_streams(devices: Devices) -> None:
    a = devices.accelerators[0]
    assert isinstance(a, VirtualDevice)
    a.before = lambda lane, label: _drop(1 / 0)
    a.stream(Lane.COMPUTE).launch(lambda: None, label="step")
    with pytest.raises(ZeroDivisionError):
        a.synchronize_host()


def ring_outputs(devices: Devices, x: torch.Tensor, weights: torch.Tensor, n_slots: int) -> list[torch.Tensor]:
    ring = Ring(devices, n_ubatches=len(x), n_slots=n_slots)
    arena = pinned(devices, weights, "arena")
    outputs = []
    for _ in range(2):
        for source, row in zip(ring.inputs, x, strict=True):
            source.host_tensor.view(torch.float32).copy_(row)
        outputs += ring.read(ring.run(arena, len(weights)))
    return outputs


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("chaos_seed", [None, 0, 1])
def test_a_pipeline_computes_the_same_bits_under_chaos(n_devices: int, chaos_seed: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.rand(3, N_VALUES, generator=generator), torch.rand(7, N_VALUES, generator=generator)
    devices = open_devices(f"virtual:{n_devices}", memory="64KiB", chaos_seed=chaos_seed)
    outputs = ring_outputs(devices, x, weights, n_slots=2)
    devices.close()
    for i, output in enumerate(outputs):
        assert torch.equal(output, expected(x[i % 3], weights))
    n_uploaded = sum(d.counters.uploaded_bytes for d in devices.accelerators)
    assert n_uploaded == 2 * 7 * SLOT_BYTES


def test_chaos_delays_are_seeded_per_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def delays(seed: int, index: int, lane: Lane) -> list[float]:
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        device = VirtualDevice(index, total_bytes=MIB, chaos_seed=seed)
        for _ in range(5):
            device.stream(lane).launch(lambda: None, label="work")
        device.close()
        return slept

    first = delays(1, 0, Lane.COMPUTE)
    assert len(set(first)) == 5
    assert all(0 <= s <= 0.002 for s in first)
    assert delays(1, 0, Lane.COMPUTE) == first
    others = [delays(2, 0, Lane.COMPUTE), delays(1, 1, Lane.COMPUTE), delays(1, 0, Lane.UPLOAD)]
    assert first not in others
    assert len({tuple(o) for o in others}) == 3


def test_host_of_virtual_devices_has_chaos_too() -> None:
    devices = open_devices("virtual:1", chaos_seed=3)
    assert isinstance(devices.host, VirtualHost)
    assert devices.host.rules.chaos_seed == 3


def test_link_rates_make_copies_last() -> None:
    """1 MB at 0.01 GB/s is 100 ms to or from the host, at 0.02 GB/s 50 ms between devices, and free within one."""
    a, b = (VirtualDevice(i, total_bytes=8 * MIB, h2d_gbps=0.01, peer_gbps=0.02) for i in range(2))
    host = VirtualHost()
    n_bytes = 1_000_000
    on_a, also_on_a, on_b = (d.allocate((n_bytes,), torch.uint8, kind=MemoryKind.KV, name="b") for d in (a, a, b))
    source = host.allocate_pinned(n_bytes, name="p")
    stream = a.stream(Lane.UPLOAD)
    a.start_trace()
    stream.upload(on_a, [Part(source, 0, 0, n_bytes)], label="upload")
    stream.copy(on_a, source, n_bytes=n_bytes, label="from host")
    stream.copy(source, on_a, n_bytes=n_bytes, label="to host")
    stream.copy(on_b, on_a, n_bytes=n_bytes, label="peer")
    stream.copy(also_on_a, on_a, n_bytes=n_bytes, label="within")
    a.synchronize_host()
    seconds = {s.label: (s.end_us - s.start_us) / 1e6 for s in a.take_trace()}
    for label, least in (("upload", 0.1), ("from host", 0.1), ("to host", 0.1), ("peer", 0.05)):
        assert seconds[label] >= least
    assert seconds["within"] < 0.05
    for device in (a, b, host):
        device.close()


def test_work_runs_the_partial_it_was_given(devices: Devices) -> None:
    a = devices.accelerators[0]
    x, y = floats(a, name="x"), floats(a, name="y")
    run(a, lambda: x.tensor.copy_(torch.tensor([1.0, 2, 3, 4])), writes=(x,))
    run(a, partial(_double, x, y), reads=(x,), writes=(y,))
    assert y.raw().tolist() == [2, 4, 6, 8]


def _double(x: Buffer, y: Buffer) -> None:
    torch.mul(x.tensor, 2, out=y.tensor)
