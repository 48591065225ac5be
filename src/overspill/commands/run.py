"""`overspill run`: one prompt, the answer as it comes, and what it took."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from overspill.commands.answering import Answered, answer
from overspill.commands.files import check_writable, open_for_text
from overspill.commands.sampling import Sampling, with_fields_of_model
from overspill.commands.screen import loading_bar
from overspill.llm import LLM
from overspill.pipeline.trace import write_trace
from overspill.placement.report import as_dict, report
from overspill.text.chat import ChatTemplate
from overspill.text.tokenizer import Tokenizer


def run_prompt(
    model: Path,
    prompt: str,
    fields: Mapping[str, Any],
    *,
    stop: Sequence[str],
    is_chat: bool,
    as_json: bool,
    options: Mapping[str, Any],
) -> None:
    """Load, answer, print. The text goes to stdout as it comes; with `as_json`, one JSON object at the end.

    fields: of a request, from the flags.
    """
    source = open_for_text(model)
    sampling = Sampling.of(with_fields_of_model(fields, source.keys))
    template = ChatTemplate.from_keys(source.keys) if is_chat else None
    if "trace" in options:
        check_writable("--trace", Path(options["trace"]))
    with ExitStack() as stack:
        with loading_bar() as progress:
            llm = stack.enter_context(LLM(source, progress=progress, **options))
        ids = llm.tokenizer.encode(prompt) if template is None else _chat_ids(llm.tokenizer, template, prompt)
        params, start = sampling.params_for(llm.tokenizer), sampling.constraint_for(llm.tokenizer)
        if llm.options.trace is not None:
            llm.start_trace()
        pieces: list[str] = []
        show = pieces.append if as_json else _print
        answered = answer(llm, llm.request(ids, params, start() if start else None), show, stop=stop)
        if llm.options.trace is not None:
            write_trace(llm.take_trace(), Path(llm.options.trace))
        if as_json:
            print(json.dumps(_as_dict(llm, answered, "".join(pieces), len(ids))))
        else:
            print(flush=True)
            print(_summary(llm, answered), file=sys.stderr)


def _chat_ids(tokenizer: Tokenizer, template: ChatTemplate, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.encode_marked(template.render_marked(messages, special_texts=tokenizer.special_texts))


def _print(piece: str) -> None:
    print(piece, end="", flush=True)


def _as_dict(llm: LLM, answer: Answered, text: str, n_prompt: int) -> dict[str, Any]:
    t = answer.timings
    return {
        "text": text,
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


def _summary(llm: LLM, answer: Answered) -> str:
    t, counters = answer.timings, llm.counters()
    busy = ", ".join(f"{name} {share:.0%}" for name, share in counters["busy"].items())
    lines = [
        "",
        *report(llm.plan.shape, llm.plan.placement),
        str(llm.residence),
        f"prompt  {t.prompt_n} tokens, {t.prompt_per_second:.1f} tokens/s",
        f"answer  {t.predicted_n} tokens, {t.predicted_per_second:.1f} tokens/s, ended by {answer.finish_reason}",
        f"uploads {counters['uploaded_bytes'] / 2**20:,.0f} MiB, busy {busy}",
        *_experts_read(counters["experts"]),
    ]
    return "\n".join(lines)


def _experts_read(experts: Mapping[str, Any] | None) -> list[str]:
    """Where the experts of single tokens came from, in layers whose experts are in host RAM."""
    if experts is None:
        return []
    read = ", ".join(f"{name} {n / 2**20:,.1f} MiB" for name, n in experts["bytes_per_token"].items())
    return [f"experts {experts['hit_rate']:.0%} from the cache; read from host RAM for a token: {read}"]
