"""One answer for the terminal: generated, shown as it comes, and what it took."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from overspill.commands.screen import bar
from overspill.engine.request import DoneEvent, ProgressEvent, Request, Timings, TokenEvent
from overspill.errors import UserError
from overspill.llm import LLM
from overspill.text.stream import TextStream


@dataclass
class Answered:
    """An answer that is over."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str = "cancelled"
    timings: Timings = field(default_factory=Timings)


def answer(
    llm: LLM,
    request: Request,
    show: Callable[[str], None],
    *,
    stop: Sequence[str] = (),
    shown_ids: Collection[int] = (),
) -> Answered:
    """Generate; `show` gets the text piece by piece. shown_ids: control tokens to be seen."""
    answered, text = Answered(), TextStream(llm.tokenizer, stop, shown_ids=shown_ids)
    is_stopped = False
    with ExitStack() as until_first_token, llm.submit(request) as events:
        progress = until_first_token.enter_context(bar("prompt", "tokens"))
        for event in events:
            match event:
                case ProgressEvent():
                    progress(event.n_done, event.n_total)
                case TokenEvent() if not is_stopped:
                    until_first_token.close()
                    answered.tokens.append(event.token_id)
                    show("" if event.is_stop else text.push(event.token_id))
                    is_stopped = text.stopped_by is not None
                    if is_stopped:
                        llm.cancel(event.request_id)
                case DoneEvent():
                    answered.finish_reason, answered.timings = event.reason, event.timings
                    if event.reason in ("error", "refused"):
                        raise UserError(f"{llm.source.name}: {event.message}")
    if is_stopped:
        answered.finish_reason = "stop"
    show(text.finish())
    return answered
