"""Proof that a schedule orders its accesses to memory, from the log of verbs that null devices keep.

Each stream, and the host, has a vector clock [i] = the last operation of stream i known to have finished before. An
event carries its stream's clock at the record; waiting joins it; whatever is issued also inherits what the host has
waited for. Two accesses to one buffer, one of them a write, on different streams, are in order when the later one's
clock has reached the earlier one's number (Lamport 1978, Fidge 1988). The host reaching for a host buffer counts as a
write of it.

It is enough to look at the last read and the last write of every stream: the earlier ones come before those. Checking
a log of n entries over s streams takes n * s steps per named buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from overspill.device.base import Buffer


class Verb(StrEnum):
    LAUNCH = "launch"
    COPY = "copy"
    UPLOAD = "upload"
    RECORD = "record"
    WAIT = "wait"
    WAIT_HOST = "wait_host"
    TOUCH_HOST = "touch_host"


HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verb. `stream` is `device/lane`, or `HOST` for what the issuing thread does; `event` a number of the log."""

    verb: Verb
    stream: str
    label: str = ""
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    event: int | None = None
    n_bytes: int = 0


class HazardKind(StrEnum):
    READ_AFTER_WRITE = "read after write"
    WRITE_AFTER_READ = "write after read"
    WRITE_AFTER_WRITE = "write after write"
    NEVER_WRITTEN = "read of what nobody wrote"


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two accesses (indices into the log) that no event orders, or a read (`i_later`) of what nobody wrote before."""

    kind: HazardKind
    buffer: Buffer
    i_earlier: int | None
    i_later: int
    message: str

    def __str__(self) -> str:
        return self.message


Clock = dict[str, int]


def _join(into: Clock, other: Clock) -> None:
    for stream, n in other.items():
        if n > into.get(stream, 0):
            into[stream] = n


@dataclass(slots=True)
class _Access:
    """The last read or write of a buffer by one stream: its number on the stream, and its index in the log."""

    n_on_stream: int
    i_entry: int


@dataclass(slots=True)
class _History:
    reads: dict[str, _Access] = field(default_factory=dict)
    writes: dict[str, _Access] = field(default_factory=dict)


class _Checker:
    def __init__(self, log: Sequence[Entry], preinitialised: Sequence[Buffer]) -> None:
        self._log = log
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._events: dict[int, Clock] = {}
        self._histories: dict[Buffer, _History] = {}
        self._initialised: set[Buffer] = set(preinitialised)

    def run(self) -> Iterator[Hazard]:
        for i_entry, entry in enumerate(self._log):
            clock = self._clocks.setdefault(entry.stream, {})
            _join(clock, self._clocks[HOST])
            if entry.verb is Verb.RECORD:
                self._events[_event_of(entry)] = dict(clock)
            elif entry.verb in (Verb.WAIT, Verb.WAIT_HOST):
                _join(clock, self._recorded(i_entry))
            else:
                clock[entry.stream] = clock.get(entry.stream, 0) + 1
                yield from self._access(i_entry, clock)

    def _recorded(self, i_entry: int) -> Clock:
        event = _event_of(self._log[i_entry])
        if event not in self._events:
            raise ValueError(f"log entry {i_entry} waits for event {event}, which this log does not record before")
        return self._events[event]

    def _access(self, i_entry: int, clock: Clock) -> Iterator[Hazard]:
        """Compare an entry's accesses with all earlier ones, then add them."""
        entry = self._log[i_entry]
        access = _Access(clock[entry.stream], i_entry)
        for buffer in entry.reads:
            history = self._histories.setdefault(buffer, _History())
            if buffer not in self._initialised:
                self._initialised.add(buffer)
                yield self._never_written(buffer, i_entry)
            yield from self._unordered(HazardKind.READ_AFTER_WRITE, buffer, history.writes, i_entry, clock)
        for buffer in entry.writes:
            history = self._histories.setdefault(buffer, _History())
            yield from self._unordered(HazardKind.WRITE_AFTER_READ, buffer, history.reads, i_entry, clock)
            yield from self._unordered(HazardKind.WRITE_AFTER_WRITE, buffer, history.writes, i_entry, clock)
        for buffer in entry.reads:
            self._histories[buffer].reads[entry.stream] = access
        for buffer in entry.writes:
            self._histories[buffer].writes[entry.stream] = access
            self._initialised.add(buffer)

    def _unordered(
        self, kind: HazardKind, buffer: Buffer, earlier: dict[str, _Access], i_entry: int, clock: Clock
    ) -> Iterator[Hazard]:
        for stream, access in earlier.items():
            if clock.get(stream, 0) < access.n_on_stream:
                verbs = f"{self._describe(i_entry)} is not ordered after {self._describe(access.i_entry)}"
                yield Hazard(kind, buffer, access.i_entry, i_entry, f"{kind} of {buffer}: {verbs}")

    def _never_written(self, buffer: Buffer, i_entry: int) -> Hazard:
        kind = HazardKind.NEVER_WRITTEN
        return Hazard(kind, buffer, None, i_entry, f"{kind}: {buffer}, by {self._describe(i_entry)}")

    def _describe(self, i_entry: int) -> str:
        entry = self._log[i_entry]
        return f"#{i_entry} {entry.verb} '{entry.label}' on {entry.stream}"


def _event_of(entry: Entry) -> int:
    assert entry.event is not None
    return entry.event


def check(log: Sequence[Entry], *, preinitialised: Sequence[Buffer] = ()) -> list[Hazard]:
    """Every conflict that nothing orders, in issue order; [] proves the schedule.

    `preinitialised`: buffers that hold their contents before the log begins (weights, an arena filled at load).
    Raises ValueError for a log that waits for an event it does not record: the log must be whole.
    """
    return list(_Checker(log, preinitialised).run())
