"""Text to tokens and back, and requests for text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from overspill.server.access import HostOf, SettingsOf, body_of, described
from overspill.server.errors import as_api_error
from overspill.server.fields import ChatBody, DetokenizeBody, NativeBody, SamplingFields, TextBody, TokenizeBody
from overspill.server.formats import Format
from overspill.server.generation import Generation, Job, Progress, Update
from overspill.server.host import Host
from overspill.server.native import NativeFormat
from overspill.server.openai_chat import ChatFormat
from overspill.server.openai_text import TextFormat
from overspill.server.params import chat_probs, check_tools, sampling_params
from overspill.server.prompts import chat_segments, checked_id, mixed_ids, prompts_of
from overspill.server.reading import Reader
from overspill.server.settings import ServerSettings
from overspill.server.sse import DONE, EventResponse, event, unless_gone
from overspill.server.strict_json import Json

router = APIRouter()
_log = logging.getLogger(__name__)


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
    _refuse_unserved(host, body)
    check_tools(body, has_calls=host.dialect.has_calls)
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
    job = await asyncio.to_thread(_prompt_job, host, body, body.prompt, n_probs)
    return await _answer(request, host, settings, body, job, NativeFormat(body, job, host.llm.tokenizer, host.name))


@router.post("/v1/completions", openapi_extra=described(TextBody))
async def text_completion(
    request: Request,
    host: HostOf,
    settings: SettingsOf,
    body: Annotated[TextBody, Depends(body_of(TextBody))],
) -> Response:
    """Continue prompts, in OpenAI's format."""
    job = await asyncio.to_thread(_prompt_job, host, body, body.prompt, body.logprobs)
    return await _answer(request, host, settings, body, job, TextFormat(body, job, host.name))


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
    return await _answer(request, host, settings, body, job, ChatFormat(body, job, make_reader, host.name))


def _prompt_job(host: Host, body: SamplingFields, prompt: Any, n_probs: int | None) -> Job:
    return _job(host, body, prompts_of(host.llm.tokenizer, prompt), n_probs)


def chat_job(host: Host, body: ChatBody) -> tuple[Job, Callable[[], Reader]]:
    """What to generate for a conversation, and how to read each answer."""
    _refuse_unserved(host, body)
    check_tools(body, has_calls=host.dialect.has_calls)
    tokenizer, is_raw = host.llm.tokenizer, body.reasoning_format == "none"
    segments = chat_segments(tokenizer, host.template, body)
    prompt = "".join(segment.text for segment in segments)
    job = _job(host, body, [tokenizer.encode_marked(segments)], chat_probs(body))
    make_reader = partial(host.dialect.reader, prompt, has_tools=bool(body.offered_tools), is_raw=is_raw)
    return replace(job, shown_ids=host.dialect.mark_ids(tokenizer)), make_reader


def _refuse_unserved(host: Host, body: SamplingFields) -> None:
    sampling_params(body, host.llm.tokenizer, n_probs=0)


def _job(host: Host, body: SamplingFields, prompts: list[list[int]], n_probs: int | None) -> Job:
    return Job(
        prompts=tuple(tuple(ids) for ids in prompts),
        params=sampling_params(body, host.llm.tokenizer, n_probs=n_probs or 0),
        stop=tuple(word for word in body.stop if word),
        n=body.n,
        has_logprobs=n_probs is not None,
    )


async def _answer(
    request: Request, host: Host, settings: ServerSettings, body: SamplingFields, job: Job, form: Format
) -> Response:
    generation = Generation(host, job)
    if body.stream:
        return EventResponse(_events(generation, form), ping_s=settings.ping_s, on_end=generation.close)
    try:
        return Json(form.whole(await unless_gone(request, generation.finish())))
    finally:
        generation.close()


async def _events(generation: Generation, form: Format) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(generation.updates()) as updates:
            async for update in updates:
                for value in _values(form, update):
                    yield event(value)
        for value in form.closing(generation.answers):
            yield event(value)
    except Exception as error:
        known = as_api_error(error)
        if known.code == 500:
            _log.error("a stream failed", exc_info=error)
        yield event(known.body)
        return
    if form.marks_end:
        yield DONE


def _values(form: Format, update: Update) -> list[dict[str, Any]]:
    answer, news = update
    if isinstance(news, Progress):
        return form.progress(answer, news)
    return form.piece(answer, news) if answer.done is None else form.end(answer, news)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)
