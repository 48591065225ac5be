"""The model behind the server: loaded on a thread of its own, so that /health answers from the first moment.

A host is loading, then ready or failed, and closed at the end. It is the one place that knows the `LLM`.

When a device fails, nothing that it computes later can be trusted: the requests of that engine end, the model is loaded
anew, and until it is there everybody gets 503. Where that does not help, because it fails again before anything was
served, or cannot be loaded, the host has failed, and the process is to end. So it is with most errors of CUDA: a GPU
that ran into one refuses everything else that this process asks of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


class DeviceLost(RuntimeError):
    """A device failed, and loading the model anew did not help."""


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
        self._n_restarts = 0
        self._has_served = False
        self._restart_lock = threading.Lock()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._load, name="overspill-load", daemon=True)

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Begin to load. on_failure: called from the loading thread when `failure` is set."""
        self._on_failure = on_failure
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The model; ApiError 503 until it is loaded."""
        if (llm := self._llm) is not None and not self._is_closing.is_set():
            return llm
        if self._is_closing.is_set():
            raise ApiError(503, "the server is shutting down")
        trouble = self._last_error
        raise ApiError(503, "Loading model" if trouble is None else f"Loading the model anew, because {trouble}")

    @property
    def n_restarts(self) -> int:
        """How often the model was loaded anew because a device failed."""
        return self._n_restarts

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for the model's vocabulary."""
        return Grammars(self.llm.tokenizer, self.dialect.mark_ids(self.llm.tokenizer))

    @property
    def trouble(self) -> str | None:
        """What the device or the engine said when a request failed; None once another one was served."""
        return self._last_error

    def note_end(self, llm: LLM, done: DoneEvent, *, is_stopped: bool) -> None:
        """A request of a model has ended. is_stopped: by a stop string, which the engine sees as cancelled."""
        self.totals.count(done, is_stopped=is_stopped)
        if done.reason == "error":
            self._last_error = done.message
            if llm.has_failed:
                self._restart(llm)
        elif done.n_generated and llm is self._llm:
            self._last_error, self._has_served = None, True

    def close(self) -> None:
        """End all requests and give the devices back; idempotent."""
        self._is_closing.set()
        with self._restart_lock:
            thread, llm = self._thread, self._llm
        if thread.ident is not None:
            thread.join(_PATIENCE_S)
        if (llm := llm or self._llm) is not None:
            llm.close()

    def _restart(self, llm: LLM) -> None:
        """Load the model anew in place of one whose device failed; from any thread, once for each model."""
        with self._restart_lock:
            if llm is not self._llm or self._is_closing.is_set():
                return
            self._llm = None
            self._thread = threading.Thread(target=self._reload, args=(llm,), name="overspill-load", daemon=True)
            self._thread.start()

    def _reload(self, broken: LLM) -> None:
        _log.error("%s: loading the model anew", self._last_error)
        with suppress(Exception):  # what is broken may not even end in order
            broken.close()
        del broken
        if not self._has_served:
            self._fail(DeviceLost(f"{self._last_error}, before anything was served; see to the device and start again"))
            return
        self._n_restarts += 1
        self._has_served = False
        self._load()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._on_failure()

    def _load(self) -> None:
        try:
            llm = self._open_model(self._tell)
        except _Abandoned:
            return
        except Exception as error:
            why = next(iter(str(error).splitlines()), type(error).__name__)
            again = DeviceLost(f"{self._last_error}, and the model cannot be loaded anew: {why}")
            self._fail(again if self._n_restarts else error)
            return
        self._last_error = None
        self._llm = llm
        _log.info("the model is loaded")

    def _tell(self, n_done: int, n_total: int) -> None:
        if self._is_closing.is_set():
            raise _Abandoned
