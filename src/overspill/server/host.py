"""The model behind the server: loaded on a thread of its own, so that /health answers from the first moment.

A host is loading, then ready or failed, and closed at the end. It is the one place that knows the `LLM`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import cached_property

from overspill.engine.request import DoneEvent
from overspill.llm import LLM, Progress
from overspill.server.dialect import Dialect
from overspill.server.errors import ApiError
from overspill.server.totals import Totals
from overspill.text.chat import ChatTemplate
from overspill.text.constrain import Grammars

_log = logging.getLogger(__name__)
_PATIENCE_S = 20.0

OpenModel = Callable[[Progress], LLM]


class _Abandoned(Exception):
    """Loading was given up because the server ends."""


class Host:
    """open_model: loads it, telling its progress. name: the model's, in answers."""

    def __init__(self, open_model: OpenModel, *, name: str, template: ChatTemplate) -> None:
        self.name = name
        self.template = template
        self.dialect = Dialect.of(template.all_source)
        self.totals = Totals()
        self.failure: Exception | None = None
        self.created = int(time.time())
        self._open_model = open_model
        self._llm: LLM | None = None
        self._last_error: str | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._load, name="overspill-load", daemon=True)

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to load. on_failure: called from the loading thread when `failure` is set."""
        self._on_failure = on_failure
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model; ApiError 503 until it is loaded."""
        if self._llm is None or self._is_closing.is_set():
            raise ApiError(503, "the server is shutting down" if self._is_closing.is_set() else "Loading model")
        return self._llm

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for the model's vocabulary."""
        return Grammars(self.llm.tokenizer, self.dialect.mark_ids(self.llm.tokenizer))

    @property
    def trouble(self) -> str | None:
        """What the device or the engine said when a request failed; None once another one was served."""
        return self._last_error

    def note_end(self, done: DoneEvent, *, is_stopped: bool) -> None:
        """A request has ended. is_stopped: by a stop string, which the engine sees as cancelled."""
        self.totals.count(done, is_stopped=is_stopped)
        if done.reason == "error":
            self._last_error = done.message
        elif done.n_generated:
            self._last_error = None

    def close(self) -> None:
        """End all requests and give the devices back; idempotent."""
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE_S)
        if self._llm is not None:
            self._llm.close()

    def _load(self) -> None:
        try:
            llm = self._open_model(self._tell)
        except _Abandoned:
            return
        except Exception as error:
            self.failure = error
            self._on_failure()
            return
        self._llm = llm
        _log.info("the model is loaded")

    def _tell(self, n_done: int, n_total: int) -> None:
        if self._is_closing.is_set():
            raise _Abandoned
