"""Copies of byte ranges, and the host's feeders: one stream for each accelerator, none of which waits for another."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from overspill.device.base import Devices, MemoryKind
from overspill.device.factory import open_devices
from overspill.device.lane import Lane
from tests.helpers.buffers import pinned

TIMEOUT_S = 20


def _assert(is_true: bool) -> None:
    assert is_true


@pytest.fixture
def devices() -> Iterator[Devices]:
    opened = open_devices("virtual:2", memory="1MiB")
    yield opened
    opened.close()


def test_a_copy_moves_a_range_to_a_range_and_nothing_else(devices: Devices) -> None:
    a, host = devices.accelerators[0], devices.host
    source, back = pinned(devices, torch.arange(8, dtype=torch.uint8)), pinned(devices, torch.zeros(8))
    on_a = a.allocate((2,), torch.float32, kind=MemoryKind.COMPUTE, name="on a")
    stream = a.stream(Lane.HAND_OFF)
    stream.copy(on_a, source, n_bytes=8, label="all")
    stream.copy(on_a, source, n_bytes=3, src_offset=4, dst_offset=1, label="three")
    stream.copy(back, on_a, n_bytes=4, src_offset=1, dst_offset=5, label="back")
    a.synchronize_host()
    assert on_a.raw().view(torch.uint8).tolist() == [0, 4, 5, 6, 4, 5, 6, 7]
    assert back.host_tensor.view(torch.uint8)[:9].tolist() == [0, 0, 0, 0, 0, 4, 5, 6, 4]
    assert (a.counters.handed_off_bytes, a.counters.downloaded_bytes) == (11, 4)
    assert host.counters.downloaded_bytes == 0


@pytest.mark.parametrize("offsets", [{"src_offset": 5}, {"dst_offset": 5}, {"src_offset": -1}, {"dst_offset": -1}])
def test_a_range_outside_a_buffer_is_refused(devices: Devices, offsets: dict[str, int]) -> None:
    a = devices.accelerators[0]
    source = pinned(devices, torch.zeros(8, dtype=torch.uint8))
    on_a = a.allocate((8,), torch.uint8, kind=MemoryKind.COMPUTE, name="on a")
    with pytest.raises(ValueError, match="copy of 4 bytes"):
        a.stream(Lane.HAND_OFF).copy(on_a, source, n_bytes=4, label="outside", **offsets)


def test_a_feeder_that_waits_keeps_no_other_waiting(devices: Devices) -> None:
    host, latch, done = devices.host, threading.Event(), list[int]()
    first, second = host.feeder(0), host.feeder(1)
    assert host.feeder(0) is first is not second
    assert first is not host.stream(Lane.UPLOAD)
    first.launch(lambda: _assert(latch.wait(TIMEOUT_S)), label="waits")
    second.launch(lambda: done.append(1), label="goes on")
    second.record().wait_host()
    assert done == [1]
    latch.set()
    first.record().wait_host()


def test_a_host_that_computes_in_place_feeds_in_place() -> None:
    host = open_devices("cpu").host
    source = host.wrap(torch.arange(4, dtype=torch.uint8), name="source")
    target = host.allocate_pinned(4, name="target")
    host.feeder(0).copy(target, source, n_bytes=2, src_offset=2, label="feed")
    assert target.host_tensor[:2].tolist() == [2, 3]


def test_null_feeders_have_names_of_their_own() -> None:
    """Accesses on different streams are ordered by events alone: the proof must tell them apart."""
    host = open_devices("null:2").host
    assert len({str(host.feeder(i).__dict__["_name"]) for i in range(2)} | {"null:host/upload"}) == 3
