"""From a job to a response: whole, or as a stream of events, in an endpoint's format."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from overspill.server.errors import as_api_error
from overspill.server.fields import SamplingFields
from overspill.server.formats import Format
from overspill.server.generation import Generation, Job, Progress, Update
from overspill.server.host import Host
from overspill.server.settings import ServerSettings
from overspill.server.sse import DONE, EventResponse, event, unless_gone
from overspill.server.strict_json import Json

_log = logging.getLogger(__name__)


async def answer(
    request: Request, host: Host, settings: ServerSettings, body: SamplingFields, job: Job, form: Format
) -> Response:
    """The answer to a request for text, streamed or whole. Submits the job before anything is sent."""
    generation = Generation(host, job)
    if body.stream:
        ping_s = body.sse_ping_interval if body.sse_ping_interval > 0 else settings.ping_s
        return EventResponse(_events(generation, form), ping_s=ping_s, on_end=generation.close)
    try:
        return Json(form.whole(await unless_gone(request, generation.finish())))
    finally:
        generation.close()


async def _events(generation: Generation, form: Format) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(generation.updates()) as updates:
            async for update in updates:
                for value in _values(form, update):
                    yield _event(form, value)
        for value in form.closing(generation.answers):
            yield _event(form, value)
    except Exception as error:
        known = as_api_error(error)
        if known.code == 500:
            _log.error("a stream failed", exc_info=error)
        yield _event(form, form.error(known))
        return
    if form.marks_end:
        yield DONE


def _values(form: Format, update: Update) -> list[dict[str, Any]]:
    answer, news = update
    if isinstance(news, Progress):
        return form.progress(answer, news)
    return form.piece(answer, news) if answer.done is None else form.end(answer, news)


def _event(form: Format, value: dict[str, Any]) -> bytes:
    return event(value, str(value["type"]) if form.names_events else None)
