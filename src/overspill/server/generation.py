"""The answers of one HTTP request: submitted to the engine at once, told as they grow.

Each answer has a thread that carries events from the engine to the event loop; it ends with the answer, which always
ends. Closing a generation, or leaving its `updates`, cancels what still runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from overspill.engine.constraint import Constraint
from overspill.engine.loop import EventStream
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, Event, ProgressEvent, TokenEvent
from overspill.engine.scheduler import ContextOverflow
from overspill.server.answers import Answer, Piece
from overspill.server.errors import ApiError
from overspill.server.host import Host

MAX_ANSWERS = 128

StartConstraint = Callable[[], Constraint]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What to generate: n answers to each prompt. shown_ids: control tokens that are part of the text.

    start_constraint: makes what each answer is held to. slot, reuses_cells: see the engine's `Request`. most_ms: after
    its first token, an answer that has a line ends; None: it goes on.
    """

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    stop: tuple[str, ...] = ()
    n: int = 1
    has_logprobs: bool = False
    shown_ids: frozenset[int] = frozenset()
    start_constraint: StartConstraint | None = None
    slot: int | None = None
    reuses_cells: bool = True
    most_ms: float | None = None


class Progress(NamedTuple):
    """How far a prompt is: tokens, those from the cache included, and milliseconds since it was submitted."""

    n_total: int
    n_cached: int
    n_done: int
    time_ms: float


class Update(NamedTuple):
    """Something new of an answer; the answer is over when `answer.done` is set."""

    answer: Answer
    news: Piece | Progress


class Generation:
    """Made in the event loop. Raises ApiError, UserError or EngineStopped if the job cannot be served."""

    def __init__(self, host: Host, job: Job) -> None:
        self._host = host
        self._llm = host.llm
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._started_s = time.monotonic()
        self._ids: list[str] = []
        self._ended: set[int] = set()
        self._most_ms = job.most_ms
        self._first_s: dict[int, float] = {}
        _check_size(job, self._llm.sizes.n_slots)
        for ids in job.prompts:
            if len(ids) >= self._llm.sizes.n_cells:
                raise ContextOverflow(len(ids), self._llm.sizes.n_cells)
        prompts = [ids for ids in job.prompts for _ in range(job.n)]
        tokenizer = self._llm.tokenizer
        self.answers = [
            Answer(
                tokenizer,
                i,
                ids,
                job.stop,
                shown_ids=job.shown_ids,
                has_logprobs=job.has_logprobs,
                has_probs=job.params.post_sampling_probs,
            )
            for i, ids in enumerate(prompts)
        ]
        try:
            for answer in self.answers:
                self._submit(answer, job)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel what has not ended."""
        for i, request_id in enumerate(self._ids):
            if i not in self._ended:
                self._llm.cancel(request_id)

    async def updates(self) -> AsyncGenerator[Update, None]:
        """What is new, until all answers are over. ApiError when one fails."""
        try:
            while len(self._ended) < len(self.answers):
                i, event = await self._events.get()
                update = self._take(self.answers[i], event)
                if update is not None:
                    yield update
        finally:
            self.close()

    async def finish(self) -> list[Answer]:
        """All answers, when they are over."""
        async for _ in self.updates():
            pass
        return self.answers

    def _submit(self, answer: Answer, job: Job) -> None:
        constraint = None if job.start_constraint is None else job.start_constraint()
        params = _params(job, answer.index)
        request = self._llm.request(answer.prompt_ids, params, constraint, slot=job.slot, reuses_cells=job.reuses_cells)
        stream = self._llm.submit(request)
        self._ids.append(request.id)
        threading.Thread(target=self._carry, args=(answer, stream), name="overspill-answer", daemon=True).start()

    def _carry(self, answer: Answer, stream: EventStream) -> None:
        """On a thread of its own: from the engine's stream to the event loop's queue."""
        for event in stream:
            if isinstance(event, DoneEvent):
                self._host.note_end(self._llm, event, is_stopped=answer.is_over)
            try:
                self._loop.call_soon_threadsafe(self._events.put_nowait, (answer.index, event))
            except RuntimeError:  # the event loop is gone, and with it everybody who would listen
                self._llm.cancel(event.request_id)

    def _take(self, answer: Answer, event: Event) -> Update | None:
        match event:
            case TokenEvent():
                if answer.is_over:
                    return None
                return Update(answer, self._push(answer, event))
            case ProgressEvent():
                elapsed_ms = 1e3 * (time.monotonic() - self._started_s)
                return Update(answer, Progress(event.n_total, event.n_cached, event.n_done, elapsed_ms))
            case DoneEvent():
                self._ended.add(answer.index)
                _check_end(event, is_stopped=answer.is_over)
                return Update(answer, answer.finish(event))

    def _push(self, answer: Answer, event: TokenEvent) -> Piece:
        piece = answer.push(event)
        took_ms = self._ms_since_first(answer.index)
        answer.is_late = self._most_ms is not None and took_ms > self._most_ms and "\n" in answer.text
        if answer.is_over:
            self._llm.cancel(event.request_id)
        return piece

    def _ms_since_first(self, index: int) -> float:
        now_s = time.monotonic()
        return 1e3 * (now_s - self._first_s.setdefault(index, now_s))


def _params(job: Job, index: int) -> SamplingParams:
    """Further answers to a prompt are drawn from the seeds that follow."""
    seed, i_answer = job.params.seed, index % job.n
    return job.params if seed is None or i_answer == 0 else replace(job.params, seed=(seed + i_answer) % 2**64)


def _check_size(job: Job, n_slots: int) -> None:
    if job.n > n_slots:
        raise ApiError(400, f"Field 'n': {job.n} found, give 1 to the number of slots, {n_slots} (-np raises it)")
    if len(job.prompts) * job.n > MAX_ANSWERS:
        n_answers = len(job.prompts) * job.n
        raise ApiError(400, f"Field 'prompt': {n_answers} answers asked for at once, give at most {MAX_ANSWERS}")


def _check_end(done: DoneEvent, *, is_stopped: bool) -> None:
    if done.reason in ("error", "refused"):
        raise ApiError(500 if done.reason == "error" else 400, done.message)
    if done.reason == "cancelled" and not is_stopped:
        raise ApiError(503, "the request was cancelled: the server is shutting down, or loads the model anew")
