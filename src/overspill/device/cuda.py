"""NVIDIA GPUs: the device seam on CUDA streams and events.

Work is plain torch and Triton issued under the stream; temporaries of the compute stream come from torch's caching
allocator, whose reuse is ordered by that same stream. Copies between GPUs run on the stream they are given to. The
current stream of the issuing thread is set and left at every call, which costs a tenth of restoring it. Busy
time is measured with timing events around each launch and read when somebody asks for it.

Pinned memory is anonymous memory in huge pages, touched in pieces by several threads and then registered in chunks:
touching is what costs most, and large pages make registering cheap. torch's own pinned allocator would round sizes up
to powers of two.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from overspill.device.backend import (
    BackendDevice,
    BackendStream,
    check_copy,
    check_upload,
    count_copy,
    now_us,
)
from overspill.device.base import Buffer, CannotRecord, Device, Event, Part, Recording, Span, running_on
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, Space
from overspill.errors import OutOfMemory, UserError

_PIN_CHUNK_BYTES = 1 << 30
_PIN_THREADS = 8
_TOUCH_BYTES = 16 << 20
_PAGE_BYTES = 2 << 20
_MAX_UNREAD = 4096


class CudaEvent(Event):
    """A torch event, and the stream that recorded it."""

    __slots__ = ("cuda", "stream")

    def __init__(self, cuda: torch.cuda.Event, stream: CudaStream) -> None:
        self.cuda = cuda
        self.stream = stream

    def is_done(self) -> bool:
        return bool(self.cuda.query())

    def wait_host(self) -> None:
        self.stream.device.counters.n_host_waits += 1
        self.cuda.synchronize()

    def wait_in_worker(self) -> None:
        self.cuda.synchronize()


class CudaRecording(Recording):
    """A CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, kept: Sequence[object]) -> None:
        super().__init__(kept)
        self.graph = graph


