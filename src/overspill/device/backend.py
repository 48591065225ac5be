"""What the back ends share: a device's memory, trace and streams; the checks and the counting of copies.

Bytes are counted when a copy is issued, on the issuing thread: the counts are exact at any time, whatever the streams
have got to, and no lock is needed. Busy time is counted by whoever ran the work.

Invariant: a buffer's memory is contiguous, so that `Buffer.raw_bytes` can see it as bytes.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from overspill.device.base import (
    Buffer,
    Device,
    DeviceCounters,
    MemoryKind,
    Part,
    Recording,
    Span,
    Stream,
    WrongDevice,
    running_on,
)
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, size_in_bytes


def new_memory(shape: tuple[int, ...], dtype: torch.dtype, *, device: str = "cpu") -> torch.Tensor:
    """Uninitialised memory that any thread may write, also when the caller is inside `torch.inference_mode`."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def stream_name(device: Device, lane: Lane, number: int | None) -> str:
    """Of a lane, or of the feeder of that number, for threads and logs."""
    return f"{device.name}/{lane}" + ("" if number is None else f":{number}")


def check_copy(stream_device: Device, dst: Buffer, part: Part) -> None:
    """A copy has one end on its stream's device, goes to another buffer, and stays inside both."""
    src, src_offset, dst_offset, n_bytes = part
    if stream_device is not dst.device and stream_device is not src.device:
        raise WrongDevice(f"a stream of {stream_device} cannot copy {src} to {dst}")
    room = min(dst.n_bytes - dst_offset, src.n_bytes - src_offset)
    if dst is src or min(src_offset, dst_offset) < 0 or not 0 <= n_bytes <= room:
        raise ValueError(
            f"copy of {n_bytes} bytes from {src} + {src_offset} ({src.n_bytes} bytes) to {dst} + {dst_offset} "
            f"({dst.n_bytes} bytes)"
        )


def check_upload(stream_device: Device, dst: Buffer, parts: Sequence[Part]) -> None:
    """An upload goes from pinned host memory to the stream's own device and stays inside the buffers."""
    if dst.device is not stream_device:
        raise WrongDevice(f"a stream of {stream_device} cannot upload to {dst}")
    for part in parts:
        if not part.src.device.is_host:
            raise WrongDevice(f"upload from {part.src}, which is not host memory")
        if not part.src.is_pinned:
            raise RuntimeError(f"upload from {part.src}, which is not pinned")
        if min(part.src_offset, part.dst_offset, part.n_bytes) < 0:
            raise ValueError(f"negative range in the upload of {part.src} to {dst}")
        if part.src_offset + part.n_bytes > part.src.n_bytes or part.dst_offset + part.n_bytes > dst.n_bytes:
            raise ValueError(
                f"upload of {part.n_bytes} bytes from {part.src} + {part.src_offset} to {dst} + {part.dst_offset} "
                "leaves a buffer"
            )


def count_copy(counters: DeviceCounters, dst: Buffer, part: Part) -> None:
    """Count a copy that crosses devices, by its direction."""
    if dst.device is part.src.device:
        return
    if dst.device.is_host:
        counters.downloaded_bytes += part.n_bytes
    else:
        counters.handed_off_bytes += part.n_bytes


def move_parts(dst: Buffer, parts: Sequence[Part]) -> None:
    """Copy byte ranges between buffers in host memory, now."""
    target = dst.raw_bytes()
    for part in parts:
        source = part.src.raw_bytes()[part.src_offset : part.src_offset + part.n_bytes]
        target[part.dst_offset : part.dst_offset + part.n_bytes].copy_(source)


class BackendStream(Stream):
    """A stream that its device can empty and end."""

    @abstractmethod
    def drain_host(self) -> None:
        """`synchronize_host`, uncounted."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was issued and end; idempotent, raises nothing."""

    def synchronize_host(self) -> None:
        self.device.counters.n_device_syncs += 1
        self.drain_host()


class WorkRecording(Recording):
    """Pieces of work, to be run again in order."""

    def __init__(self, works: Iterable[Callable[[], None]], kept: Sequence[object]) -> None:
        super().__init__(kept)
        self._works = list(works)

    def run(self) -> None:
        for work in self._works:
            work()


