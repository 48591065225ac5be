"""The engine: schedule a wave, run it, sample its rows, tell what happened.

It owns no device: `run_wave` is given. One thread calls `step`; `submit`, `cancel` and the properties may be used from
any thread, and take effect at the next step. A request that cannot go on (bad logits, a device error, no token left)
ends alone with reason "error" or "refused"; the engine goes on with the others. Each request gets exactly one
`DoneEvent`, its last event.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch

from overspill.cache.images import ImageCounts, ImageStore
from overspill.cache.rings import Rings
from overspill.engine.pace import WavePace
from overspill.engine.params import SamplingParams
from overspill.engine.request import (
    DoneEvent,
    DoneReason,
    Event,
    ProgressEvent,
    Request,
    Timings,
    TokenEvent,
)
from overspill.engine.sampler import BadLogits, Draw, NoTokenLeft, Sampler
from overspill.engine.scheduler import Scheduler, output_slots
from overspill.engine.sequence import Sequence
from overspill.engine.slots import Move, PrefixReuse
from overspill.errors import UserError
from overspill.pipeline.wave import Wave

RunWave = Callable[[Wave], list[torch.Tensor]]
RunMoves = Callable[[list[Move]], None]
_Ended = tuple[Sequence, DoneReason, str]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot is doing, for status pages, or did last while it is idle; request_id and params are None before its
    first request."""

    slot: int
    is_busy: bool = False
    request_id: str | None = None
    params: SamplingParams | None = None
    n_prompt: int = 0
    n_done: int = 0
    n_cached: int = 0
    n_generated: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """slots: what each is doing. n_waiting: requests without one. n_waves, n_in_waves: waves so far, and sequences in
    all of them together. failed: what the device said when a wave last failed, else None. images: of slots, in host
    memory."""

    slots: tuple[SlotState, ...]
    n_waiting: int
    n_waves: int
    n_in_waves: int
    failed: str | None
    images: ImageCounts


class WaveAbandoned(RuntimeError):
    """Nobody wants the rest of a wave: all requests in it were cancelled."""


@dataclass(slots=True)
class _Run:
    """A request in the engine: its sequence, its sampler, and when it reached what."""

    sequence: Sequence
    sampler: Sampler
    started_s: float | None = None
    prompt_done_s: float | None = None
    last_token_s: float | None = None

    def timings(self, now_s: float) -> Timings:
        s = self.sequence
        prompt_done_s = now_s if self.prompt_done_s is None else self.prompt_done_s
        started_s = prompt_done_s if self.started_s is None else self.started_s
        last_token_s = prompt_done_s if self.last_token_s is None else self.last_token_s
        return Timings(
            cache_n=s.n_reused,
            prompt_n=min(s.n_done, s.n_prompt) - s.n_reused,
            prompt_ms=1e3 * (prompt_done_s - started_s),
            predicted_n=s.n_generated,
            predicted_ms=1e3 * (last_token_s - prompt_done_s),
        )


