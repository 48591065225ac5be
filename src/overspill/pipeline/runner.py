"""Running waves: from actions to launches, copies and events.

The only place that orders streams. One host thread issues the actions of a schedule; for each one the ledger says
which events its stream must wait for, then the work is given to the stream and an event recorded. The host blocks in
six places, all named: when it copies slots, when it reads logits, when it reads router ids (policy `selected`), when a
prompt after steps asks what lies in expert caches, before it overwrites the inputs of an earlier wave that have not
gone up, and in the throttle that bounds how far it runs ahead (and between devices, where a user who looks for a fault
asks for it).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from overspill.cache.images import Load, Save
from overspill.cache.rings import RingGuard
from overspill.cache.states import StateGuard
from overspill.device.base import Devices, Event, Stream
from overspill.device.lane import Lane
from overspill.pipeline.expert_cache import ExpertCaches
from overspill.pipeline.images import SlotImages
from overspill.pipeline.ledger import Ledger, Resource, StreamId
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Order, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Layout
from overspill.pipeline.staging import NOTHING_HELD
from overspill.pipeline.wave import Ubatch, Wave
from overspill.pipeline.work import Work
from overspill.placement.budget import N_LOGIT_BUFFERS

_ITEMS = frozenset({Verb.LAYERS, Verb.ATTEND, Verb.EXPERTS})
_EVENTS_KEPT = 4096
_LISTS_KEPT = 8


@dataclass
class RunCounters:
    """What a runner has done since the last reset.

    n_spread_tokens: of waves whose experts were spread. placed_bytes: of experts that lay in caches and did not go up.
    """

    n_waves: int = 0
    n_ubatches: int = 0
    n_tokens: int = 0
    n_spread_tokens: int = 0
    placed_bytes: int = 0
    wall_us: float = 0.0


class Steps(Protocol):
    """Computes waves that are decoding steps in another way."""

    def suits(self, wave: Wave, schedule: WaveSchedule) -> bool:
        """Whether this wave is one of them."""

    def run_host(self, wave: Wave, schedule: WaveSchedule) -> list[torch.Tensor]:
        """Compute it; logits as `Runner.run` gives them."""


@dataclass(frozen=True)
class _Download:
    """Logits on their way to the host."""

    action: Action
    event: Event
    n_rows: int


class Runner:
    """Runs waves of one model on its devices. Not for several threads.

    waits_on_host: the host waits for each event of one device that a stream of another waits for. It costs all overlap
    of devices, and shows whether they fail to wait for each other. caches: emptied after a wave that ended in the
    middle, because what was to be fetched may not have been.
    """

    def __init__(
        self,
        devices: Devices,
        layout: Layout,
        memory: Memory,
        work: Work,
        *,
        max_in_flight: int,
        waits_on_host: bool = False,
        steps: Steps | None = None,
        caches: ExpertCaches | None = None,
    ) -> None:
        self.counters = RunCounters()
        self._devices = devices
        self._layout = layout
        self._memory = memory
        self._work = work
        self._max_in_flight = max_in_flight
        self._waits_on_host = waits_on_host
        self._listed: dict[tuple[WaveSchedule, tuple[int, ...], tuple[int, ...]], tuple[Action, ...]] = {}
        self._streams: dict[StreamId, Stream] = {}
        self._ledger = Ledger()
        self._events: dict[int, Event] = {}
        self._n_issued = 0
        self._in_flight: deque[Event] = deque()
        self._downloads: deque[_Download] = deque()
        self._ids_asked: list[int] = []
        self._states = StateGuard()
        self._rings = None if memory.rings is None else RingGuard(memory.rings)
        self._guards: list[StateGuard | RingGuard] = [self._states] if memory.has_states else []
        self._guards += [] if self._rings is None else [self._rings]
        self._images = SlotImages(devices, layout, memory, work.hparams)
        self._steps = steps
        self._caches = caches
        self._is_interrupted = False

    def run(
        self, wave: Wave, schedule: WaveSchedule, gives_up: Callable[[], None] = lambda: None
    ) -> list[torch.Tensor]:
        """Compute a wave. Returns, per ubatch, float32 logits `[n output rows, V]` on the host.

        gives_up: called before each split is issued; what it raises ends the wave, whose cells are then void.
        Blocks until the wanted logits are there; a wave that wants none returns while it is still being computed.
        """
        if self._is_interrupted:
            self._forget_wave_host()
        self._is_interrupted = True
        results = self._run(wave, schedule, gives_up)
        self._is_interrupted = False
        return results

    def _forget_wave_host(self) -> None:
        """After an exception in the middle of a wave (of the user at the keyboard, say): nothing of it may be left."""
        self.synchronize_host()
        self._ledger = Ledger()
        self._n_issued = 0
        self._events.clear()
        self._in_flight.clear()
        self._downloads.clear()
        self._ids_asked.clear()
        if self._caches is not None:
            self._caches.empty_host()

    def _run(self, wave: Wave, schedule: WaveSchedule, gives_up: Callable[[], None]) -> list[torch.Tensor]:
        started = time.perf_counter()
        ubatches = wave.ubatches
        assert len(ubatches) <= self._memory.sizes.n_ubatches
        for guard in self._guards:
            for segment in (s for u in ubatches for s in u.segments):
                guard.advance(segment)
        held = NOTHING_HELD if self._caches is None else self._caches.held_host(schedule)
        if self._steps is not None and self._steps.suits(wave, schedule):
            self._join_lanes_host()
            results = self._steps.run_host(wave, schedule)
            self._count(wave, schedule, time.perf_counter() - started)
            return results
        results = [torch.empty(len(u.output_rows), self._memory.n_vocab) for u in ubatches]
        self._work.begin_wave(ubatches, held)
        self._write_inputs_host(ubatches)
        for action in self._actions(schedule, ubatches):
            if action.verb in _ITEMS:
                gives_up()
            self._issue(action, schedule, ubatches, results)
        while self._downloads:
            self._read_logits_host(results)
        self._count(wave, schedule, time.perf_counter() - started)
        return results

    @property
    def images(self) -> SlotImages:
        """Copies of slots."""
        return self._images

    def move_host(self, moves: Iterable[Save | Load]) -> None:
        """Copy slots into images and back, in order; waits for it."""
        for move in moves:
            if isinstance(move, Save):
                self._images.save_host(move)
                continue
            self._images.load_host(move)
            self._work.put_tokens(move.slot, move.image.ids[: move.n_cells])
            for pos, row in move.rows.items():
                self._states.put(row, pos)
            if self._rings is not None:
                self._rings.put(move.slot, move.image.floor)

    def _actions(self, schedule: WaveSchedule, ubatches: Sequence[Ubatch]) -> tuple[Action, ...]:
        """The actions of a wave; prompts cut alike have the same ones, so those of the latest waves are kept."""
        n_chunks, n_tiles = tuple(map(self._work.n_chunks, ubatches)), tuple(map(self._work.n_tiles, ubatches))
        key = schedule, n_chunks, n_tiles
        listed = self._listed.pop(key, None) or tuple(actions(self._layout, schedule, n_chunks, n_tiles))
        self._listed[key] = listed
        if len(self._listed) > _LISTS_KEPT:
            del self._listed[next(iter(self._listed))]
        return listed

    def _stream(self, of: StreamId) -> Stream:
        if of not in self._streams:
            self._streams[of] = self._devices.all[of.device].stream(of.lane)
        return self._streams[of]

    def reset_counters(self) -> None:
        """Count from now on."""
        self.counters = RunCounters()

    def close(self) -> None:
        """Let go of the model and all buffers; counters stay. Idempotent."""
        for name in ("_work", "_memory", "_steps", "_images"):
            vars(self).pop(name, None)

    def synchronize_host(self) -> None:
        """Wait until all devices are idle (between measurements, and at the end)."""
        for device in self._devices.all:
            device.synchronize_host()

    def _join_lanes_host(self) -> None:
        """What is recorded runs on streams for compute alone, so it waits there for all that was issued before."""
        if not self._in_flight:
            return
        self._in_flight.clear()
        for device in self._devices.all:
            for lane in (Lane.UPLOAD, Lane.HAND_OFF):
                device.stream(Lane.COMPUTE).wait(device.stream(lane).record())
        self._devices.host.stream(Lane.COMPUTE).record().wait_host()

    def _issue(
        self, action: Action, schedule: WaveSchedule, ubatches: Sequence[Ubatch], results: list[torch.Tensor]
    ) -> None:
        if action.verb is Verb.UPLOAD and self._ids_asked:
            self._select_host(action.layer, ubatches)
        if action.verb is Verb.READ_IDS:
            self._ids_asked.append(action.ubatch)
        if action.verb is Verb.DOWNLOAD and len(self._downloads) == N_LOGIT_BUFFERS:
            self._read_logits_host(results)
        stream = self._stream(action.stream)
        for other, number in self._ledger.add(self._n_issued, action.stream, action.reads, action.writes).items():
            if self._waits_on_host and other.device != action.device:
                self._events[number].wait_host()
            stream.wait(self._events[number])
        if schedule.order is Order.SERIAL and self._n_issued:
            stream.wait(self._events[self._n_issued - 1])
        self._work.give(action, stream, ubatches)
        event = stream.record()
        self._remember(event)
        if action.verb is Verb.PLACE:
            self.counters.placed_bytes += self._work.staging.placed_bytes(action)
        elif action.verb is Verb.DOWNLOAD:
            n_rows = len(self._work.output_rows(ubatches[action.ubatch], action.chunk))
            self._downloads.append(_Download(action, event, n_rows))
        elif action.verb in _ITEMS:
            self._throttle_host(event)

    def _remember(self, event: Event) -> None:
        self._events[self._n_issued] = event
        self._n_issued += 1
        if len(self._events) > 2 * _EVENTS_KEPT:
            live = self._ledger.live()
            first = self._n_issued - _EVENTS_KEPT
            self._events = {n: e for n, e in self._events.items() if n >= first or n in live}

    def _throttle_host(self, event: Event) -> None:
        self._in_flight.append(event)
        if len(self._in_flight) > self._max_in_flight:
            self._in_flight.popleft().wait_host()

    def _wait_users_host(self, resource: Resource) -> None:
        for number in self._ledger.users(resource):
            self._events[number].wait_host()

    def _write_inputs_host(self, ubatches: Sequence[Ubatch]) -> None:
        self._wait_users_host(("host_pos",))
        buffer = self._memory.one(("host_pos",))
        inputs = buffer.host_tensor.view(torch.int32).view(-1, 2, self._memory.sizes.n_ubatch).numpy()
        for row, ubatch in zip(inputs, ubatches, strict=False):
            positions = [p for s in ubatch.segments for p in range(s.first_pos, s.end_pos)]
            row[:, : ubatch.n_tokens] = positions, ubatch.ids

    def _select_host(self, i_layer: int, ubatches: Sequence[Ubatch]) -> None:
        chosen: set[int] = set()
        for m in self._ids_asked:
            self._wait_users_host(("ids", m))
            buffer = self._memory.one(("ids", m))
            n = ubatches[m].n_tokens * self._memory.n_expert_used
            chosen.update(buffer.host_tensor.view(torch.int32)[:n].tolist())
        self._ids_asked.clear()
        self._work.staging.select(i_layer, chosen)

    def _read_logits_host(self, results: list[torch.Tensor]) -> None:
        done = self._downloads.popleft()
        done.event.wait_host()
        buffer = self._memory.one(("host_logits", done.action.slot))
        logits = buffer.host_tensor.view(torch.float32).view(-1, self._memory.n_vocab)
        first = done.action.chunk * self._memory.sizes.n_logits_rows
        results[done.action.ubatch][first : first + done.n_rows] = logits[: done.n_rows]

    def _count(self, wave: Wave, schedule: WaveSchedule, seconds: float) -> None:
        self.counters.n_waves += 1
        self.counters.n_ubatches += len(wave.ubatches)
        self.counters.n_tokens += wave.n_tokens
        self.counters.n_spread_tokens += wave.n_tokens * (schedule.policy is Policy.SPREAD)
        self.counters.wall_us += seconds * 1e6
