"""`overspill serve`: the model behind HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overspill.commands.files import open_for_text
from overspill.commands.sampling import with_fields_of_model
from overspill.commands.screen import loading_bar
from overspill.errors import UserError
from overspill.llm import LLM, Progress
from overspill.options import options_from
from overspill.server.defaults import check_defaults
from overspill.server.host import Host
from overspill.server.run import run_server
from overspill.server.settings import ServerSettings
from overspill.text.chat import ChatTemplate


def request_defaults(
    template_kwargs: str | None,
    reasoning_format: str | None,
    reasoning_budget: int | None,
    reasoning: str,
    *,
    stop: Sequence[str],
    caches: bool,
) -> dict[str, Any]:
    """What the flags say about requests that say nothing themselves, as fields of a request."""
    variables = {} if template_kwargs is None else _json_object("--chat-template-kwargs", template_kwargs)
    if reasoning_budget not in (None, 0, -1):
        raise UserError(f"--reasoning-budget {reasoning_budget}: give 0 (no thoughts) or -1 (as many as it likes)")
    if reasoning not in ("on", "off", "auto"):
        raise UserError(f"--reasoning {reasoning}: give on, off or auto")
    if reasoning_budget == 0 or reasoning != "auto":
        variables.setdefault("enable_thinking", reasoning_budget != 0 and reasoning == "on")
    fields = {
        "chat_template_kwargs": variables or None,
        "reasoning_format": reasoning_format,
        "stop": list(stop) or None,
    }
    return {k: v for k, v in fields.items() if v is not None} | ({} if caches else {"cache_prompt": False})


def serve_model(model: Path, settings: ServerSettings, options: Mapping[str, Any], template_text: str | None) -> None:
    """Listen, load, serve until SIGTERM. What can be checked without loading is refused before listening.

    template_text: a chat template instead of the model's own.
    """
    if "trace" in options:
        raise UserError("--trace: a server's trace would have no end; use it with run")
    options_from(options)
    check_defaults(settings.defaults)
    source = open_for_text(model)
    settings = replace(settings, defaults=with_fields_of_model(settings.defaults, source.keys))
    check_defaults(settings.defaults)

    def open_model(progress: Progress) -> LLM:
        with loading_bar() as bar:

            def tell(n_done: int, n_total: int) -> None:
                progress(n_done, n_total)
                bar(n_done, n_total)

            return LLM(source, progress=tell, **options)

    if template_text is not None and "{" not in template_text:
        raise UserError(f"--chat-template {template_text[:40]}: give the text of a Jinja template; names mean nothing")
    template = ChatTemplate.from_keys(source.keys) if template_text is None else ChatTemplate(template_text)
    run_server(Host(open_model, name=settings.name or str(model), template=template), settings)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{flag}: give a JSON object, not {text[:40]}")
    return value
