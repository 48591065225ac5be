"""The ring by itself: the right bytes for any parts and chunks, in order with everything else on the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind, Part
from overspill.device.factory import open_devices
from overspill.device.lane import Lane
from overspill.pipeline.host_budget import RING_CHUNKS
from overspill.pipeline.reading import reader_of
from overspill.pipeline.ring import LoadRing, PinnedRing
from tests.helpers.buffers import pinned

TIMEOUT_S = 20
N_BYTES = 4000
VALUES = torch.randint(0, 256, (N_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[None, 1, 2])
def devices(request: pytest.FixtureRequest) -> Iterator[Devices]:
    opened = open_devices("virtual:2", memory="1MiB", chaos_seed=request.param)
    yield opened
    opened.close()


def slot(device: Device) -> Buffer:
    return device.allocate((N_BYTES,), torch.uint8, kind=MemoryKind.STAGING, name="slot")


PARTS = [
    [(0, 0, N_BYTES)],
    [(0, 100, 1), (5, 101, 399), (3000, 1000, 1000), (17, 0, 3)],
    [(i, N_BYTES - 1 - i, 1) for i in range(0, 1500, 25)],
    [(0, 0, 0), (10, 20, 5)],
    [],
]


@pytest.mark.parametrize("chunk_bytes", [64, 333, 1 << 20])
@pytest.mark.parametrize("ranges", PARTS, ids=len)
def test_bytes(devices: Devices, ranges: list[tuple[int, int, int]], chunk_bytes: int) -> None:
    a, host = devices.accelerators[0], devices.host
    source, target, stream = host.wrap(VALUES, name="pageable"), slot(a), a.stream(Lane.UPLOAD)
    ring = PinnedRing(host, 0, chunk_bytes=chunk_bytes)
    assert ring.n_bytes == RING_CHUNKS * chunk_bytes
    blank = pinned(devices, torch.zeros(N_BYTES, dtype=torch.uint8))
    wanted = torch.zeros(N_BYTES, dtype=torch.uint8)
    for first, at, n in ranges:
        wanted[at : at + n] = VALUES[first : first + n]
    for _ in range(2):
        stream.upload(target, [Part(blank, 0, 0, N_BYTES)], label="blank")
        ring.upload(stream, target, [Part(source, *r) for r in ranges], label="slab")
        stream.record().wait_host()
        assert torch.equal(target.raw(), wanted)
    assert a.counters.uploaded_bytes == 2 * (N_BYTES + sum(n for _, _, n in ranges))


def test_a_blocked_accelerator_keeps_no_other_waiting() -> None:
    devices = open_devices("virtual:2", memory="1MiB")
    (a, b), host, latch = devices.accelerators, devices.host, threading.Event()
    source = host.wrap(VALUES, name="pageable")
    rings = [PinnedRing(host, i, chunk_bytes=100) for i in range(2)]
    a.stream(Lane.UPLOAD).launch(lambda: None if latch.wait(TIMEOUT_S) else 1 / 0, label="blocked")  # type: ignore[arg-type, return-value]
    targets = [slot(a), slot(b)]
    for ring, target in zip(rings, targets, strict=True):
        ring.upload(target.device.stream(Lane.UPLOAD), target, [Part(source, 0, 0, N_BYTES)], label="slab")
    b.stream(Lane.UPLOAD).record().wait_host()
    assert not a.stream(Lane.UPLOAD).record().is_done()
    assert torch.equal(targets[1].raw(), VALUES)
    latch.set()
    a.stream(Lane.UPLOAD).record().wait_host()
    assert torch.equal(targets[0].raw(), VALUES)
    devices.close()


def test_a_freed_ring_gives_its_memory_back(devices: Devices) -> None:
    PinnedRing(devices.host, 0, chunk_bytes=100).free()
    assert sum(devices.host.allocated_bytes.values()) == 0


@pytest.mark.parametrize("chunk_bytes", [64, 333, 1 << 20])
def test_the_load_ring_fills_targets_one_after_the_other(devices: Devices, chunk_bytes: int) -> None:
    targets = [slot(device) for device in devices.accelerators] + [slot(devices.accelerators[0])]
    ring = LoadRing(devices.host, chunk_bytes=chunk_bytes)
    events = [ring.send(target, reader_of(VALUES + i)) for i, target in enumerate(targets)]
    events[0].wait_host()
    assert torch.equal(targets[0].raw(), VALUES)
    ring.free_host()
    for i, target in enumerate(targets):
        assert torch.equal(target.raw(), VALUES + i)
    assert sum(devices.host.allocated_bytes.values()) == 0
