"""The composition root: the one file that knows every part.

A model goes from file to engine in the order of `LLM.__init__`: read, understand, open devices, plan, load, reserve,
run. Server, command line and benchmark enter through `LLM.submit` and `LLM.cancel`; `generate` and `logits` are
conveniences over the same engine.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

import torch

from overspill.cache.images import BLOCK_BYTES, ImageStore
from overspill.calibration import with_rates
from overspill.device.base import Span
from overspill.device.lane import Lane
from overspill.engine.constraint import Constraint
from overspill.engine.engine import Engine, EngineStatus, WaveAbandoned
from overspill.engine.loop import EngineLoop, EventStream
from overspill.engine.pace import WavePace
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, Request, Timings, TokenEvent
from overspill.engine.slots import Move, PrefixReuse
from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.source import ModelSource
from overspill.hardware import machine_for, n_threads_for, open_for, ops_for, precision_on
from overspill.kernels import cpu
from overspill.models.check import has_tokenizer, tokenizer_of, understand
from overspill.models.drawn import routed_by
from overspill.needs import expert_type, main_weight, needs_on, shape_for, widens_dense
from overspill.options import MIB, Options, options_from
from overspill.pipeline.cache_pace import CachePace
from overspill.pipeline.choose import choose
from overspill.pipeline.expert_cache import ExpertCaches
from overspill.pipeline.host_steps import HostSteps
from overspill.pipeline.memory import Memory, Sizes
from overspill.pipeline.reading import LoadMode
from overspill.pipeline.recorded import Recorded
from overspill.pipeline.residence import read_ahead
from overspill.pipeline.rows import ShortPrompts
from overspill.pipeline.runner import Runner, Steps
from overspill.pipeline.spread_tally import SpreadTally
from overspill.pipeline.step_work import StepWork
from overspill.pipeline.steps import StepRunner
from overspill.pipeline.watch import WaveWatch
from overspill.pipeline.wave import Segment, Ubatch, Wave
from overspill.pipeline.weights import load
from overspill.pipeline.work import Work
from overspill.text.stream import TextStream
from overspill.text.tokenizer import Tokenizer

Progress = Callable[[int, int], None]
_log = logging.getLogger(__name__)


class Completion(NamedTuple):
    """What `generate` returns. finish_reason: `stop` (end token or stop string) or `length`."""

    text: str
    tokens: list[int]
    n_prompt: int
    finish_reason: str
    timings: Timings


class LLM:
    """A loaded model. Use as a context manager, or call `close`.

    model: path of a GGUF file (any part of a split one), or another source of tensors. Options are those of the
    command line under their long names: `LLM("m.gguf", devices="virtual:3", cpu_moe=True, n_ctx=4096)`.
    progress: called with (bytes done, bytes in all) while loading. Raises `UserError` for what cannot be served.
    """

    def __init__(
        self, model: str | os.PathLike[str] | ModelSource, *, progress: Progress | None = None, **options: Any
    ) -> None:
        self.options = options_from(options)
        self.n_threads = n_threads_for(self.options)
        self.source: ModelSource = open_gguf(model) if isinstance(model, str | os.PathLike) else model
        arch, self.hparams, specs, self.source = understand(self.source)
        self._tokenizer = tokenizer_of(self.source) if has_tokenizer(self.source) else None
        machine = machine_for(self.options, main_weight(self.source, specs))
        precision = precision_on(machine, self.options)
        shape = shape_for(machine, self.options, self.source, self.hparams, specs)
        needs = needs_on(machine, self.options, self.hparams, specs)
        self.plan = choose(shape, machine, self.options, needs)
        _tell_lower_context(self.options, self.plan.placement.n_ctx, self.hparams.n_ctx_train)
        done = _counter(progress, sum(self.source.tensors[spec.name].n_bytes for spec in specs))
        with ExitStack() as on_failure:
            self.devices = open_for(self.options)
            on_failure.callback(self.devices.close)
            layout = self.plan.layout
            placed, host = self.plan.placement, layout.host
            ops_of = ops_for(self.devices)
            self.sizes = Sizes.of_plan(
                placed.n_ubatch,
                placed.n_wave,
                self.options.n_parallel,
                placed.n_ctx,
                self.options.n_states,
                needs(placed.n_ubatch).n_trials,
                has_rings=not self.options.swa_full,
            )
            n_spread = self.plan.n_spread_tokens
            memory = Memory(
                self.devices,
                layout,
                self.hparams,
                self.sizes,
                placed.staging,
                precision,
                n_spread_tokens=n_spread,
                n_image_bytes=self.options.n_image_bytes,
                cache_bytes=self.plan.cache_bytes,
            )
            loaded = load(
                self.source,
                specs,
                routed_by(arch.Model, self.options.routing),
                self.hparams,
                layout,
                self.devices,
                ops_of,
                is_on_host=lambda name: placed.home[name] == host,
                progress=done,
                mode=LoadMode(self.options.load_mode),
                n_threads=self.options.load_threads,
                is_asynchronous=self.options.async_load != "off",
                widens_dense=widens_dense(machine, self.source, specs),
            )
            if loaded.residence.pageable_bytes:
                self.plan = self.plan.without_spread()
                if any(placed.n_cached):
                    n_mib = loaded.residence.pageable_bytes // MIB
                    _log.warning("expert cache: not used, because %d MiB of experts could not be pinned", n_mib)
            if self.plan.n_spread_tokens:
                rooms = {i: memory["slot", i, 0][0] for i in self.plan.spread_owners}
                experts = (loaded.host_experts, loaded.model, self.n_threads, expert_type(self.source, specs))
                self.plan = with_rates(self.plan, self.devices, ops_of, rooms, *experts)
            parts = (loaded.model, layout, memory, loaded.host_experts, cpu.OPS, loaded.rings)
            tables = [ops_of(device) for device in self.devices.all]
            recorded = Recorded(self.sizes.n_ubatches) if self.plan.schedule.is_recorded else None
            work = Work(*parts, tables=tables, recorded=recorded)
            steps: Steps | None = HostSteps(self.devices, work) if HostSteps.serves(layout) else None
            if self.plan.takes_steps and StepRunner.serves(self.devices, layout, self.hparams, tables):
                step_work = StepWork(*parts, tables=tables)
                pace = CachePace(self.plan.uncached)
                steps = StepRunner(self.devices, layout, memory, step_work, tables, self.n_threads, pace)
            has_tally = n_spread and loaded.host_experts
            self._tally = SpreadTally(self.devices, memory, layout, loaded.host_experts) if has_tally else None
            has_cache = bool(self.plan.cache_bytes)
            caches = ExpertCaches(self.devices, memory, layout, self.hparams.n_expert) if has_cache else None
            self.runner = Runner(
                self.devices,
                layout,
                memory,
                work,
                max_in_flight=self.plan.max_in_flight,
                waits_on_host=self.options.force_xdev_sync,
                steps=steps,
                caches=caches,
            )
            self.short_prompts = ShortPrompts(n_before=int(self.options.prefix_reuse == "any-point"))
            self._running = threading.Lock()
            self.watch = WaveWatch(self.devices)
            self._engine = Engine(
                self.run_wave,
                n_vocab=self.hparams.n_vocab,
                n_ctx_slot=self.sizes.n_cells,
                n_slots=self.sizes.n_slots,
                n_ubatch=self.sizes.n_ubatch,
                n_wave=placed.n_wave,
                reuse=PrefixReuse(self.options.prefix_reuse),
                n_states=self.sizes.n_states if self.hparams.has_states else 0,
                images=self._image_store(),
                run_moves=self._run_moves,
                rings=memory.rings,
                pace=self._pace(),
            )
            on_failure.pop_all()
        read_ahead(loaded.in_file, self.devices.host.free_bytes)
        self.residence = loaded.residence
        self.host_expert_bytes = sum(experts.n_bytes for experts in loaded.host_experts.values())
        self._numbers = itertools.count()
        self._loop = EngineLoop(self._engine)
        self.reset_counters()

    # --- text in, text out

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; `UserError` when the file has none (token ids still work)."""
        return self._tokenizer or tokenizer_of(self.source)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Continue a prompt (text, or token ids) until an end token, a stop string, or a limit."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        text, pieces, tokens = TextStream(self.tokenizer, stop), [], []
        is_stopped = False
        with self.submit(self.request(ids, params)) as events:
            for event in events:
                if isinstance(event, TokenEvent) and not is_stopped:
                    tokens.append(event.token_id)
                    pieces.append("" if event.is_stop else text.push(event.token_id))
                    is_stopped = text.stopped_by is not None
                    if is_stopped:
                        self.cancel(event.request_id)
                elif isinstance(event, DoneEvent):
                    done = event
        if done.reason in ("error", "refused"):
            raise (RuntimeError if done.reason == "error" else UserError)(f"{self.source.name}: {done.message}")
        reason = "stop" if is_stopped else done.reason
        return Completion("".join(pieces) + text.finish(), tokens, len(ids), reason, done.timings)

    # --- ids in, events out: the door for server, command line and benchmark

    def request(
        self,
        ids: Sequence[int],
        params: SamplingParams | None = None,
        constraint: Constraint | None = None,
        *,
        slot: int | None = None,
        reuses_cells: bool = True,
    ) -> Request:
        """A request for `submit`, with the model's own end tokens."""
        ends = frozenset[int]() if self._tokenizer is None else self._tokenizer.eos_ids
        number = next(self._numbers)
        return Request(f"r{number}", tuple(ids), params or SamplingParams(), ends, constraint, slot, reuses_cells)

    def submit(self, request: Request) -> EventStream:
        """Queue a request; iterate the result for its events. Closing it early cancels the request."""
        return self._loop.stream(request)

    def cancel(self, request_id: str) -> None:
        """End a request at the next step."""
        self._loop.cancel(request_id)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits of all positions of a fresh sequence, float32 `[T, V]`. The engine must be idle."""
        with self._running:
            if self._engine.has_work:
                raise UserError("logits: requests are in flight; wait for them first")
            if not 0 < len(ids) <= self.sizes.n_cells:
                raise UserError(f"logits: {len(ids)} tokens; give from 1 to the context, {self.sizes.n_cells}")
            if not 0 <= min(ids) <= max(ids) < self.hparams.n_vocab:
                raise UserError(f"logits: ids from {min(ids)} to {max(ids)}; the model has {self.hparams.n_vocab}")
            self._engine.forget_cells()
            rows = [r for wave in self._waves_of(ids) for r in self._run(wave)]
        return torch.cat(rows)

    def _waves_of(self, ids: Sequence[int]) -> list[Wave]:
        n = self.sizes.n_ubatch
        pieces = [tuple(ids[i : i + n]) for i in range(0, len(ids), n)]
        ubatches = [
            Ubatch(piece, (Segment(0, i * n, len(piece)),), tuple(range(len(piece)))) for i, piece in enumerate(pieces)
        ]
        k = self.sizes.n_ubatches
        return [Wave(tuple(ubatches[i : i + k])) for i in range(0, len(ubatches), k)]

    def run_wave(self, wave: Wave) -> list[torch.Tensor]:
        """Compute a wave below the engine (benchmarks): per ubatch, logits `[n output rows, V]`."""
        with self._running:
            return self.watch.run(wave, lambda: self._run(wave, self._check_wanted))

    def _run(self, wave: Wave, gives_up: Callable[[], None] = lambda: None) -> list[torch.Tensor]:
        if wave.is_step:
            return self.runner.run(wave, self.plan.step_schedule(wave.n_tokens), gives_up)
        n_rows = self.plan.step_rows(wave.n_tokens, wave.end_pos)
        if n_rows and (rows := self.short_prompts.rows_of(wave, n_rows)) is not None:
            (found,) = self.runner.run(rows.step, self.plan.step_schedule(n_rows), gives_up)
            return [found[list(wanted)] for wanted in rows.wanted]
        return self.runner.run(wave, self.plan.schedule_for(wave.n_tokens), gives_up)

    def _pace(self) -> WavePace | None:
        """Of waves that others decode in; None where the user sets no bound."""
        if (max_ms := self.options.max_wave_ms) is None:
            return None
        n_first, n_least = self.plan.beside(max_ms)
        return WavePace(max_ms, self.plan.placement.n_wave, n_first=n_first, n_least=n_least)

    def _image_store(self) -> ImageStore | None:
        """For what slots held; None where the user gives it no memory."""
        n_blocks = self.options.n_image_bytes // BLOCK_BYTES
        return ImageStore(n_blocks, self.runner.images.n_bytes) if n_blocks else None

    def _run_moves(self, moves: list[Move]) -> None:
        with self._running:
            self.runner.move_host(moves)

    def _check_wanted(self) -> None:
        if self._engine.is_wave_abandoned:
            raise WaveAbandoned

    # --- what happened

    @property
    def status(self) -> EngineStatus:
        """What slots and queue are doing now; from any thread, without waiting."""
        return self._engine.status

    @property
    def has_failed(self) -> bool:
        """Whether a device did not compute a wave, or the engine broke: what comes after is not to be trusted."""
        return self._engine.failed is not None or self._loop.is_broken

    def counters(self) -> dict[str, Any]:
        """Uploaded bytes, waves, busy shares and the rest, since loading or `reset_counters`."""
        with self._running:
            run, devices = self.runner.counters, self.devices
            for device in devices.all:
                device.settle_host()
            computing = devices.accelerators or (devices.host,)
            wall_us = max(run.wall_us, 1e-9)
            return {
                "uploaded_bytes": sum(d.counters.uploaded_bytes for d in devices.all),
                "placed_bytes": run.placed_bytes,
                "host_expert_bytes": self.host_expert_bytes,
                "pinned_bytes": self.residence.pinned_bytes,
                "pageable_bytes": self.residence.pageable_bytes,
                "handed_off_bytes": sum(d.counters.handed_off_bytes for d in devices.all),
                "waves": run.n_waves,
                "ubatches": run.n_ubatches,
                "tokens": run.n_tokens,
                "device_allocations_after_warmup": sum(d.counters.n_allocations for d in devices.all),
                "device_syncs_after_warmup": sum(d.counters.n_device_syncs for d in devices.all),
                "host_waits": sum(d.counters.n_host_waits for d in devices.all),
                "experts": self._tally and self._tally.read_host().as_dict(run.n_spread_tokens),
                "busy": {d.name: d.counters.busy_us[Lane.COMPUTE] / wall_us for d in computing},
                "upload_gbps": {d.name: d.counters.uploaded_bytes / wall_us / 1e3 for d in computing},
                "peak_bytes": {d.name: d.peak_bytes for d in computing},
            }

    def reset_counters(self) -> None:
        """Count from now on."""
        with self._running:
            self.runner.reset_counters()
            if self._tally is not None:
                self._tally.reset_host()
            for device in self.devices.all:
                device.reset_counters()

    def start_trace(self) -> None:
        """Keep what every stream does from now on."""
        for device in self.devices.all:
            device.start_trace()

    def take_trace(self) -> Mapping[str, list[Span]]:
        """What the streams of each device did since `start_trace`, by device name."""
        with self._running:
            self.runner.synchronize_host()
            return {device.name: device.take_trace() for device in self.devices.all}

    def close(self) -> None:
        """End requests and devices, and give all memory back, whoever still holds this object; idempotent."""
        self._loop.close()
        self.devices.close()
        self.runner.close()
        self._tally = None
        gc.collect()  # callbacks make cycles of what holds gigabytes, which must not wait for a chance collection

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _counter(progress: Progress | None, n_total: int) -> Callable[[int], None]:
    done = 0

    def count(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        if progress is not None:
            progress(done, n_total)

    return count


def _tell_lower_context(options: Options, n_ctx: int, n_ctx_train: int) -> None:
    if options.n_ctx == 0 and n_ctx < n_ctx_train * options.n_parallel:
        _log.warning(
            "context lowered to fit: %d cells over all sequences, of %d for each; -c sets it", n_ctx, n_ctx_train
        )