class Engine:
    """Continuous batching over `run_wave`.

    run_wave: computes a wave and returns, per ubatch in order, the logits of its output rows as float32
    [len(output_rows), V] on the host. They are read before the next call, so it may reuse their memory.
    n_ctx_slot: cells a slot has. n_wave: most tokens a wave has. reuse: see `PrefixReuse`. n_states: see
    `Scheduler`. images, run_moves: where slots are saved, and what carries it out; it returns when all is done. rings:
    of cells, where the model has some.
    pace: of waves that others decode in; None: unbounded. clock: seconds.
    run_wave may raise WaveAbandoned once `is_wave_abandoned`; other errors are the device's.
    failed: what the device said when a wave last failed, else None.
    Raises UserError for sizes that do not fit together.
    """

    def __init__(
        self,
        run_wave: RunWave,
        *,
        n_vocab: int,
        n_ctx_slot: int,
        n_slots: int,
        n_ubatch: int,
        n_wave: int,
        reuse: PrefixReuse = PrefixReuse.WHOLE_UBATCHES,
        n_states: int = 0,
        images: ImageStore | None = None,
        run_moves: RunMoves = lambda moves: None,
        rings: Rings | None = None,
        pace: WavePace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.failed: str | None = None
        self._run_wave = run_wave
        self._run_moves = run_moves
        self._clock = clock
        self._scheduler = Scheduler(
            n_vocab=n_vocab,
            n_ctx_slot=n_ctx_slot,
            n_slots=n_slots,
            n_ubatch=n_ubatch,
            n_wave=n_wave,
            reuse=reuse,
            n_states=n_states,
            images=images,
            rings=rings,
        )
        self._pace = pace
        self._has_states = n_states > 0
        self._n_waves = self._n_in_waves = 0
        self._in_wave: frozenset[str] = frozenset()
        self._cancelled: set[str] = set()
        self._runs: dict[str, _Run] = {}
        self._last_in_slots: dict[int, SlotState] = {}
        self._inbox: SimpleQueue[Request | str] = SimpleQueue()
        self._ids: set[str] = set()
        self._ids_lock = threading.Lock()

    def submit(self, request: Request) -> None:
        """Take a request on. Raises UserError (`ContextOverflow` for too long a prompt) if it cannot be served."""
        self._scheduler.validate(request)
        with self._ids_lock:
            if request.id in self._ids:
                raise UserError(f"request id {request.id!r} is in use, give each request its own")
            self._ids.add(request.id)
        self._inbox.put(request)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step, with reason "cancelled". Nothing happens if it has ended already."""
        self._cancelled.add(request_id)
        self._inbox.put(request_id)

    @property
    def is_wave_abandoned(self) -> bool:
        """Whether all requests of the wave that is being computed, which has prompts in it, were cancelled."""
        return bool(self._in_wave) and self._in_wave <= self._cancelled

    def forget_cells(self) -> None:
        """Trust no cells that former requests left: somebody else is about to write them. Only while idle."""
        assert not self.has_work
        self._scheduler.forget_cells()

    @property
    def has_work(self) -> bool:
        return not self._inbox.empty() or self._scheduler.has_work

    @property
    def n_waiting(self) -> int:
        """Requests without a slot."""
        return self._scheduler.n_waiting

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(
            self.slots, self.n_waiting, self._n_waves, self._n_in_waves, self.failed, self._scheduler.image_counts
        )

    @property
    def slots(self) -> tuple[SlotState, ...]:
        in_slots = enumerate(self._scheduler.in_slots)
        return tuple(self._last_in_slots.get(i, SlotState(i)) if s is None else _slot_state(i, s) for i, s in in_slots)

    def step(self) -> list[Event]:
        """Take in what came, compute one wave, sample. Blocks while the wave runs; what has ended already is told
        before that."""
        if ended := self._take_inbox():
            return ended
        wave = self._scheduler.next_wave(None if self._pace is None else self._pace.n_tokens)
        return [] if wave is None else self._compute(wave)

    # --- coming in

    def _take_inbox(self) -> list[Event]:
        events: list[Event] = []
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, Request):
                self._begin(item)
                continue
            self._cancelled.discard(item)
            if (run := self._runs.get(item)) is not None:
                self._scheduler.drop(run.sequence, keep_cells=True)
                events.append(self._end(run.sequence, "cancelled"))
        return events

    def _begin(self, request: Request) -> None:
        params = request.params
        seed = secrets.randbits(32) if params.seed is None else params.seed
        banned_ids = request.stop_ids if params.ignore_eos else frozenset[int]()
        self._runs[request.id] = _Run(
            self._scheduler.add(request), Sampler(params, seed, banned_ids, request.constraint)
        )

    # --- one wave

    def _compute(self, wave: Wave) -> list[Event]:
        sequences = self._scheduler.sequences_in(wave)
        self._mark_started(sequences)
        # A wave without prompts is soon over, and ends with sound cells.
        self._in_wave = frozenset(s.request.id for s in sequences if wave.n_tokens > len(sequences))
        try:
            if moves := self._scheduler.take_moves():
                self._run_moves(moves)
            logits = self._run_paced(wave, sequences)
        except WaveAbandoned:
            return [self._give_up(s) for s in sequences]
        except Exception as error:
            return self._fail(error)
        finally:
            self._in_wave = frozenset()
        self._n_waves += 1
        self._n_in_waves += len(sequences)
        prompts = [s for s in sequences if not s.is_decoding]
        draws, ended = self._sample(wave, logits)
        finished = self._scheduler.commit(wave, {slot: draw.id for slot, draw in draws.items()})
        self._mark_done(sequences, draws)
        events: list[Event] = [_progress(s) for s in prompts]
        events += [self._token(s, draws[s.slot]) for s in sequences if s.slot in draws]
        events += [self._end(s, reason) for s, reason in finished]
        return events + [self._abort(s, reason, message) for s, reason, message in ended]

    def _run_paced(self, wave: Wave, sequences: list[Sequence]) -> list[torch.Tensor]:
        n_prompt = wave.n_tokens - sum(s.is_decoding for s in sequences)
        has_waiting = any(s is not None and s.is_decoding for s in self._scheduler.in_slots)
        if self._pace is None or not (n_prompt and has_waiting):
            return self._run_wave(wave)
        started_s = self._clock()
        logits = self._run_wave(wave)
        self._pace.note(n_prompt, 1e3 * (self._clock() - started_s))
        return logits

    def _sample(self, wave: Wave, logits: list[torch.Tensor]) -> tuple[dict[int, Draw], list[_Ended]]:
        """Draws by slot, and the sequences that got none."""
        draws: dict[int, Draw] = {}
        ended: list[_Ended] = []
        by_slot = {s.slot: s for s in self._scheduler.sequences_in(wave)}
        rows = (row for ubatch_logits in logits for row in ubatch_logits)
        for slot, logits_V in zip(output_slots(wave), rows, strict=True):
            sequence = by_slot[slot]
            try:
                draws[slot] = self._runs[sequence.request.id].sampler.sample(logits_V, sequence.ids)
            except BadLogits as error:
                ended.append((sequence, "error", str(error)))
            except (NoTokenLeft, UserError) as error:
                ended.append((sequence, "refused", str(error)))
        return draws, ended

    def _mark_started(self, sequences: list[Sequence]) -> None:
        now_s = self._clock()
        for run in (self._runs[s.request.id] for s in sequences):
            run.started_s = now_s if run.started_s is None else run.started_s

    def _mark_done(self, sequences: list[Sequence], draws: dict[int, Draw]) -> None:
        now_s = self._clock()
        for sequence in sequences:
            run = self._runs[sequence.request.id]
            if sequence.is_decoding and run.prompt_done_s is None:
                run.prompt_done_s = now_s
            if sequence.slot in draws:
                run.last_token_s = now_s

    # --- going out

    def _token(self, sequence: Sequence, draw: Draw) -> TokenEvent:
        run, is_stop = self._runs[sequence.request.id], draw.id in sequence.stop_ids
        assert run.last_token_s is not None
        timings = run.timings(run.last_token_s)
        return TokenEvent(sequence.request.id, draw.id, draw.logprob, draw.top, is_stop, timings)

    def _fail(self, error: Exception) -> list[Event]:
        """The device did not compute a wave: all requests in slots end, and no cells anywhere are trusted any more."""
        self.failed = _one_line(error)
        sequences = [s for s in self._scheduler.in_slots if s is not None]
        _log.error("a wave failed with %d sequences in slots", len(sequences), exc_info=error)
        events: list[Event] = [self._abort(s, "error", self.failed) for s in sequences]
        self._scheduler.forget_cells()
        self._scheduler.forget_images()
        return events

    def _give_up(self, sequence: Sequence) -> DoneEvent:
        """A request whose wave was abandoned. Cells from before it are sound; states were changed in place."""
        self._scheduler.drop(sequence, keep_cells=not self._has_states)
        return self._end(sequence, "cancelled")

    def _abort(self, sequence: Sequence, reason: DoneReason, message: str) -> DoneEvent:
        self._scheduler.drop(sequence, keep_cells=False)
        return self._end(sequence, reason, message)

    def _end(self, sequence: Sequence, reason: DoneReason, message: str = "") -> DoneEvent:
        run = self._runs.pop(sequence.request.id)
        with self._ids_lock:
            self._ids.remove(sequence.request.id)
        if (slot := sequence.slot) is not None:
            self._last_in_slots[slot] = replace(_slot_state(slot, sequence), is_busy=False)
        return DoneEvent(
            request_id=sequence.request.id,
            reason=reason,
            n_prompt=sequence.n_prompt,
            n_generated=sequence.n_generated,
            message=message,
            timings=run.timings(self._clock()),
            seed=run.sampler.seed,
            slot=slot,
        )


def _progress(sequence: Sequence) -> ProgressEvent:
    return ProgressEvent(sequence.request.id, sequence.n_done, sequence.n_prompt, sequence.n_reused)


def _slot_state(slot: int, s: Sequence) -> SlotState:
    n_done = min(s.n_done, s.n_prompt)
    return SlotState(slot, True, s.request.id, s.request.params, s.n_prompt, n_done, s.n_reused, s.n_generated)


def _one_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, UserError) else f"the device failed: {type(error).__name__}: {text}"
