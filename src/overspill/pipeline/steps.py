"""Decoding by replay: the actions of a step are recorded once per device, and run again for every token.

A step is a wave of one ubatch whose rows are segments of their own: one token of each of several sequences, or the
tokens of short prompts (`pipeline.rows`). Its actions are those of any wave, in the order of the schedule, but nobody
issues them: what each accelerator does is one recording, started with one call, and what the CPU does is a list that
the issuing thread runs through. Where hidden states pass from one device to another they go by mail, through pinned
memory (`kernels.triton.mail`): the receiver's recording waits for the sender's. On one device actions run in the order
of issue, so the mail is all the order there is between devices, and it is enough: every hand-off of a step has a box of
its own, and the host waits for the end of a step before the next.

The host writes positions, tokens and slots into pinned memory; each recording begins by reading them.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from overspill.cache.cells import StateRows
from overspill.device.base import Buffer, Devices, MemoryKind, Recording, running_on
from overspill.device.lane import Lane
from overspill.kernels import Ops, cpu
from overspill.kernels.numba.mail import look_for_flags, raise_flags
from overspill.models.base import HParams
from overspill.pipeline.cache_pace import CachePace
from overspill.pipeline.host_share import HostShare, HostShares
from overspill.pipeline.ledger import Resource
from overspill.pipeline.letters import Letter, Letters
from overspill.pipeline.listing import HostWork, Listing
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Detour, Layout
from overspill.pipeline.step_work import StepWork, inputs_in
from overspill.pipeline.wave import MAX_STEP_TOKENS, STEP_WORDS, Ubatch, Wave

_PROGRAMS_KEPT = 24
_PATIENCE_S = 20.0


@dataclass(frozen=True, eq=False)
class _Program:
    """All of a step. host: what the CPU does first, or all of it where `shares` could not be prepared.

    last: the download of the logits.
    """

    recordings: dict[int, Recording]
    host: list[HostWork]
    shares: HostShares | None
    last: list[Action]


class StepRunner:
    """Runs steps of one model. Not for several threads.

    tables: the kernels of the devices, by number. n_threads: of the CPU's part. pace: decides whether steps use the
    cache that their schedule names; None: all do.
    """

    def __init__(
        self,
        devices: Devices,
        layout: Layout,
        memory: Memory,
        work: StepWork,
        tables: Sequence[Ops],
        n_threads: int,
        pace: CachePace | None = None,
    ) -> None:
        self._devices = devices
        self._memory = memory
        self._work = work
        self._tables = tables
        self._n_threads = n_threads
        self._pace = pace
        self._programs: OrderedDict[tuple[object, ...], _Program] = OrderedDict()
        self._n_steps = 0
        self._step_s = 0.0
        used = sorted({*layout.layer_device, layout.output_device, *layout.input_devices} - {layout.host})
        # What goes by mail passes through host memory anyhow.
        self._layout = replace(layout, detour=Detour())
        work.inputs = {i: self._new_input(i) for i in used}
        self._host_inputs = devices.host.allocate_pinned(4 * STEP_WORDS, name="host_step").host_tensor
        # The same memory for NumPy, which costs a step less than torch.
        self._written = [part.numpy() for part in inputs_in(self._host_inputs.view(torch.int32), MAX_STEP_TOKENS)]
        self._late = devices.host.allocate_pinned(8, name="late").host_tensor.view(torch.int64)
        self._late.zero_()
        self._letters = Letters(devices.host, memory, memory.step_letters(layout))

    def _new_input(self, i_device: int) -> Buffer:
        device = self._devices.all[i_device]
        return device.allocate((STEP_WORDS,), torch.int32, kind=MemoryKind.COMPUTE, name="step")

    @classmethod
    def serves(cls, devices: Devices, layout: Layout, hp: HParams, tables: Sequence[Ops]) -> bool:
        """Whether steps of this model can be recorded: nothing that a device does may depend on the host, as the
        embedding does where tokens before count."""
        on_host = layout.host in {*layout.layer_device, layout.output_device}
        is_embedding_bound = hp.n_before > 0 and layout.embed_on is not None
        has_mail = all(table.mail is not None for table in tables[: len(devices.accelerators)])
        return bool(devices.accelerators) and has_mail and not on_host and not is_embedding_bound

    def suits(self, wave: Wave, schedule: WaveSchedule) -> bool:
        """Whether a wave is a step whose experts need no upload. States of sequences that begin are zeros, not rows."""
        uploads = schedule.policy in (Policy.ALL, Policy.SELECTED) and any(self._layout.slabs)
        if uploads or self._layout.mixed or not wave.is_step:
            return False
        return not self._memory.has_states or all(s.first_pos > 0 for s in wave.ubatches[0].segments)

    def run_host(self, wave: Wave, schedule: WaveSchedule) -> list[torch.Tensor]:
        """Compute a step; logits as `Runner.run` gives them."""
        (ubatch,) = wave.ubatches
        if self._pace is None or schedule.policy is not Policy.SPREAD or not any(schedule.n_cached):
            return self._run_host(ubatch, schedule)
        results = self._run_host(ubatch, self._pace.chosen(schedule, ubatch.n_tokens))
        self._pace.note(ubatch.n_tokens, self._step_s)
        return results

    def _run_host(self, ubatch: Ubatch, schedule: WaveSchedule) -> list[torch.Tensor]:
        self._n_steps += 1
        key = (ubatch.n_tokens, ubatch.output_rows, schedule)
        program = self._programs.get(key)
        if program is None:
            self._write_inputs(self._on_trial(ubatch))
            program = self._programs[key] = self._record(ubatch, schedule)
            if len(self._programs) > _PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        started = time.perf_counter()
        self._write_inputs(ubatch)
        for i_device, recording in program.recordings.items():
            self._devices.all[i_device].stream(Lane.COMPUTE).replay(recording, label="step")
        self._run_on_host(program, ubatch)
        self._devices.all[self._layout.output_device].stream(Lane.COMPUTE).record().wait_host()
        self._step_s = time.perf_counter() - started
        if int(self._late) == self._n_steps:
            raise RuntimeError("a device waited in vain for another in a decoding step")
        return self._logits(program, ubatch)

    # --- what the host does in a step

    def _write_inputs(self, ubatch: Ubatch) -> None:
        number, *targets = self._written
        number[0] = self._n_steps
        rows = [(s.first_pos, i, s.slot, *s.states) for s, i in zip(ubatch.segments, ubatch.ids, strict=True)]
        for target, values in zip(targets, zip(*rows, strict=True), strict=True):
            target[: ubatch.n_tokens] = values

    def _on_trial(self, ubatch: Ubatch) -> Ubatch:
        """The same, but for the states after it: cells may be written twice, a state would go on twice."""
        trial = self._memory.trial_row
        segments = (replace(s, rows=StateRows(s.states.before, trial)) for s in ubatch.segments)
        return replace(ubatch, segments=tuple(segments))

    def _run_on_host(self, program: _Program, ubatch: Ubatch) -> None:
        if program.host:
            with running_on(self._devices.host):
                for work in program.host:
                    self._do(work, ubatch)
        if program.shares is not None:
            program.shares.run()

    def _do(self, work: HostWork, ubatch: Ubatch) -> None:
        letter = work.letter
        if letter is None:
            self._work.compute(work.action, ubatch)
        elif letter.action.source == self._layout.host:
            for part, box in zip(self._parts(letter.action.reads, ubatch), letter.boxes, strict=True):
                box.copy_(part.view(-1).view(torch.int32))
            raise_flags(letter.flags.data_ptr(), len(letter.flags), self._n_steps)
        else:
            self._wait_for(letter)
            for part, box in zip(self._parts(letter.action.writes, ubatch), letter.boxes, strict=True):
                part.view(-1).view(torch.int32).copy_(box)

    def _parts(self, resources: tuple[Resource, ...], ubatch: Ubatch) -> list[torch.Tensor]:
        return [buffer.tensor[: ubatch.n_tokens] for buffer in self._memory.all_of(resources)]

    def _wait_for(self, letter: Letter) -> None:
        address, n, wanted = letter.flags.data_ptr(), len(letter.flags), self._n_steps
        patience = time.monotonic() + _PATIENCE_S
        while True:
            if look_for_flags(address, n, wanted):
                return
            if time.monotonic() > patience:
                raise RuntimeError(f"the CPU waited in vain for {letter.action.label} in a decoding step")

    def _logits(self, program: _Program, ubatch: Ubatch) -> list[torch.Tensor]:
        pieces = []
        for action in program.last:
            buffer = self._memory.one(action.writes[0])
            logits = buffer.host_tensor.view(torch.float32).view(-1, self._memory.n_vocab)
            pieces.append(logits[: len(self._work.output_rows(ubatch, action.chunk))].numpy())
        # torch would wake threads for this copy.
        return [torch.from_numpy(np.concatenate(pieces))]

    # --- recording

    def _record(self, ubatch: Ubatch, schedule: WaveSchedule) -> _Program:
        """The program of a step. Its kernels run once before, on whatever is there, with no one waiting for anyone."""
        self._work.begin_wave()
        cpu.use_threads(self._n_threads)
        for device in self._devices.all:
            device.synchronize_host()
        listed = list(actions(self._layout, schedule, [self._work.n_chunks(ubatch)], [1]))
        letters = self._letters.address(listed, ubatch)
        listing = Listing(self._work, self._memory, self._tables, self._layout.host, self._host_inputs, self._late)
        works = listing.of(listed, letters, ubatch)
        self._letters.flags.fill_(self._n_steps)
        self._letters.fill_harmless(letters.values())
        recordings = {i: self._recording(i, works[i]) for i in sorted(works)}
        host, shares = listing.host, None
        first = next((i - 1 for i, work in enumerate(host) if work.action.verb is Verb.SHARE), None)
        if first is not None:
            shares = self._shares(host[first:], ubatch)
        if shares is not None:
            host = host[:first]
        program = _Program(recordings, host, shares, [action for action in listed if action.verb is Verb.DOWNLOAD])
        self._run_on_host(program, ubatch)
        self._letters.flags.zero_()
        return program

    def _recording(self, i_device: int, works: Sequence[Callable[[], None]]) -> Recording:
        device = self._devices.all[i_device]
        stream = device.stream(Lane.COMPUTE)
        tallies = self._memory.any_of(("tally", i_device))
        counted: list[torch.Tensor] = []

        def count_nothing() -> None:
            for tally, n in zip(tallies, counted, strict=True):
                tally.tensor.copy_(n)

        stream.launch(lambda: counted.extend(tally.tensor.clone() for tally in tallies), label="first step")
        for work in (*works, count_nothing):
            stream.launch(work, label="first step")
        device.synchronize_host()
        self._work.begin_wave()
        return device.record(works, kept=self._tables[i_device].scratch())

    def _shares(self, works: Sequence[HostWork], ubatch: Ubatch) -> HostShares | None:
        """What the CPU computes of layers, each between two letters; None where not all can be prepared."""
        shares = []
        for told, share, answer in zip(works[::3], works[1::3], works[2::3], strict=True):
            found = self._share(told, share, answer, ubatch)
            if found is None:
                return None
            shares.append(found)
        number = inputs_in(self._host_inputs.view(torch.int32), ubatch.n_tokens).number
        return HostShares(shares, number, self._late, self._n_threads)

    def _share(self, told: HostWork, work: HostWork, answer: HostWork, ubatch: Ubatch) -> HostShare | None:
        if told.letter is None or answer.letter is None or work.action.verb is not Verb.SHARE:
            return None
        dtype = self._memory[told.action.reads[0]][0].raw().dtype
        share = HostShare(told.letter, answer.letter, ubatch.n_tokens, self._layout.host, dtype)
        return share if self._work.prepare(share, work.action) else None