class HostMemoryStream(BackendStream):
    """A stream whose device's memory is the host's, so that work and copies are plain functions.

    A subclass says when they run (`_submit`), and may hold them to more (`_run_work`, `_move`).
    """

    @abstractmethod
    def _submit(self, run: Callable[[], None], *, label: str, n_bytes: int = 0) -> None:
        """Run in stream order; `n_bytes` is what it moves, for the trace."""

    def launch(
        self,
        work: Callable[[], None],
        *,
        label: str,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        self._submit(partial(self._run_work, work, tuple(reads), tuple(writes)), label=label)

    def replay(
        self, recording: Recording, *, label: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        assert isinstance(recording, WorkRecording)
        self.launch(recording.run, label=label, reads=reads, writes=writes)

    def copy(
        self, dst: Buffer, src: Buffer, *, n_bytes: int, label: str, dst_offset: int = 0, src_offset: int = 0
    ) -> None:
        part = Part(src, src_offset, dst_offset, n_bytes)
        check_copy(self.device, dst, part)
        count_copy(self.device.counters, dst, part)
        self._submit(partial(self._move, dst, (part,)), label=label, n_bytes=n_bytes)

    def upload(self, dst: Buffer, parts: Sequence[Part], *, label: str) -> None:
        check_upload(self.device, dst, parts)
        n_bytes = sum(part.n_bytes for part in parts)
        self.device.counters.uploaded_bytes += n_bytes
        self._submit(partial(self._move, dst, tuple(parts)), label=label, n_bytes=n_bytes)

    def _run_work(self, work: Callable[[], None], reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        with running_on(self.device):
            work()

    def _move(self, dst: Buffer, parts: tuple[Part, ...]) -> None:
        move_parts(dst, parts)


class Trace:
    """Busy time and spans of one device, written by the threads that run its work."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None

    def start(self) -> None:
        self._spans = []

    def take(self) -> list[Span]:
        spans, self._spans = self._spans, None
        return spans or []

    def note(self, counters: DeviceCounters, span: Span) -> None:
        counters.busy_us[span.lane] += span.end_us - span.start_us
        if (spans := self._spans) is not None:
            spans.append(span)


def now_us() -> float:
    return time.monotonic_ns() / 1000


class BackendDevice(Device):
    """Memory by ledger, lanes opened at first use, counters and trace. A subclass opens streams and memory."""

    def __init__(self, name: str, *, ledger: Ledger, torch_device: str = "cpu") -> None:
        self.name = name
        self.torch_device = torch.device(torch_device)
        self.counters = DeviceCounters()
        self.trace = Trace()
        self._ledger = ledger
        self._live: set[Buffer] = set()
        self._streams: dict[Lane | int, BackendStream] = {}
        self._is_closed = False

    @abstractmethod
    def _open_stream(self, lane: Lane) -> BackendStream:
        """A new stream of this device."""

    @abstractmethod
    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New contiguous memory."""

    @property
    def total_bytes(self) -> int:
        return self._ledger.space.total_bytes

    @property
    def free_bytes(self) -> int:
        return self._ledger.space.free_bytes

    @property
    def allocated_bytes(self) -> dict[MemoryKind, int]:
        return self._ledger.by_kind

    @property
    def peak_bytes(self) -> int:
        return self._ledger.peak_bytes

    def stream(self, lane: Lane) -> BackendStream:
        return self._opened(lane, partial(self._open_stream, lane))

    def _opened(self, key: Lane | int, open: Callable[[], BackendStream]) -> BackendStream:
        """The stream of that lane, or of the host's feeder of that number, opened at its first use."""
        if self._is_closed:
            raise RuntimeError(f"{self} is closed")
        if key not in self._streams:
            self._streams[key] = open()
        return self._streams[key]

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, kind: MemoryKind, name: str) -> Buffer:
        n_bytes = size_in_bytes(shape, dtype)
        return self._account(partial(self._new_tensor, shape, dtype), n_bytes, kind=kind, name=name)

    def _account(
        self, make: Callable[[], torch.Tensor], n_bytes: int, *, kind: MemoryKind, name: str, is_pinned: bool = False
    ) -> Buffer:
        """A buffer of new memory, counted; nothing stays counted when there is no such memory."""
        self._ledger.take(n_bytes, kind=kind, name=name)
        try:
            tensor = make()
        except BaseException:
            self._ledger.give_back(n_bytes, kind=kind)
            raise
        self.counters.n_allocations += 1
        buffer = self._make_buffer(tensor, kind=kind, name=name, is_pinned=is_pinned)
        self._live.add(buffer)
        return buffer

    def _make_buffer(self, tensor: torch.Tensor, *, kind: MemoryKind, name: str, is_pinned: bool) -> Buffer:
        return Buffer(self, tensor, kind=kind, name=name, is_pinned=is_pinned)

    def free(self, buffer: Buffer) -> None:
        if buffer not in self._live:
            raise RuntimeError(f"{buffer} is not allocated on {self}, or was already freed")
        self._live.remove(buffer)
        self._ledger.give_back(buffer.n_bytes, kind=buffer.kind)

    def start_trace(self) -> None:
        self.trace.start()

    def take_trace(self) -> list[Span]:
        return self.trace.take()

    def synchronize_host(self) -> None:
        self.counters.n_device_syncs += 1
        for stream in self._streams.values():
            stream.drain_host()

    def close(self) -> None:
        """Finish and end all streams, and forget the memory; idempotent. An error in a stream is not raised here."""
        self._is_closed = True
        for stream in self._streams.values():
            stream.close()
        self._live.clear()
