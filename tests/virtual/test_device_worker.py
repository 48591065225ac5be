"""Worker streams: order, events, errors, overlap, counters, the end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from overspill.device.base import Device, Devices, MemoryKind, device_of_this_work
from overspill.device.cpu import CpuDevice
from overspill.device.factory import open_devices
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualDevice

TIMEOUT_S = 20


class Latch:
    """A gate in a stream: `wait` blocks until `open`, and fails rather than hang."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def open(self) -> None:
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(TIMEOUT_S), "nobody opened the latch"


@pytest.fixture
def devices() -> Iterator[Devices]:
    opened = open_devices("virtual:2", memory="1MiB")
    yield opened
    opened.close()


def open_device(kind: str, thread_init: Callable[[], None] | None = None) -> Device:
    """Both users of worker streams."""
    if kind == "host":
        return CpuDevice(is_asynchronous=True, thread_init=thread_init)
    return VirtualDevice(0, total_bytes=1024**2, thread_init=thread_init)


@pytest.fixture(params=["virtual", "host"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = open_device(request.param)
    yield opened
    opened.close()


def failing() -> None:
    raise ZeroDivisionError("the first error")


def test_fifo_order_on_another_thread(device: Device) -> None:
    stream = device.stream(Lane.COMPUTE)
    seen: list[int] = []
    for i in range(200):
        stream.launch(partial(seen.append, i), label="append")
    stream.launch(lambda: seen.append(threading.get_ident()), label="thread")
    stream.record().wait_host()
    assert seen[:200] == list(range(200))
    assert seen[200] != threading.get_ident()


def test_issue_returns_before_the_work_runs(device: Device) -> None:
    stream, latch = device.stream(Lane.COMPUTE), Latch()
    stream.launch(latch.wait, label="wait")
    event = stream.record()
    assert not event.is_done()
    latch.open()
    event.wait_host()
    assert event.is_done()


def test_event_on_an_empty_stream_is_done(device: Device) -> None:
    event = device.stream(Lane.COMPUTE).record()
    assert event.is_done()
    event.wait_host()


def test_a_later_record_does_not_move_an_earlier_event(device: Device) -> None:
    """CUDA's meaning: both waits are issued while the second piece of work cannot finish; only one waits for it."""
    first, other = device.stream(Lane.COMPUTE), device.stream(Lane.UPLOAD)
    latch, seen = Latch(), list[str]()
    first.launch(partial(seen.append, "first"), label="first")
    early = first.record()
    first.launch(latch.wait, label="held")
    first.launch(partial(seen.append, "second"), label="second")
    late = first.record()
    other.wait(early)
    other.launch(partial(seen.append, "after early"), label="after early")
    other.record().wait_host()
    assert early.is_done()
    assert not late.is_done()
    assert seen == ["first", "after early"]
    other.wait(late)
    other.launch(partial(seen.append, "after late"), label="after late")
    latch.open()
    other.record().wait_host()
    assert seen == ["first", "after early", "second", "after late"]


def test_events_order_streams_of_different_devices(devices: Devices) -> None:
    a, b = (d.stream(Lane.COMPUTE) for d in devices.accelerators)
    latch, seen = Latch(), list[str]()
    a.launch(latch.wait, label="held")
    a.launch(partial(seen.append, "a"), label="a")
    b.wait(a.record())
    b.launch(partial(seen.append, "b"), label="b")
    a.wait(b.record())
    a.launch(partial(seen.append, "a again"), label="a")
    c = devices.host.stream(Lane.COMPUTE)
    c.wait(a.record())
    c.launch(partial(seen.append, "host"), label="host")
    assert seen == []
    latch.open()
    c.synchronize_host()
    assert seen == ["a", "b", "a again", "host"]


def test_two_devices_run_at_once(devices: Devices) -> None:
    """Each waits for a latch that the other opens: run one after the other, and neither would finish."""
    mine, theirs = Latch(), Latch()

    def meet(opens: Latch, waits: Latch) -> None:
        opens.open()
        waits.wait()

    a, b = (d.stream(Lane.COMPUTE) for d in devices.accelerators)
    a.launch(partial(meet, mine, theirs), label="meet")
    b.launch(partial(meet, theirs, mine), label="meet")
    devices.accelerators[0].synchronize_host()
    devices.accelerators[1].synchronize_host()


def test_three_lanes_of_a_device_run_at_once(device: Device) -> None:
    barrier = threading.Barrier(len(Lane))
    for lane in Lane:
        device.stream(lane).launch(lambda: _ignore(barrier.wait(TIMEOUT_S)), label="meet")
    device.synchronize_host()


def _ignore(_: int) -> None:
    return None


def test_an_error_is_sticky_and_hangs_nobody(device: Device) -> None:
    stream, seen = device.stream(Lane.COMPUTE), list[str]()
    before = stream.record()
    stream.launch(failing, label="bad work")
    stream.launch(partial(seen.append, "skipped"), label="skipped")
    event = stream.record()
    waits: list[Callable[[], None]] = [event.wait_host, stream.synchronize_host, device.synchronize_host]
    for wait in [*waits, *waits, before.wait_host]:
        with pytest.raises(ZeroDivisionError, match="the first error") as caught:
            wait()
        assert caught.value.__notes__ == [f"in bad work on {device.name}/compute"]
    assert event.is_done()
    stream.launch(partial(seen.append, "skipped too"), label="skipped")
    with pytest.raises(ZeroDivisionError):
        stream.record().wait_host()
    assert seen == []


def test_a_sticky_error_keeps_one_traceback(device: Device) -> None:
    stream, lengths = device.stream(Lane.COMPUTE), list[int]()
    stream.launch(failing, label="bad")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError) as caught:
            stream.synchronize_host()
        lengths.append(len(caught.traceback))
    assert lengths[0] == lengths[1] == lengths[2]


def test_an_error_reaches_the_streams_that_need_its_work(devices: Devices) -> None:
    """Whoever waits for an event after the failure fails too; an event before it carries no error."""
    a, b = (d.stream(Lane.COMPUTE) for d in devices.accelerators)
    seen = list[str]()
    good = a.record()
    a.launch(failing, label="bad")
    bad = a.record()
    innocent = devices.accelerators[1].stream(Lane.UPLOAD)
    innocent.wait(good)
    innocent.launch(partial(seen.append, "innocent"), label="innocent")
    innocent.synchronize_host()
    b.wait(bad)
    b.launch(partial(seen.append, "needs it"), label="needs it")
    host = devices.host.stream(Lane.COMPUTE)
    host.wait(b.record())
    with pytest.raises(ZeroDivisionError):
        host.synchronize_host()
    assert seen == ["innocent"]


def test_work_is_marked_with_its_device(device: Device) -> None:
    seen: list[Device | None] = []
    device.stream(Lane.COMPUTE).launch(lambda: seen.append(device_of_this_work()), label="look")
    device.synchronize_host()
    assert seen == [device]
    assert device_of_this_work() is None


@pytest.mark.parametrize("kind", ["virtual", "host"])
def test_thread_init_runs_first_on_each_thread(kind: str) -> None:
    started, seen = list[str](), list[list[str]]()
    device = open_device(kind, lambda: started.append(threading.current_thread().name))
    device.stream(Lane.COMPUTE).launch(lambda: seen.append(list(started)), label="look")
    device.close()
    assert seen == [[f"{device.name}/compute"]]


def test_failing_thread_init_is_raised() -> None:
    device = CpuDevice(is_asynchronous=True, thread_init=failing)
    event = device.stream(Lane.COMPUTE).record()
    device.stream(Lane.COMPUTE).launch(lambda: None, label="never")
    with pytest.raises(ZeroDivisionError):
        device.synchronize_host()
    with pytest.raises(ZeroDivisionError):
        event.wait_host()
    device.close()


def test_counters_and_trace(device: Device) -> None:
    compute, upload = device.stream(Lane.COMPUTE), device.stream(Lane.UPLOAD)
    compute.launch(lambda: None, label="before the trace")
    device.synchronize_host()
    device.reset_counters()
    device.start_trace()
    latch = Latch()
    compute.launch(latch.wait, label="held")
    upload.wait(compute.record())
    upload.launch(lambda: None, label="after")
    latch.open()
    upload.record().wait_host()
    held, after = sorted(device.take_trace(), key=lambda span: span.start_us)
    assert (held.lane, held.label, held.n_bytes) == (Lane.COMPUTE, "held", 0)
    assert (after.lane, after.label) == (Lane.UPLOAD, "after")
    assert held.start_us <= held.end_us <= after.start_us <= after.end_us
    busy = device.counters.busy_us
    assert busy[Lane.COMPUTE] == pytest.approx(held.end_us - held.start_us)
    assert busy[Lane.UPLOAD] == pytest.approx(after.end_us - after.start_us)
    assert busy[Lane.HAND_OFF] == 0
    assert (device.counters.n_host_waits, device.counters.n_device_syncs) == (1, 0)
    assert device.take_trace() == []
    compute.synchronize_host()
    device.synchronize_host()
    assert (device.counters.n_host_waits, device.counters.n_device_syncs) == (1, 2)


def test_waiting_for_an_event_is_not_busy_time(devices: Devices) -> None:
    a, b = devices.accelerators
    latch = Latch()
    a.stream(Lane.COMPUTE).launch(latch.wait, label="held")
    b.stream(Lane.COMPUTE).wait(a.stream(Lane.COMPUTE).record())
    threading.Timer(0.2, latch.open).start()
    b.stream(Lane.COMPUTE).launch(lambda: None, label="short")
    b.synchronize_host()
    assert a.counters.busy_us[Lane.COMPUTE] >= 150_000
    assert b.counters.busy_us[Lane.COMPUTE] < 100_000


def test_finished_work_does_not_keep_buffers(device: Device) -> None:
    stream, tensor = device.stream(Lane.COMPUTE), torch.zeros(1)
    stream.launch(partial(_touch, tensor), label="touch")
    stream.synchronize_host()
    is_held = weakref.ref(tensor)
    del tensor
    assert is_held() is None


def _touch(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def test_close_finishes_the_work_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    opened, latch, seen = open_devices("virtual:3", memory="1MiB"), Latch(), list[int]()
    for device in opened.all:
        for lane in Lane:
            device.stream(lane).launch(latch.wait, label="held")
            device.stream(lane).launch(partial(seen.append, 1), label="count")
    assert len(set(threading.enumerate()) - before) == 12
    latch.open()
    opened.close()
    assert seen == [1] * 12
    assert set(threading.enumerate()) - before == set()
    opened.close()


def test_close_raises_nothing_after_an_error() -> None:
    opened = open_devices("virtual:1", memory="1MiB")
    opened.accelerators[0].stream(Lane.COMPUTE).launch(failing, label="bad")
    opened.close()
    opened.close()


def test_a_closed_device_takes_no_work() -> None:
    opened = open_devices("virtual:1", memory="1MiB")
    device = opened.accelerators[0]
    stream = device.stream(Lane.COMPUTE)
    opened.close()
    with pytest.raises(RuntimeError, match="virtual:0 is closed"):
        device.stream(Lane.UPLOAD)
    with pytest.raises(RuntimeError, match="virtual:0/compute is closed"):
        stream.launch(lambda: None, label="late")


def test_same_stream_object_each_time(device: Device) -> None:
    assert device.stream(Lane.COMPUTE) is device.stream(Lane.COMPUTE)
    assert device.stream(Lane.COMPUTE) is not device.stream(Lane.UPLOAD)


def test_allocation_inside_inference_mode_can_be_written_by_a_worker(device: Device) -> None:
    with torch.inference_mode():
        buffer = device.allocate((4,), torch.float32, kind=MemoryKind.COMPUTE, name="b")
    device.stream(Lane.COMPUTE).launch(lambda: _ignore_tensor(buffer.tensor.fill_(3)), label="fill", writes=(buffer,))
    device.synchronize_host()
    assert buffer.raw().tolist() == [3, 3, 3, 3]


def _ignore_tensor(_: torch.Tensor) -> None:
    return None
