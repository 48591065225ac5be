"""Which earlier work a piece of work must wait for.

The ledger sees every action in issue order with the resources it reads and writes, and answers with the actions on
other streams that must have finished first: the last writer of what is read (read after write), and the last writer
and all readers since of what is written (write after write, write after read). Order within one stream is free.
The runner turns the answers into event waits, the simulator into start times; nobody writes a wait by hand, so none
can be forgotten. What an action *says* it touches is checked by the virtual and null devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from overspill.device.lane import Lane

Resource = tuple[str | int, ...]


class StreamId(NamedTuple):
    """A stream of a plan: device number and lane."""

    device: int
    lane: Lane


@dataclass(slots=True)
class _Use:
    writer: tuple[StreamId, int] | None = None
    readers: dict[StreamId, int] = field(default_factory=dict)


class Ledger:
    """Uses of resources so far. Action numbers grow in issue order."""

    def __init__(self) -> None:
        self._uses: dict[Resource, _Use] = {}

    def add(
        self, number: int, stream: StreamId, reads: Iterable[Resource], writes: Iterable[Resource]
    ) -> dict[StreamId, int]:
        """Enter an action; returns, per other stream, the last action on it that this one must wait for."""
        waits: dict[StreamId, int] = {}
        for resource in reads:
            use = self._use(resource)
            if use.writer is not None:
                _need(waits, stream, *use.writer)
            use.readers[stream] = number
        for resource in writes:
            use = self._use(resource)
            if use.writer is not None:
                _need(waits, stream, *use.writer)
            for reader, last in use.readers.items():
                _need(waits, stream, reader, last)
            use.writer = (stream, number)
            use.readers.clear()
        return waits

    def _use(self, resource: Resource) -> _Use:
        use = self._uses.get(resource)
        if use is None:
            use = self._uses[resource] = _Use()
        return use

    def users(self, resource: Resource) -> list[int]:
        """Numbers of the actions that the host must wait for before it touches the resource itself."""
        use = self._uses.get(resource, _Use())
        return [*use.readers.values(), *([use.writer[1]] if use.writer else [])]

    def live(self) -> set[int]:
        """Numbers that a later action may still have to wait for."""
        return {number for resource in self._uses for number in self.users(resource)}


def _need(waits: dict[StreamId, int], stream: StreamId, other: StreamId, number: int) -> None:
    if other != stream and waits.get(other, -1) < number:
        waits[other] = number
