"""A stream that is a thread with a queue: the asynchronous host and the virtual devices run on it.

An event is a number: the count of items its stream had been given when it was recorded. It has fired when the stream
has finished that many. So recording costs nothing, a later record cannot move an earlier event, and waiting means
waiting for a count.

A failure is sticky: the stream skips what was and will be given to it but goes on counting, so that nobody who waits
for it hangs. The error is raised by every call that blocks the host on this stream, and it passes to each stream that
waits for an event recorded after it, so that it reaches whoever reads the result. Which streams fail does therefore
not depend on timing.

Invariants: a stream is issued to from one thread at a time; its work runs on its own thread, in order, marked with
`running_on`; times and spans of an item are noted before its event fires.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple

from overspill.device.backend import BackendDevice, HostMemoryStream, now_us, stream_name
from overspill.device.base import Event, Span
from overspill.device.lane import Lane


class _Work(NamedTuple):
    run: Callable[[], None]
    label: str
    n_bytes: int


class _Wait(NamedTuple):
    event: Event


class WorkerEvent(Event):
    """The point of a worker stream at which it has finished `n_items`."""

    def __init__(self, stream: WorkerStream, n_items: int) -> None:
        self._stream = stream
        self._n_items = n_items

    def is_done(self) -> bool:
        return self._stream.has_finished(self._n_items)

    def wait_host(self) -> None:
        self._stream.device.counters.n_host_waits += 1
        self._stream.wait_until_finished(self._n_items)
        self._stream.raise_failure()

    def wait_in_worker(self) -> None:
        self._stream.wait_until_finished(self._n_items)
        self._stream.raise_failure(within=self._n_items)


class _Failure(NamedTuple):
    """The first error of a stream, its traceback as it was then, and the number of the item that failed."""

    error: BaseException
    traceback: TracebackType | None
    i_item: int


class WorkerStream(HostMemoryStream):
    """A queue of work and the thread that runs it. `thread_init` runs on that thread before anything else.

    number: of a feeder, see `HostDevice.feeder`.
    """

    def __init__(
        self,
        device: BackendDevice,
        lane: Lane,
        *,
        number: int | None = None,
        thread_init: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(device, lane)
        self._owner = device
        self._thread_init = thread_init
        self._queue: SimpleQueue[_Work | _Wait | None] = SimpleQueue()
        self._n_issued = 0
        self._n_finished = 0
        self._finished = threading.Condition(threading.Lock())
        self._failure: _Failure | None = None
        self._is_closed = False
        # A daemon, so that an interpreter that was interrupted can end without closing its devices.
        self._thread = threading.Thread(target=self._run_queue, name=stream_name(device, lane, number), daemon=True)
        self._thread.start()

    def record(self) -> WorkerEvent:
        return WorkerEvent(self, self._n_issued)

    def wait(self, event: Event) -> None:
        self._put(_Wait(event))

    def drain_host(self) -> None:
        self.wait_until_finished(self._n_issued)
        self.raise_failure()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)
        self._thread.join()

    def has_finished(self, n_items: int) -> bool:
        return self._n_finished >= n_items

    def wait_until_finished(self, n_items: int) -> None:
        """Block the calling thread until the stream has finished (or, after a failure, skipped) `n_items`."""
        if self._n_finished >= n_items:
            return
        with self._finished:
            self._finished.wait_for(lambda: self._n_finished >= n_items)

    def raise_failure(self, *, within: int | None = None) -> None:
        """Raise the stream's error, if there is one; `within` asks about the first so many items only."""
        failure = self._failure
        if failure is not None and (within is None or failure.i_item < within):
            raise failure.error.with_traceback(failure.traceback)

    def _submit(self, run: Callable[[], None], *, label: str, n_bytes: int = 0) -> None:
        self._put(_Work(run, label, n_bytes))

    def _put(self, item: _Work | _Wait) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self._thread.name} is closed")
        self._n_issued += 1
        self._queue.put(item)

    def _run_queue(self) -> None:
        if self._thread_init is not None:
            self._attempt(self._thread_init, i_item=-1)
        while (item := self._queue.get()) is not None:
            if self._failure is None:
                self._attempt(partial(self._do, item), i_item=self._n_finished)
            # A finished item must not keep buffers alive while the thread waits for the next one.
            del item
            with self._finished:
                self._n_finished += 1
                self._finished.notify_all()

    def _attempt(self, run: Callable[[], None], *, i_item: int) -> None:
        try:
            run()
        except BaseException as error:  # also SystemExit and the like: whoever waits must not hang
            self._failure = _Failure(error, error.__traceback__, i_item)

    def _do(self, item: _Work | _Wait) -> None:
        if isinstance(item, _Wait):
            item.event.wait_in_worker()
            return
        try:
            self._before(item.label)
            start_us = now_us()
            item.run()
        except BaseException as error:
            error.add_note(f"in {item.label} on {self._thread.name}")
            raise
        span = Span(self.lane, item.label, start_us, now_us(), item.n_bytes)
        self._owner.trace.note(self._owner.counters, span)

    def _before(self, label: str) -> None:
        """Called on the thread before each launch or copy, outside its busy time."""
