"""The host as a device: its memory holds what the accelerators do not, and the CPU computes on it.

Alone (`--devices cpu`) its streams compute in place, on the thread that issues; beside accelerators its streams are
workers, so that the thread that issues for all devices never computes.

Pinned memory comes from whoever knows the accelerators: without CUDA any memory will do, and counts as pinned.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from overspill.device.backend import BackendDevice, BackendStream, HostMemoryStream, new_memory, now_us
from overspill.device.base import Buffer, Event, HostDevice, MemoryKind, Span
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, capped_space, host_space, size_in_bytes
from overspill.device.worker import WorkerStream
from overspill.errors import OutOfMemory

HUGE_PAGE_BYTES = 2 << 20
# What is not smaller has pages of its own; what is larger than some ordinary pages, but not so large, shares an area.
_LARGE_BYTES, _SHARING_BYTES, _AREA_BYTES = 8 << 20, 1 << 16, 32 << 20
_ALIGNMENT = 64


class InlineEvent(Event):
    """A point that is always reached: an inline stream has finished what it was given before it returns."""

    def __init__(self, stream: InlineStream) -> None:
        self._stream = stream

    def is_done(self) -> bool:
        return True

    def wait_host(self) -> None:
        self._stream.device.counters.n_host_waits += 1
        self._stream.drain_host()

    def wait_in_worker(self) -> None:
        self._stream.drain_host()


class InlineStream(HostMemoryStream):
    """Runs work on the calling thread, before `launch` returns. The first error is raised there and stays."""

    def __init__(self, device: BackendDevice, lane: Lane) -> None:
        super().__init__(device, lane)
        self._owner = device
        self._error: Exception | None = None

    def record(self) -> InlineEvent:
        return InlineEvent(self)

    def wait(self, event: Event) -> None:
        event.wait_in_worker()

    def drain_host(self) -> None:
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing is ever left to finish."""

    def _submit(self, run: Callable[[], None], *, label: str, n_bytes: int = 0) -> None:
        self.drain_host()
        start_us = now_us()
        try:
            run()
        except Exception as error:
            error.add_note(f"in {label} on {self.device}/{self.lane}")
            self._error = error
            raise
        self._owner.trace.note(self._owner.counters, Span(self.lane, label, start_us, now_us(), n_bytes))


def anonymous_memory(n_bytes: int) -> torch.Tensor:
    """uint8 [n_bytes], in huge pages where it is large enough and the kernel has them. `OutOfMemory`."""
    if n_bytes < HUGE_PAGE_BYTES:
        return new_memory((n_bytes,), torch.uint8)
    n_pages = -(-n_bytes // HUGE_PAGE_BYTES)  # whole ones: the kernel lets such areas begin with one
    try:
        area = mmap.mmap(-1, n_pages * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise OutOfMemory(f"cpu: {n_bytes} bytes of host memory cannot be had: {error.strerror}") from None
    with suppress(OSError, AttributeError):
        area.madvise(mmap.MADV_HUGEPAGE)
    with torch.inference_mode(False):
        return torch.frombuffer(area, dtype=torch.uint8)[:n_bytes]


class SharedPages:
    """Huge pages for what is too small to fill any alone. An area lasts until nothing in it is in use."""

    def __init__(self) -> None:
        self._rest = new_memory((0,), torch.uint8)
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes], aligned to 64 bytes. `OutOfMemory`."""
        n_taken = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if n_taken > len(self._rest):
                self._rest = anonymous_memory(_AREA_BYTES)
            taken, self._rest = self._rest[:n_bytes], self._rest[n_taken:]
        return taken


class CpuDevice(BackendDevice, HostDevice):
    """The host. `cap_bytes` limits what it allocates; None: what the machine and its control groups allow.

    `thread_init` runs on each worker before its first work; streams that compute in place have no use for it.
    `pinned_memory` makes uint8 memory [n_bytes] that the accelerators beside it can copy from asynchronously.
    """

    def __init__(
        self,
        *,
        is_asynchronous: bool,
        cap_bytes: int | None = None,
        thread_init: Callable[[], None] | None = None,
        pinned_memory: Callable[[int], torch.Tensor] = anonymous_memory,
    ) -> None:
        space = host_space() if cap_bytes is None else capped_space(cap_bytes)
        super().__init__("cpu", ledger=Ledger("cpu", space))
        self._is_asynchronous = is_asynchronous
        self._thread_init = thread_init
        self._pinned_memory = pinned_memory
        self._shared_pages = SharedPages()

    def _open_stream(self, lane: Lane) -> BackendStream:
        if self._is_asynchronous:
            return WorkerStream(self, lane, thread_init=self._thread_init)
        return InlineStream(self, lane)

    def feeder(self, i_accelerator: int) -> BackendStream:
        return self._opened(i_accelerator, partial(self._open_feeder, i_accelerator))

    def _open_feeder(self, number: int) -> BackendStream:
        if self._is_asynchronous:
            return WorkerStream(self, Lane.UPLOAD, number=number, thread_init=self._thread_init)
        return InlineStream(self, Lane.UPLOAD)

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        n_bytes = size_in_bytes(shape, dtype)
        make = self._shared_pages.take if _SHARING_BYTES <= n_bytes < _LARGE_BYTES else anonymous_memory
        with torch.inference_mode(False):
            return make(n_bytes).view(dtype).view(shape)

    def allocate_pinned(self, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> Buffer:
        make = partial(self._pinned_memory, n_bytes)
        return self._account(make, n_bytes, kind=kind, name=name, is_pinned=True)

    def wrap(self, tensor: torch.Tensor, *, name: str) -> Buffer:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name}: only contiguous host memory can be wrapped")
        return self._make_buffer(tensor, kind=MemoryKind.WEIGHTS, name=name, is_pinned=False)
