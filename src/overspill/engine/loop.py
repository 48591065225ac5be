"""The engine in a thread of its own, and a stream of events for each request.

The thread steps while there is work and sleeps otherwise. Whatever happens, a stream ends: with its request's
`DoneEvent`, or, if the engine itself breaks, with one that says so. Locks are never taken in `cancel`, so that a stream
which is merely forgotten can cancel its request from wherever the garbage collector finds it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from types import TracebackType

from overspill.engine.engine import Engine
from overspill.engine.request import DoneEvent, Event, Request

_log = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The loop takes no requests any more: it was closed, or the engine broke."""


class EventStream(Iterator[Event]):
    """The events of one request, the last one a `DoneEvent`. Closing it, or dropping it, cancels the request."""

    def __init__(self, loop: EngineLoop, request_id: str, events: SimpleQueue[Event]) -> None:
        self._loop = loop
        self._request_id = request_id
        self._events = events
        self._is_over = False

    def __next__(self) -> Event:
        event = self.poll()
        if event is None:
            raise StopIteration
        return event

    def poll(self, timeout_s: float | None = None) -> Event | None:
        """The next event; None if none came within timeout_s (None: wait for it) or the stream is over."""
        if self._is_over:
            return None
        try:
            event = self._events.get(timeout=timeout_s)
        except Empty:
            return None
        self._is_over = isinstance(event, DoneEvent)
        return event

    @property
    def is_over(self) -> bool:
        return self._is_over

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._loop.cancel(self._request_id)

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class EngineLoop:
    """Steps an engine in the background. Closing it (or leaving its `with`) cancels what is in flight."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._bell: SimpleQueue[None] = SimpleQueue()  # rings when there may be something new
        self._lock = threading.Lock()  # guards _streams and _stopped
        self._streams: dict[str, SimpleQueue[Event]] = {}
        self._stopped: str | None = None
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="overspill-engine", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether the engine raised what it should not have."""
        return self._is_broken

    def stream(self, request: Request) -> EventStream:
        """Submit a request now. Raises UserError if it cannot be served, EngineStopped if nothing can."""
        events: SimpleQueue[Event] = SimpleQueue()
        with self._lock:
            if self._stopped is not None:
                raise EngineStopped(self._stopped)
            self._engine.submit(request)
            self._streams[request.id] = events
        self._bell.put(None)
        return EventStream(self, request.id, events)

    def cancel(self, request_id: str) -> None:
        """End a request soon, from any thread; its stream ends with reason "cancelled"."""
        self._engine.cancel(request_id)
        self._bell.put(None)

    def drain(self) -> None:
        """Take no new requests, finish those in flight, end the thread."""
        self._stop("the engine is shutting down")
        self._thread.join()

    def close(self) -> None:
        """Take no new requests, cancel those in flight, end the thread. May be called twice."""
        for request_id in self._stop("the engine is shut down"):
            self.cancel(request_id)
        self._thread.join()

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stop(self, why: str) -> list[str]:
        """Close the door and say who is inside."""
        with self._lock:
            self._stopped = self._stopped or why
            inside = list(self._streams)
        self._bell.put(None)
        return inside

    # --- the thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._deliver(self._engine.step())
        except Exception as error:
            _log.error("the engine broke", exc_info=error)
            self._break(f"the engine broke: {type(error).__name__}: {error}".splitlines()[0])

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; False when the loop is to end."""
        while True:
            is_stopping = self._stopped is not None  # read first: nothing is submitted once it is set
            if self._engine.has_work:
                return True
            if is_stopping:
                return False
            self._bell.get()

    def _deliver(self, events: list[Event]) -> None:
        with self._lock:
            for event in events:
                self._streams[event.request_id].put(event)
                if isinstance(event, DoneEvent):
                    del self._streams[event.request_id]

    def _break(self, message: str) -> None:
        self._is_broken = True
        self._stop(message)
        with self._lock:
            for request_id, events in self._streams.items():
                events.put(DoneEvent(request_id, "error", n_prompt=0, n_generated=0, message=message))
