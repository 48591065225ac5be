"""The host as a device: its memory holds what the accelerators do not, and the CPU computes on it.

Alone (`--devices cpu`) its streams compute in place, on the thread that issues; beside accelerators its streams are
workers, so that the thread that issues for all devices never computes.

Pinned memory comes from whoever knows the accelerators: without CUDA any memory will do, and counts as pinned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from overspill.device.backend import BackendDevice, BackendStream, HostMemoryStream, new_memory, now_us
from overspill.device.base import Buffer, Event, HostDevice, MemoryKind, Span
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, capped_space, host_space
from overspill.device.worker import WorkerStream


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


def pageable_memory(n_bytes: int) -> torch.Tensor:
    """uint8 [n_bytes] that stands for pinned memory where no accelerator asks for more."""
    return new_memory((n_bytes,), torch.uint8)


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
        pinned_memory: Callable[[int], torch.Tensor] = pageable_memory,
    ) -> None:
        space = host_space() if cap_bytes is None else capped_space(cap_bytes)
        super().__init__("cpu", ledger=Ledger("cpu", space))
        self._is_asynchronous = is_asynchronous
        self._thread_init = thread_init
        self._pinned_memory = pinned_memory

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
        return new_memory(shape, dtype)

    def allocate_pinned(self, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> Buffer:
        make = partial(self._pinned_memory, n_bytes)
        return self._account(make, n_bytes, kind=kind, name=name, is_pinned=True)

    def wrap(self, tensor: torch.Tensor, *, name: str) -> Buffer:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name}: only contiguous host memory can be wrapped")
        return self._make_buffer(tensor, kind=MemoryKind.WEIGHTS, name=name, is_pinned=False)
