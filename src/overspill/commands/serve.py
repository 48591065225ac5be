"""`overspill serve`: the model behind HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.commands.files import open_for_text
from overspill.commands.screen import loading_bar
from overspill.errors import UserError
from overspill.llm import LLM, Progress
from overspill.options import options_from
from overspill.server.host import Host
from overspill.server.run import run_server
from overspill.server.settings import ServerSettings
from overspill.text.chat import ChatTemplate


def serve_model(model: Path, settings: ServerSettings, options: Mapping[str, Any]) -> None:
    """Listen, load, serve until SIGTERM. What can be checked without loading is refused before listening."""
    if "trace" in options:
        raise UserError("--trace: a server's trace would have no end; use it with run")
    options_from(options)
    source = open_for_text(model)

    def open_model(progress: Progress) -> LLM:
        with loading_bar() as bar:

            def tell(n_done: int, n_total: int) -> None:
                progress(n_done, n_total)
                bar(n_done, n_total)

            return LLM(source, progress=tell, **options)

    template = ChatTemplate.from_keys(source.keys)
    run_server(Host(open_model, name=settings.name or str(model), template=template), settings)
