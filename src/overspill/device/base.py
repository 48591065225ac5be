"""What the runner drives: devices, their streams, events, and buffers.

The model of a device is CUDA's. Work given to a stream runs in the order it was given; streams of one device and of
different devices run at the same time unless an event orders them. `Event` has CUDA's meaning: waiting on an event
waits for what its stream had been given when the event was last recorded; a later record does not move a wait that
was already issued.

A `Buffer` is the unit of hazard tracking: whoever launches work names the buffers the work reads and writes, and
back ends that can check (null, virtual) hold the work to it. A buffer yields its tensor only to work that runs on
the buffer's own device; bytes cross devices through `Stream.copy` alone. Buffers that streams share are allocated
once, before the first request, and live as long as the device.

Invariants a back end keeps:
- `launch`, `copy`, `record`, `wait` return at once (the `cpu` device alone computes in place);
- only functions with `_host` in their name block the calling thread (and `Event.wait_in_worker`, which worker
  threads alone call);
- an error inside a stream is sticky: it is raised by the next call that blocks, and by every one after it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch

from overspill.device.lane import Lane


class MemoryKind(StrEnum):
    """What a device's bytes are for: the columns of `overspill plan`."""

    WEIGHTS = "weights"
    KV = "kv"
    COMPUTE = "compute"
    STAGING = "staging"
    CACHE = "cache"


class Part(NamedTuple):
    """One contiguous range of an upload: `n_bytes` from `src` at `src_offset` to the target at `dst_offset`."""

    src: Buffer
    src_offset: int
    dst_offset: int
    n_bytes: int


class Span(NamedTuple):
    """A finished piece of stream work, for the trace. Times in microseconds of the host's monotonic clock."""

    lane: Lane
    label: str
    start_us: float
    end_us: float
    n_bytes: int


@dataclass(slots=True)
class DeviceCounters:
    """What a device has done since it was opened; `Device.reset_counters` starts again (memory excepted)."""

    n_allocations: int = 0
    n_device_syncs: int = 0
    n_host_waits: int = 0
    uploaded_bytes: int = 0
    handed_off_bytes: int = 0
    downloaded_bytes: int = 0
    busy_us: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))


class _RunningOn(threading.local):
    """What the calling thread runs."""

    device: Device | None = None
    only: Collection[Buffer] | None = None


_running_on = _RunningOn()


def device_of_this_work() -> Device | None:
    """The device whose work the calling thread is running, None outside `Stream.launch`."""
    return _running_on.device


class running_on:  # noqa: N801  (a context manager, written out because every launch enters one)
    """Mark the calling thread as running work of `device` (back ends wrap each launch in it).

    `only`: the buffers this work has named; touching another one that is not a weight is `UndeclaredAccess`.
    None: the back end does not check.
    """

    __slots__ = ("_before", "_now")

    def __init__(self, device: Device, *, only: Collection[Buffer] | None = None) -> None:
        self._now = device, only

    def __enter__(self) -> None:
        self._before = _running_on.device, _running_on.only
        _running_on.device, _running_on.only = self._now

    def __exit__(self, *error: object) -> None:
        _running_on.device, _running_on.only = self._before


class WrongDevice(RuntimeError):
    """Work touched memory of another device: a fault in the pipeline, never the user's."""


class UndeclaredAccess(RuntimeError):
    """Work touched memory that its launch did not name, or wrote what it named as read: a fault in the pipeline."""