class CudaStream(BackendStream):
    """One CUDA stream. Issued to from one thread."""

    def __init__(self, device: CudaDevice, lane: Lane) -> None:
        super().__init__(device, lane)
        self._owner = device
        self.cuda = torch.cuda.Stream(device.torch_device)
        self._unread: deque[tuple[torch.cuda.Event, torch.cuda.Event, str, int]] = deque()
        self._last: torch.cuda.Event | None = None

    def launch(
        self,
        work: Callable[[], None],
        *,
        label: str,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        start = self._mark()
        torch.cuda.set_stream(self.cuda)
        with running_on(self.device):
            work()
        self._note(start, label, 0)

    def replay(
        self, recording: Recording, *, label: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        assert isinstance(recording, CudaRecording)
        start = self._mark()
        torch.cuda.set_stream(self.cuda)
        recording.graph.replay()
        self._note(start, label, 0)

    def copy(
        self, dst: Buffer, src: Buffer, *, n_bytes: int, label: str, dst_offset: int = 0, src_offset: int = 0
    ) -> None:
        part = Part(src, src_offset, dst_offset, n_bytes)
        check_copy(self.device, dst, part)
        count_copy(self.device.counters, dst, part)
        start, source = self._mark(), src.raw_bytes()[src_offset : src_offset + n_bytes]
        if isinstance(src.device, CudaDevice) and src.device is not self.device:
            torch.cuda.set_stream(src.device.outgoing)
        torch.cuda.set_stream(self.cuda)
        dst.raw_bytes()[dst_offset : dst_offset + n_bytes].copy_(source, non_blocking=True)
        self._note(start, label, n_bytes)

    def upload(self, dst: Buffer, parts: Sequence[Part], *, label: str) -> None:
        check_upload(self.device, dst, parts)
        n_bytes = sum(part.n_bytes for part in parts)
        self.device.counters.uploaded_bytes += n_bytes
        start, target = self._mark(), dst.raw_bytes()
        torch.cuda.set_stream(self.cuda)
        for src, src_offset, dst_offset, n in _within_chunks(parts):
            source = src.raw_bytes()[src_offset : src_offset + n]
            target[dst_offset : dst_offset + n].copy_(source, non_blocking=True)
        self._note(start, label, n_bytes)

    def record(self) -> CudaEvent:
        if self._last is None:
            self._last = self._mark()
        return CudaEvent(self._last, self)

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self.cuda.wait_event(event.cuda)
        elif not event.is_done():
            event.wait_host()
        self._last = None

    def drain_host(self) -> None:
        self.cuda.synchronize()

    def close(self) -> None:
        self.cuda.synchronize()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.cuda)
        return event

    def _note(self, start: torch.cuda.Event, label: str, n_bytes: int) -> None:
        """Remember a piece of work by its two events; the second serves as the stream's present end."""
        self._last = self._mark()
        self._unread.append((start, self._last, label, n_bytes))
        if len(self._unread) > _MAX_UNREAD:
            self.read_times(only_done=True)

    def read_times(self, *, only_done: bool = False) -> None:
        """Account for finished work; without `only_done` the host must have waited for the stream."""
        while self._unread and (not only_done or self._unread[0][1].query()):
            start, end, label, n_bytes = self._unread.popleft()
            self._owner.note(self.lane, start, end, label, n_bytes)


class CudaDevice(BackendDevice):
    """One GPU, optionally capped so that it looks like a smaller one."""

    is_host = False
    can_record = True

    def __init__(self, index: int, *, cap_bytes: int | None) -> None:
        name, self._index = f"cuda:{index}", index
        super().__init__(name, ledger=Ledger(name, _space(index, cap_bytes)), torch_device=name)
        # torch runs a copy to another GPU on the current stream of the source, between events of the target's stream.
        self.outgoing = torch.cuda.Stream(self.torch_device)
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record(torch.cuda.current_stream(self.torch_device))
        self._zero.synchronize()
        self._zero_us = now_us()
        # Recordings are replayed one after the other, so their temporaries may share memory. torch refuses a pool again
        # that it has seen without a graph, so the first one stays.
        self._recorded = torch.cuda.graph_pool_handle()
        self._first_graph: torch.cuda.CUDAGraph | None = None

    @property
    def _compute(self) -> CudaStream:
        stream = self.stream(Lane.COMPUTE)
        assert isinstance(stream, CudaStream)
        return stream

    @property
    def description(self) -> str:
        properties = torch.cuda.get_device_properties(self._index)
        return f"{properties.name}, {properties.total_memory >> 20} MiB, {_pcie_link(properties)}"

    def _open_stream(self, lane: Lane) -> CudaStream:
        return CudaStream(self, lane)

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            with torch.inference_mode(False):
                return torch.empty(shape, dtype=dtype, device=self.torch_device)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(f"{self.name}: {str(error).splitlines()[0]}") from None

    def record(self, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> CudaRecording:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_stream(self._compute.cuda)
        graph.capture_begin(pool=self._recorded, capture_error_mode="thread_local")
        try:
            try:
                with running_on(self):
                    for work in works:
                        work()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            raise CannotRecord(str(error).splitlines()[0]) from error
        self._first_graph = self._first_graph or graph
        return CudaRecording(graph, kept)

    def note(self, lane: Lane, start: torch.cuda.Event, end: torch.cuda.Event, label: str, n_bytes: int) -> None:
        """Enter a finished piece of work into busy time and trace."""
        start_us = self._zero_us + 1e3 * self._zero.elapsed_time(start)
        end_us = start_us + 1e3 * start.elapsed_time(end)
        self.trace.note(self.counters, Span(lane, label, start_us, end_us, n_bytes))

    def settle_host(self) -> None:
        """Wait for the streams and account for their work, uncounted: before counters or traces are read."""
        for stream in self._streams.values():
            stream.drain_host()
            assert isinstance(stream, CudaStream)
            stream.read_times()

    def reset_counters(self) -> None:
        self.settle_host()
        super().reset_counters()

    def take_trace(self) -> list[Span]:
        self.settle_host()
        return super().take_trace()

    def close(self) -> None:
        super().close()
        torch.cuda.set_stream(torch.cuda.default_stream(self.torch_device))
        torch.cuda.empty_cache()


def _within_chunks(parts: Sequence[Part]) -> Iterator[Part]:
    """The same ranges, cut where one registered chunk of pinned memory ends: no copy may cross."""
    for src, src_offset, dst_offset, n_bytes in parts:
        done = 0
        while done < n_bytes:
            at = src_offset + done
            n = min(n_bytes - done, _PIN_CHUNK_BYTES - at % _PIN_CHUNK_BYTES)
            yield Part(src, at, dst_offset + done, n)
            done += n


def _pcie_link(properties: object) -> str:
    """Fastest speed and present width, as Linux knows them."""
    domain, bus, number = (getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    folder = Path(f"/sys/bus/pci/devices/{domain:04x}:{bus:02x}:{number:02x}.0")
    try:
        speed, width = ((folder / name).read_text().strip() for name in ("max_link_speed", "current_link_width"))
    except OSError:
        return "link unknown"
    return f"{speed} x{width}"


def open_cuda(indices: Sequence[int], caps: Sequence[int | None]) -> tuple[Device, ...]:
    """Open GPUs in this order. `UserError` for one that is not there."""
    n_gpus = torch.cuda.device_count()
    for index in indices:
        if index >= n_gpus:
            raise UserError(f"--devices cuda:{index}: there are {n_gpus} CUDA devices")
    return tuple(CudaDevice(index, cap_bytes=cap) for index, cap in zip(indices, caps, strict=True))


def _space(index: int, cap_bytes: int | None) -> Callable[[int], Space]:
    """Memory of a GPU; what torch keeps for temporaries counts as free, because it is reused."""

    def space(held_bytes: int) -> Space:
        free, total = torch.cuda.mem_get_info(index)
        free += torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        if cap_bytes is not None:
            total, free = min(total, cap_bytes), min(free, cap_bytes - held_bytes)
        return Space(total, max(0, free))

    return space


def pinned_memory(n_bytes: int) -> torch.Tensor:
    """uint8 `[n_bytes]` of host memory that GPUs can copy from while the host goes on."""
    padded = -(-max(n_bytes, 1) // _PAGE_BYTES) * _PAGE_BYTES
    try:
        area = mmap.mmap(-1, padded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"{n_bytes} bytes of host memory cannot be had: {error.strerror}") from None
    with suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    # The array's end comes before the area's: a finalizer of the area itself would run when it is unmapped already.
    owner = np.frombuffer(area, np.uint8)
    memory = torch.from_numpy(owner)
    _touch(memory)
    weakref.finalize(owner, _unregister, _register(memory.split(_PIN_CHUNK_BYTES)))
    return memory[:n_bytes]


def _touch(memory: torch.Tensor) -> None:
    """Have all pages made, on several threads: clearing them is most of the cost of new memory."""

    def write(piece: torch.Tensor) -> None:
        piece[::4096] = 0

    pieces = memory.split(_TOUCH_BYTES)
    if len(pieces) == 1:
        write(pieces[0])
        return
    with ThreadPoolExecutor(min(_PIN_THREADS, len(pieces))) as pool:
        list(pool.map(write, pieces))


def _register(chunks: Sequence[torch.Tensor]) -> list[int]:
    """Pin chunks, and return their addresses; all or none. `OutOfMemory`."""
    done: list[int] = []
    for chunk in chunks:
        status = int(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), chunk.numel(), 1))
        if status != 0:
            _unregister(done)
            raise OutOfMemory(f"pinning {chunk.numel() >> 20} MiB of host memory failed (CUDA error {status})")
        done.append(chunk.data_ptr())
    return done


def _unregister(addresses: Sequence[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
