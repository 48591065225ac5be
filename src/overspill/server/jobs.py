"""Bodies of requests to jobs for the engine. Slow for long prompts: not for the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from overspill.server.constraints import grammar_of
from overspill.server.errors import ApiError
from overspill.server.fields import ChatBody, SamplingFields
from overspill.server.generation import Job, StartConstraint
from overspill.server.host import Host
from overspill.server.params import chat_probs, check_tools, sampling_params
from overspill.server.prompts import chat_segments, prompts_of
from overspill.server.reading import Reader
from overspill.server.required_calls import calls_lark, required_tools
from overspill.text.constrain import Deferred


def prompt_job(host: Host, body: SamplingFields, prompt: Any, n_probs: int | None) -> Job:
    """What to generate for a `prompt` field. n_probs: how many tokens to list, None for no logprobs."""
    grammar = grammar_of(host.grammars, body)
    job = _job(host, body, prompts_of(host.llm.tokenizer, prompt), n_probs)
    return replace(job, start_constraint=None if grammar is None else grammar.start)


def chat_job(host: Host, body: ChatBody) -> tuple[Job, Callable[[], Reader]]:
    """What to generate for a conversation, and how to read each answer."""
    refuse_unserved(host, body)
    tokenizer, is_raw = host.llm.tokenizer, body.reasoning_format == "none"
    segments = chat_segments(tokenizer, host.template, body)
    prompt = "".join(segment.text for segment in (segments[:-1] if body.continue_final_message else segments))
    if body.continue_final_message and host.dialect.ends_thoughts(prompt) is not None:
        raise ApiError(
            400, "Field 'continue_final_message': answers of this model begin with thoughts; turn them off, if it can"
        )
    job = _job(host, body, [tokenizer.encode_marked(segments)], chat_probs(body))
    start = _start_of_chat(host, body, prompt)
    make_reader = partial(host.dialect.reader, prompt, tools=body.offered_tools, is_raw=is_raw)
    return replace(job, shown_ids=host.dialect.mark_ids(tokenizer), start_constraint=start), make_reader


def _start_of_chat(host: Host, body: ChatBody, prompt: str) -> StartConstraint | None:
    """What the answer is held to, from where its thoughts end."""
    tools = required_tools(body)
    if tools and body.ignore_eos:
        raise ApiError(400, "Field 'ignore_eos': an answer that calls a tool ends with it; leave one of them out")
    if tools:
        grammar = host.grammars.lark(calls_lark(host.dialect.form, tools, has_several=body.parallel_tool_calls))
    elif (asked := grammar_of(host.grammars, body)) is not None:
        grammar = asked
    else:
        return None
    is_over = host.dialect.ends_thoughts(prompt)
    if is_over is None or (tools and host.dialect.has_channels):  # there the grammar of calls has a place for thoughts
        return grammar.start
    return lambda: Deferred(grammar.start(), host.llm.tokenizer, is_over)


def refuse_unserved(host: Host, body: ChatBody) -> None:
    """ApiError 400 naming what this server does not do; before a template sees the rest."""
    sampling_params(body, host.llm.tokenizer, n_probs=0)
    check_tools(body, has_calls=host.dialect.has_calls)


def _job(host: Host, body: SamplingFields, prompts: list[list[int]], n_probs: int | None) -> Job:
    return Job(
        prompts=tuple(tuple(ids) for ids in prompts),
        params=sampling_params(body, host.llm.tokenizer, n_probs=n_probs or 0),
        stop=tuple(word for word in body.stop if word),
        n=body.n,
        has_logprobs=n_probs is not None,
        slot=None if body.id_slot < 0 else body.id_slot,
        reuses_cells=body.cache_prompt,
        most_ms=body.t_max_predict_ms if body.t_max_predict_ms > 0 else None,
    )