class Buffer:
    """Memory of one device with a fixed shape and dtype.

    `tensor` is for work running on the device; `host_tensor` for host code, and only host buffers have one.
    """

    __slots__ = ("_bytes", "_tensor", "device", "is_pinned", "kind", "n_bytes", "name")

    def __init__(
        self, device: Device, tensor: torch.Tensor, *, kind: MemoryKind, name: str, is_pinned: bool = False
    ) -> None:
        self.device = device
        self._tensor = tensor
        self.kind = kind
        self.name = name
        self.is_pinned = is_pinned
        self.n_bytes = tensor.numel() * tensor.element_size()
        self._bytes: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory itself, for work that runs on this buffer's device; `WrongDevice` for anyone else.

        Raises `UndeclaredAccess` where the back end checks and the work has not named this buffer (see `running_on`).
        """
        if _running_on.device is not self.device:
            raise WrongDevice(f"{self} read by work of {_running_on.device}")
        only = _running_on.only
        if only is not None and self not in only and self.kind is not MemoryKind.WEIGHTS:
            raise UndeclaredAccess(f"{self} touched by work whose launch does not name it")
        return self._tensor

    @property
    def host_tensor(self) -> torch.Tensor:
        """The memory of a host buffer, for host code; the caller orders itself against streams with events."""
        if not self.device.is_host:
            raise WrongDevice(f"{self} read by the host")
        return self._tensor

    def raw(self) -> torch.Tensor:
        """The memory without the check; for back ends only."""
        return self._tensor

    def raw_bytes(self) -> torch.Tensor:
        """`raw` as uint8 `[n_bytes]`."""
        if self._bytes is None:
            self._bytes = self._tensor.reshape(-1).view(torch.uint8)
        return self._bytes

    def __repr__(self) -> str:
        return f"Buffer({self.name}, {self.device.name}, {tuple(self._tensor.shape)})"


class Event(ABC):
    """A point in a stream (CUDA semantics, see the module's text)."""

    @abstractmethod
    def is_done(self) -> bool:
        """True when all work before the recorded point has finished; never blocks."""

    @abstractmethod
    def wait_host(self) -> None:
        """Block the calling thread until the recorded point is reached; raises the stream's sticky error."""

    @abstractmethod
    def wait_in_worker(self) -> None:
        """For the worker thread of another stream that waits on this event: blocks it, counted nowhere.

        Raises the stream's error if it came before the recorded point, so that a failure reaches whoever needs it.
        """


class CannotRecord(RuntimeError):
    """Work does something that no recording can hold, such as waiting for the device."""


class Recording:
    """Work of one device that can be run again with one call: the same kernels on the same memory.

    kept: what that memory belongs to; it lives as long as this.
    """

    def __init__(self, kept: Sequence[object]) -> None:
        self._kept = kept


class Stream(ABC):
    """A queue of work of one device."""

    def __init__(self, device: Device, lane: Lane) -> None:
        self.device = device
        self.lane = lane

    @abstractmethod
    def launch(
        self,
        work: Callable[[], None],
        *,
        label: str,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        """Run `work` in stream order. It may touch the named buffers (and the device's own weights) only."""

    @abstractmethod
    def copy(
        self, dst: Buffer, src: Buffer, *, n_bytes: int, label: str, dst_offset: int = 0, src_offset: int = 0
    ) -> None:
        """Copy `n_bytes` of `src` from `src_offset` on into `dst`, whatever devices they are on, in stream order."""

    @abstractmethod
    def upload(self, dst: Buffer, parts: Sequence[Part], *, label: str) -> None:
        """Copy byte ranges of pinned host buffers into `dst` (uint8), in stream order. Unpinned sources raise."""

    def replay(
        self, recording: Recording, *, label: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Run recorded work of this stream's device in stream order, see `launch` (only where `Device.can_record`)."""
        raise NotImplementedError(f"{self.device} records nothing")

    @abstractmethod
    def record(self) -> Event:
        """An event at the present end of the stream."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work given to this stream from now on starts after `event`; the host does not wait."""

    @abstractmethod
    def synchronize_host(self) -> None:
        """Block until the stream is empty; counts as a device synchronisation."""


class Device(ABC):
    """A place that holds memory and runs work: `cpu`, `virtual:i`, `null:i`, `cuda:i`."""

    name: str
    is_host: bool
    torch_device: torch.device
    counters: DeviceCounters
    can_record = False

    @property
    def description(self) -> str:
        """What it is, to know the same hardware again: kind and link."""
        return self.name.partition(":")[0]

    @property
    @abstractmethod
    def total_bytes(self) -> int:
        """Capacity: the cap given by the user, or the device's own size."""

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """What can still be allocated."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> dict[MemoryKind, int]:
        """Bytes held now, by kind."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Highest sum of bytes held at once."""

    @abstractmethod
    def stream(self, lane: Lane) -> Stream:
        """The device's stream of that lane (the same object each time)."""

    def record(self, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> Recording:
        """Record pieces of work, in order, without running them, to be replayed on the stream for computing.

        Their kernels must have run before, on that stream. Only where `can_record`. `CannotRecord`.
        """
        raise NotImplementedError(f"{self} records nothing")

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *, kind: MemoryKind, name: str) -> Buffer:
        """New uninitialised memory (poisoned where the back end can). `OutOfMemory` when it does not fit."""

    @abstractmethod
    def free(self, buffer: Buffer) -> None:
        """Give memory back; the caller has made sure that no stream still uses it."""

    @abstractmethod
    def start_trace(self) -> None:
        """Keep a `Span` for each piece of work from now on."""

    @abstractmethod
    def take_trace(self) -> list[Span]:
        """The spans of finished work since `start_trace`, and keep no more."""

    @abstractmethod
    def synchronize_host(self) -> None:
        """Block until all streams are empty; counted in `n_device_syncs`; raises a sticky error."""

    @abstractmethod
    def close(self) -> None:
        """Finish and end all streams; idempotent."""

    def settle_host(self) -> None:  # noqa: B027
        """Before counters are read: wait for work whose times are measured on the device. Nothing elsewhere."""

    def reset_counters(self) -> None:
        """Start counting again."""
        self.counters = DeviceCounters()

    def __repr__(self) -> str:
        return self.name


class HostDevice(Device):
    """The host as a device: weights in place, CPU compute, and the pinned memory that uploads read from."""

    is_host = True

    @abstractmethod
    def allocate_pinned(self, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> Buffer:
        """uint8 host memory that accelerators can copy from asynchronously."""

    @abstractmethod
    def feeder(self, i_accelerator: int) -> Stream:
        """The stream that brings host memory into reach of an accelerator, by its number (the same object each time).

        Each has its own, so that one whose staging memory is full keeps no other waiting.
        """

    @abstractmethod
    def wrap(self, tensor: torch.Tensor, *, name: str) -> Buffer:
        """Existing host memory (a file's mapping) as an unpinned buffer; not counted as an allocation."""


@dataclass(frozen=True)
class Devices:
    """The devices of one run: the accelerators in pipeline order, and the host."""

    accelerators: tuple[Device, ...]
    host: HostDevice

    @property
    def all(self) -> tuple[Device, ...]:
        """Accelerators first, the host last: the order in which plans number devices."""
        return (*self.accelerators, self.host)

    def close(self) -> None:
        for device in self.all:
            device.close()
