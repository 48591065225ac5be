"""Text to tokens and back, and requests for text."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from overspill.server.access import HostOf, SettingsOf, body_of, described
from overspill.server.answering import answer
from overspill.server.fields import ChatBody, DetokenizeBody, NativeBody, TextBody, TokenizeBody
from overspill.server.jobs import chat_job, prompt_job, refuse_unserved
from overspill.server.native import NativeFormat
from overspill.server.openai_chat import ChatFormat
from overspill.server.openai_text import TextFormat
from overspill.server.prompts import chat_segments, checked_id, mixed_ids
from overspill.server.strict_json import Json

router = APIRouter()


@router.post("/tokenize", openapi_extra=described(TokenizeBody))
async def tokenize(host: HostOf, body: Annotated[TokenizeBody, Depends(body_of(TokenizeBody))]) -> Response:
    """Ids of a text, or of texts and ids in a row."""
    tokenizer = host.llm.tokenizer
    content = body.content if isinstance(body.content, str | list) else [body.content]
    ids = await asyncio.to_thread(
        mixed_ids,
        tokenizer,
        content,
        field="content",
        add_special=body.add_special,
        parse_special=body.parse_special,
    )
    if not body.with_pieces:
        return Json({"tokens": ids})
    return Json({"tokens": [{"id": i, "piece": _piece(tokenizer.piece(i, special=True))} for i in ids]})


@router.post("/detokenize", openapi_extra=described(DetokenizeBody))
async def detokenize(host: HostOf, body: Annotated[DetokenizeBody, Depends(body_of(DetokenizeBody))]) -> Response:
    """The text of ids, special tokens shown."""
    tokenizer = host.llm.tokenizer
    ids = [checked_id(tokenizer, i, "tokens") for i in body.tokens]
    return Json({"content": tokenizer.decode(ids, skip_special=False)})


@router.post("/apply-template", openapi_extra=described(ChatBody))
async def apply_template(host: HostOf, body: Annotated[ChatBody, Depends(body_of(ChatBody))]) -> Response:
    """The prompt that a conversation becomes."""
    refuse_unserved(host, body)
    segments = await asyncio.to_thread(chat_segments, host.llm.tokenizer, host.template, body)
    return Json({"prompt": "".join(segment.text for segment in segments)})


@router.post("/v1/chat/completions/input_tokens", openapi_extra=described(ChatBody))
@router.post("/chat/completions/input_tokens", openapi_extra=described(ChatBody))
async def input_tokens(host: HostOf, body: Annotated[ChatBody, Depends(body_of(ChatBody))]) -> Response:
    """How many tokens a conversation has."""
    job, _ = await asyncio.to_thread(chat_job, host, body)
    return Json({"input_tokens": len(job.prompts[0]), "object": "response.input_tokens"})


@router.post("/completion", openapi_extra=described(NativeBody))
@router.post("/completions", openapi_extra=described(NativeBody))
async def completion(
    request: Request,
    host: HostOf,
    settings: SettingsOf,
    body: Annotated[NativeBody, Depends(body_of(NativeBody))],
) -> Response:
    """Continue prompts, in llama-server's own format."""
    n_probs = body.n_probs or None
    job = await asyncio.to_thread(prompt_job, host, body, body.prompt, n_probs)
    return await answer(request, host, settings, body, job, NativeFormat(body, job, host.llm.tokenizer, host.name))


@router.post("/v1/completions", openapi_extra=described(TextBody))
async def text_completion(
    request: Request,
    host: HostOf,
    settings: SettingsOf,
    body: Annotated[TextBody, Depends(body_of(TextBody))],
) -> Response:
    """Continue prompts, in OpenAI's format."""
    job = await asyncio.to_thread(prompt_job, host, body, body.prompt, body.listed)
    return await answer(request, host, settings, body, job, TextFormat(body, job, host.llm.tokenizer, host.name))


@router.post("/v1/chat/completions", openapi_extra=described(ChatBody))
@router.post("/chat/completions", openapi_extra=described(ChatBody))
async def chat_completion(
    request: Request,
    host: HostOf,
    settings: SettingsOf,
    body: Annotated[ChatBody, Depends(body_of(ChatBody))],
) -> Response:
    """The next message of a conversation."""
    job, make_reader = await asyncio.to_thread(chat_job, host, body)
    return await answer(request, host, settings, body, job, ChatFormat(body, job, make_reader, host.name))


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
