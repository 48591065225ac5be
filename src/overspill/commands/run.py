"""`overspill run`: one prompt, the answer as it comes, and what it took."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.commands.files import check_writable, open_for_text
from overspill.commands.screen import bar, loading_bar
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, ProgressEvent, Timings, TokenEvent
from overspill.errors import UserError
from overspill.llm import LLM
from overspill.pipeline.trace import write_trace
from overspill.placement.report import as_dict, report
from overspill.text.chat import ChatTemplate
from overspill.text.stream import TextStream
from overspill.text.tokenizer import Tokenizer


@dataclass
class _Answer:
    """An answer as it grows."""

    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str = "cancelled"
    timings: Timings = field(default_factory=Timings)


def run_prompt(
    model: Path,
    prompt: str,
    params: SamplingParams,
    *,
    stop: Sequence[str],
    is_chat: bool,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Load, answer, print. The text goes to stdout as it comes; with `as_json`, one JSON object at the end."""
    source = open_for_text(model)
    template = ChatTemplate.from_keys(source.keys) if is_chat else None
    if "trace" in options:
        check_writable("--trace", Path(options["trace"]))
    with ExitStack() as stack:
        with loading_bar() as progress:
            llm = stack.enter_context(LLM(source, progress=progress, **options))
        ids = llm.tokenizer.encode(prompt) if template is None else _chat_ids(llm.tokenizer, template, prompt)
        if llm.options.trace is not None:
            llm.start_trace()
        answer = _answer(llm, ids, params, stop, is_quiet=as_json)
        if llm.options.trace is not None:
            write_trace(llm.take_trace(), Path(llm.options.trace))
        if as_json:
            print(json.dumps(_as_dict(llm, answer, len(ids))))
        else:
            print(flush=True)
            print(_summary(llm, answer), file=sys.stderr)


def _chat_ids(tokenizer: Tokenizer, template: ChatTemplate, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.encode_marked(template.render_marked(messages, special_texts=tokenizer.special_texts))


def _answer(llm: LLM, ids: Sequence[int], params: SamplingParams, stop: Sequence[str], *, is_quiet: bool) -> _Answer:
    answer, text = _Answer(), TextStream(llm.tokenizer, stop)
    is_stopped = False

    def show(piece: str) -> None:
        answer.pieces.append(piece)
        if not is_quiet:
            print(piece, end="", flush=True)

    with ExitStack() as until_first_token, llm.submit(llm.request(ids, params)) as events:
        progress = until_first_token.enter_context(bar("prompt", "tokens"))
        for event in events:
            match event:
                case ProgressEvent():
                    progress(event.n_done, event.n_total)
                case TokenEvent() if not is_stopped:
                    until_first_token.close()
                    answer.tokens.append(event.token_id)
                    show("" if event.is_stop else text.push(event.token_id))
                    is_stopped = text.stopped_by is not None
                    if is_stopped:
                        llm.cancel(event.request_id)
                case DoneEvent():
                    answer.finish_reason, answer.timings = event.reason, event.timings
                    if event.reason in ("error", "refused"):
                        raise UserError(f"{llm.source.name}: {event.message}")
    if is_stopped:
        answer.finish_reason = "stop"
    show(text.finish())
    return answer


def _as_dict(llm: LLM, answer: _Answer, n_prompt: int) -> dict[str, Any]:
    t = answer.timings
    return {
        "text": "".join(answer.pieces),
        "tokens": answer.tokens,
        "prompt_tokens": n_prompt,
        "finish_reason": answer.finish_reason,
        "timings": {
            "prompt_n": t.prompt_n,
            "prompt_ms": t.prompt_ms,
            "prompt_per_second": t.prompt_per_second,
            "predicted_n": t.predicted_n,
            "predicted_ms": t.predicted_ms,
            "predicted_per_second": t.predicted_per_second,
        },
        "plan": as_dict(llm.plan.shape, llm.plan.placement),
        "counters": llm.counters(),
    }


def _summary(llm: LLM, answer: _Answer) -> str:
    t, counters = answer.timings, llm.counters()
    busy = ", ".join(f"{name} {share:.0%}" for name, share in counters["busy"].items())
    lines = [
        "",
        *report(llm.plan.shape, llm.plan.placement),
        str(llm.residence),
        f"prompt  {t.prompt_n} tokens, {t.prompt_per_second:.1f} tokens/s",
        f"answer  {t.predicted_n} tokens, {t.predicted_per_second:.1f} tokens/s, ended by {answer.finish_reason}",
        f"uploads {counters['uploaded_bytes'] / 2**20:,.0f} MiB, busy {busy}",
    ]
    return "\n".join(lines)
