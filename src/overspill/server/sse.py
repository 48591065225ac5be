"""Answers over time: server-sent events, and watching whether the client is still there.

Headers go out at once, before the prompt is computed, and silence is filled with comments, so that no client times
out. A client that hangs up is noticed without writing to it: what it asked for is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from overspill.server.errors import ClientGone
from overspill.server.strict_json import dump

T = TypeVar("T")

COMMENT = b":\n\n"
DONE = b"data: [DONE]\n\n"


def event(value: Any, name: str | None = None) -> bytes:
    """One event with a value as its data."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + dump(value) + b"\n\n"


class EventResponse(Response):
    """Events as they come, a comment after each `ping_s` seconds of silence.

    on_end: called in every case, when no more events are taken.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, ping_s: float, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._ping_s = ping_s
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send_all(send))
        except (ClientGone, OSError):
            return
        finally:
            self._on_end()
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"", "more_body": True})
        async for data in _with_pings(self._events, self._ping_s):
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; ClientGone as soon as the client hangs up, `work` being cancelled."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        for task in (worker, watcher):
            task.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """`until_gone` for a request whose body has been read."""
    return await until_gone(request.receive, work)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_pings(events: AsyncGenerator[bytes, None], ping_s: float) -> AsyncGenerator[bytes, None]:
    following: asyncio.Task[bytes] | None = None
    try:
        while True:
            following = following or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait({following}, timeout=ping_s)
            if not done:
                yield COMMENT
                continue
            try:
                data = following.result()
            except StopAsyncIteration:
                return
            following = None
            yield data
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)
