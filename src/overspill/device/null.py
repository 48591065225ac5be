"""Devices that execute nothing and write down every verb, for proofs and counts without work.

All null devices of one run share a log, in the order of issue; `hazard.check` reads it. Memory is torch's `meta`: it
has shape, dtype and a place in the ledger, and no bytes. Counters count as on real devices; nothing is ever busy.

An event is done for the host once the host has waited for it, or for a later one of its stream: otherwise asking would
order accesses that nothing orders on a real device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

import torch

from overspill.device.backend import (
    BackendDevice,
    BackendStream,
    WorkRecording,
    check_copy,
    check_upload,
    count_copy,
    new_memory,
    stream_name,
)
from overspill.device.base import Buffer, Devices, Event, HostDevice, MemoryKind, Part, Recording
from overspill.device.hazard import HOST, Entry, Verb
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, capped_space


class NullLog:
    """The verbs of all null devices of one run, in the order of issue."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._event_numbers = count()

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def next_event(self) -> int:
        return next(self._event_numbers)


class NullEvent(Event):
    def __init__(self, stream: NullStream, number: int) -> None:
        self._stream = stream
        self.number = number

    def is_done(self) -> bool:
        return self.number <= self._stream.last_waited

    def wait_host(self) -> None:
        self._stream.device.counters.n_host_waits += 1
        self._stream.wait_on_host(self.number)

    def wait_in_worker(self) -> None:
        raise RuntimeError("null devices have no worker threads")


class NullStream(BackendStream):
    """Writes down what it is given."""

    def __init__(self, device: NullBackend, lane: Lane, *, number: int | None = None) -> None:
        super().__init__(device, lane)
        self._log = device.log
        self._name = stream_name(device, lane, number)
        self.last_waited = -1

    def launch(
        self,
        work: Callable[[], None],
        *,
        label: str,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        self._add(Verb.LAUNCH, label, reads=tuple(reads), writes=tuple(writes))

    def replay(
        self, recording: Recording, *, label: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        self._add(Verb.LAUNCH, label, reads=tuple(reads), writes=tuple(writes))

    def copy(
        self, dst: Buffer, src: Buffer, *, n_bytes: int, label: str, dst_offset: int = 0, src_offset: int = 0
    ) -> None:
        part = Part(src, src_offset, dst_offset, n_bytes)
        check_copy(self.device, dst, part)
        count_copy(self.device.counters, dst, part)
        self._add(Verb.COPY, label, reads=(src,), writes=(dst,), n_bytes=n_bytes)

    def upload(self, dst: Buffer, parts: Sequence[Part], *, label: str) -> None:
        check_upload(self.device, dst, parts)
        n_bytes = sum(part.n_bytes for part in parts)
        self.device.counters.uploaded_bytes += n_bytes
        sources = tuple(dict.fromkeys(part.src for part in parts))
        self._add(Verb.UPLOAD, label, reads=sources, writes=(dst,), n_bytes=n_bytes)

    def record(self) -> NullEvent:
        event = NullEvent(self, self._log.next_event())
        self._log.add(Entry(verb=Verb.RECORD, stream=self._name, event=event.number))
        return event

    def wait(self, event: Event) -> None:
        if not isinstance(event, NullEvent):
            raise TypeError(f"{self._name} cannot wait for an event of another back end")
        self._log.add(Entry(verb=Verb.WAIT, stream=self._name, event=event.number))

    def drain_host(self) -> None:
        self.wait_on_host(self.record().number)

    def wait_on_host(self, event_number: int) -> None:
        self.last_waited = max(self.last_waited, event_number)
        self._log.add(Entry(verb=Verb.WAIT_HOST, stream=HOST, event=event_number))

    def close(self) -> None:
        """Nothing is ever left to finish."""

    def _add(
        self, verb: Verb, label: str, *, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...], n_bytes: int = 0
    ) -> None:
        self._log.add(Entry(verb=verb, stream=self._name, label=label, reads=reads, writes=writes, n_bytes=n_bytes))


class NullBackend(BackendDevice):
    """What null accelerators and their host have in common."""

    def __init__(self, name: str, *, log: NullLog, total_bytes: int) -> None:
        super().__init__(name, ledger=Ledger(name, capped_space(total_bytes)), torch_device="meta")
        self.log = log

    def _open_stream(self, lane: Lane) -> NullStream:
        return NullStream(self, lane)

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return new_memory(shape, dtype, device="meta")


class NullDevice(NullBackend):
    is_host = False
    can_record = True

    def __init__(self, index: int, *, log: NullLog, total_bytes: int) -> None:
        super().__init__(f"null:{index}", log=log, total_bytes=total_bytes)

    def record(self, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> WorkRecording:
        return WorkRecording(works, kept)


class NullHostBuffer(Buffer):
    """Host memory that writes down when the host reaches for it: counted as a write, since it may be one."""

    __slots__ = ("_log",)

    def __init__(self, device: NullHost, tensor: torch.Tensor, *, kind: MemoryKind, name: str, is_pinned: bool) -> None:
        super().__init__(device, tensor, kind=kind, name=name, is_pinned=is_pinned)
        self._log = device.log

    @property
    def host_tensor(self) -> torch.Tensor:
        self._log.add(Entry(verb=Verb.TOUCH_HOST, stream=HOST, label=self.name, writes=(self,)))
        return self.raw()


class NullHost(NullBackend, HostDevice):
    def __init__(self, *, log: NullLog, total_bytes: int) -> None:
        super().__init__("null:host", log=log, total_bytes=total_bytes)

    def _make_buffer(self, tensor: torch.Tensor, *, kind: MemoryKind, name: str, is_pinned: bool) -> Buffer:
        return NullHostBuffer(self, tensor, kind=kind, name=name, is_pinned=is_pinned)

    def allocate_pinned(self, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> Buffer:
        make = partial(self._new_tensor, (n_bytes,), torch.uint8)
        return self._account(make, n_bytes, kind=kind, name=name, is_pinned=True)

    def feeder(self, i_accelerator: int) -> BackendStream:
        return self._opened(i_accelerator, partial(NullStream, self, Lane.UPLOAD, number=i_accelerator))

    def wrap(self, tensor: torch.Tensor, *, name: str) -> Buffer:
        return self._make_buffer(tensor, kind=MemoryKind.WEIGHTS, name=name, is_pinned=False)


def open_null(device_bytes: Sequence[int], *, host_bytes: int) -> tuple[Devices, NullLog]:
    """Null accelerators of these capacities, their host, and the log they share."""
    log = NullLog()
    accelerators = tuple(NullDevice(i, log=log, total_bytes=n) for i, n in enumerate(device_bytes))
    return Devices(accelerators, NullHost(log=log, total_bytes=host_bytes)), log
