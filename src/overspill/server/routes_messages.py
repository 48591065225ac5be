"""Anthropic's endpoints, over the same chat."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from overspill.server.access import HostOf, SettingsOf, body_of, described
from overspill.server.answering import answer
from overspill.server.errors import ApiError
from overspill.server.jobs import chat_job
from overspill.server.messages_body import MessagesBody, chat_body
from overspill.server.messages_format import MessagesFormat
from overspill.server.strict_json import Json

router = APIRouter()


@router.post("/v1/messages", openapi_extra=described(MessagesBody))
async def messages(
    request: Request,
    host: HostOf,
    settings: SettingsOf,
    body: Annotated[MessagesBody, Depends(body_of(MessagesBody))],
) -> Response:
    """The next message of a conversation."""
    if body.max_tokens is None:
        raise ApiError(400, "Field 'max_tokens': it is missing, give the most tokens to generate")
    chat = chat_body(body, settings.defaults)
    job, make_reader = await asyncio.to_thread(chat_job, host, chat)
    return await answer(request, host, settings, chat, job, MessagesFormat(make_reader, host.name))


@router.post("/v1/messages/count_tokens", openapi_extra=described(MessagesBody))
async def count_tokens(
    host: HostOf, settings: SettingsOf, body: Annotated[MessagesBody, Depends(body_of(MessagesBody))]
) -> Response:
    """How many tokens a conversation has."""
    job, _ = await asyncio.to_thread(chat_job, host, chat_body(body, settings.defaults))
    return Json({"input_tokens": len(job.prompts[0])})
