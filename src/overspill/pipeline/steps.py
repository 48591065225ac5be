"""Decoding by replay: the actions of a step are recorded once per device, and run again for every token.

A step is a wave of one ubatch that has one token of each of several sequences. Its actions are those of any wave, in
the order of the schedule, but nobody issues them: what each accelerator does is one recording, started with one call,
and what the CPU does is a list that the issuing thread runs through. Where hidden states pass from one device to
another they go by mail, through pinned memory (`kernels.triton.mail`): the receiver's recording waits for the sender's.
On one device actions run in the order of issue, so the mail is all the order there is between devices, and it is
enough: every hand-off of a step has a box of its own, and the host waits for the end of a step before the next.

The host writes positions, tokens and slots into pinned memory; each recording begins by reading them.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from overspill.cache.cells import StateRows
from overspill.device.base import Buffer, Devices, MemoryKind, Recording, running_on
from overspill.device.lane import Lane
from overspill.kernels import Mail, Ops, cpu
from overspill.kernels.numba.mail import look_for_flags, raise_flags
from overspill.models.base import HParams
from overspill.pipeline.host_share import HostShare
from overspill.pipeline.letters import Letter, Letters
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Detour, Layout
from overspill.pipeline.step_work import INPUT_WORDS, MAX_STEP_TOKENS, StepWork, inputs_in
from overspill.pipeline.wave import Ubatch, Wave

_PROGRAMS_KEPT = 16
_PATIENCE_S = 20.0


class _HostWork(NamedTuple):
    """Something the issuing thread does in a step: a letter to take or to send, or an action to compute.

    share: of an action that was prepared, which works in the boxes of the letters before and after it.
    """

    action: Action
    letter: Letter | None = None
    share: HostShare | None = None


@dataclass(frozen=True, eq=False)
class _Program:
    """All of a step. last: the download of its logits."""

    recordings: dict[int, Recording]
    host: list[_HostWork]
    last: list[Action]


class StepRunner:
    """Runs steps of one model. Not for several threads.

    tables: the kernels of the devices, by number. n_threads: of the CPU's part.
    """

    def __init__(
        self, devices: Devices, layout: Layout, memory: Memory, work: StepWork, tables: Sequence[Ops], n_threads: int
    ) -> None:
        self._devices = devices
        self._memory = memory
        self._work = work
        self._tables = tables
        self._n_threads = n_threads
        self._programs: OrderedDict[tuple[object, ...], _Program] = OrderedDict()
        self._n_steps = 0
        used = sorted({*layout.layer_device, layout.output_device, *layout.input_devices} - {layout.host})
        # What goes by mail passes through host memory anyhow.
        self._layout = replace(layout, detour=Detour())
        work.inputs = {i: self._new_input(i) for i in used}
        self._host_inputs = devices.host.allocate_pinned(4 * INPUT_WORDS, name="host_step").host_tensor
        self._late = devices.host.allocate_pinned(8, name="late").host_tensor.view(torch.int64)
        self._late.zero_()
        self._letters = Letters(devices.host, memory)

    def _new_input(self, i_device: int) -> Buffer:
        device = self._devices.all[i_device]
        return device.allocate((INPUT_WORDS,), torch.int32, kind=MemoryKind.COMPUTE, name="step")

    @classmethod
    def serves(cls, devices: Devices, layout: Layout, hp: HParams) -> bool:
        """Whether steps of this model can be recorded: nothing of it may depend on the host."""
        on_host = layout.host in {*layout.layer_device, layout.output_device}
        can_record = all(device.can_record for device in devices.accelerators)
        return bool(devices.accelerators) and can_record and not on_host and hp.takes_steps

    def suits(self, wave: Wave, schedule: WaveSchedule) -> bool:
        """Whether a wave is a step whose experts need no upload. States of sequences that begin are zeros, not rows."""
        uploads = schedule.policy in (Policy.ALL, Policy.SELECTED) and any(self._layout.slabs)
        is_mixed = bool(self._layout.mixed)
        (ubatch, *others) = wave.ubatches
        is_step = (
            not others
            and ubatch.n_tokens <= MAX_STEP_TOKENS
            and all(s.n_tokens == 1 and s.first_pos > 0 for s in ubatch.segments)
        )
        return is_step and not uploads and not is_mixed

    def run_host(self, wave: Wave, schedule: WaveSchedule) -> list[torch.Tensor]:
        """Compute a step; logits as `Runner.run` gives them."""
        (ubatch,) = wave.ubatches
        self._n_steps += 1
        key = (ubatch.n_tokens, ubatch.output_rows, schedule)
        program = self._programs.get(key)
        if program is None:
            self._write_inputs(self._on_trial(ubatch))
            program = self._programs[key] = self._record(ubatch, schedule)
            if len(self._programs) > _PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        self._write_inputs(ubatch)
        for i_device, recording in program.recordings.items():
            self._devices.all[i_device].stream(Lane.COMPUTE).replay(recording, label="step")
        self._run_all_on_host(program.host, ubatch)
        self._devices.all[self._layout.output_device].stream(Lane.COMPUTE).record().wait_host()
        if int(self._late) == self._n_steps:
            raise RuntimeError("a device waited in vain for another in a decoding step")
        return self._logits(program, ubatch)

    # --- what the host does in a step

    def _write_inputs(self, ubatch: Ubatch) -> None:
        found = inputs_in(self._host_inputs.view(torch.int32), ubatch.n_tokens)
        found.number.fill_(self._n_steps)
        rows = [(s.first_pos, i, s.slot, *s.states) for s, i in zip(ubatch.segments, ubatch.ids, strict=True)]
        for target, values in zip(found[1:], zip(*rows, strict=True), strict=True):
            target.copy_(torch.tensor(values, dtype=torch.int32))

    def _on_trial(self, ubatch: Ubatch) -> Ubatch:
        """The same, but for the states after it: cells may be written twice, a state would go on twice."""
        trial = self._memory.trial_row
        segments = (replace(s, rows=StateRows(s.states.before, trial)) for s in ubatch.segments)
        return replace(ubatch, segments=tuple(segments))

    def _run_all_on_host(self, works: Sequence[_HostWork], ubatch: Ubatch) -> None:
        if works:
            with running_on(self._devices.host):
                for work in works:
                    self._run_on_host(work, ubatch)

    def _run_on_host(self, work: _HostWork, ubatch: Ubatch) -> None:
        letter = work.letter
        if letter is None:
            self._work.compute(work.action, ubatch)
        elif work.share is not None:
            self._wait_for(letter)
            work.share.run()
        elif letter.action.source == self._layout.host:
            parts = [] if letter.is_written else self._parts(letter.action.reads, ubatch)
            for part, box in zip(parts, letter.boxes, strict=not letter.is_written):
                box.copy_(part.view(-1).view(torch.int32))
            raise_flags(letter.flags.data_ptr(), len(letter.flags), self._n_steps)
        else:
            self._wait_for(letter)
            for part, box in zip(self._parts(letter.action.writes, ubatch), letter.boxes, strict=True):
                part.view(-1).view(torch.int32).copy_(box)

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
            (buffer,) = self._memory[action.writes[0]]
            logits = buffer.host_tensor.view(torch.float32).view(-1, self._memory.n_vocab)
            pieces.append(logits[: len(self._work.output_rows(ubatch, action.chunk))].clone())
        return [torch.cat(pieces) if len(pieces) != 1 else pieces[0]]

    # --- recording

    def _record(self, ubatch: Ubatch, schedule: WaveSchedule) -> _Program:
        """The program of a step. Its kernels run once before, on whatever is there, with no one waiting for anyone."""
        self._work.begin_wave()
        cpu.use_threads(self._n_threads)
        for device in self._devices.all:
            device.synchronize_host()
        listed = list(actions(self._layout, schedule, [self._work.n_chunks(ubatch)], [1]))
        memory_before = self._letters.boxes
        letters = self._letters.address([a for a in listed if a.verb is Verb.HAND_OFF], ubatch)
        if self._letters.boxes is not memory_before:
            self._programs.clear()  # theirs is gone
        works: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)
        host: list[_HostWork] = []
        for action in listed:
            self._list(action, letters, works, host, ubatch)
        self._letters.flags.fill_(self._n_steps)
        self._letters.fill_harmless(letters.values())
        recordings = {i: self._recording(i, works[i]) for i in sorted(works)}
        host = self._prepared(host, ubatch)
        self._run_all_on_host(host, ubatch)
        self._letters.flags.zero_()
        return _Program(recordings, host, [a for a in listed if a.verb is Verb.DOWNLOAD])

    def _list(
        self,
        action: Action,
        letters: dict[int, Letter],
        works: dict[int, list[Callable[[], None]]],
        host: list[_HostWork],
        ubatch: Ubatch,
    ) -> None:
        """Add what an action is to the lists of those who do it."""
        match action.verb:
            case Verb.INPUTS:
                works[action.device].append(self._take_inputs(action.device))
            case Verb.HAND_OFF:
                letter = letters[id(action)]
                for end in (action.source, action.writes[0][1]):
                    assert isinstance(end, int)
                    if end == self._layout.host:
                        host.append(_HostWork(action, letter))
                    else:
                        works[end].append(self._mailing(end, letter, ubatch))
            case Verb.DOWNLOAD:
                works[action.device].append(self._download(action, ubatch))
            case _ if action.device == self._layout.host:
                host.append(_HostWork(action))
            case _:
                works[action.device].append(partial(self._work.compute, action, ubatch))

    def _parts(self, resources: Sequence[tuple[str | int, ...]], ubatch: Ubatch) -> list[torch.Tensor]:
        return [buffer.tensor[: ubatch.n_tokens] for buffer in self._memory.all_of(tuple(resources))]

    def _mail_of(self, i_device: int) -> Mail:
        mail = self._tables[i_device].mail
        assert mail is not None
        return mail

    def _take_inputs(self, i_device: int) -> Callable[[], None]:
        copy, source = self._mail_of(i_device).copy, self._host_inputs.view(torch.int32)
        return lambda: copy(self._work.inputs[i_device].tensor, source)

    def _mailing(self, end: int, letter: Letter, ubatch: Ubatch) -> Callable[[], None]:
        mail, action, box, flags = self._mail_of(end), letter.action, letter.box, letter.flags

        def body() -> None:
            number = inputs_in(self._work.inputs[end].tensor, ubatch.n_tokens).number
            if end == action.source:
                mail.put(number, self._parts(action.reads, ubatch), box, flags)
            else:
                mail.take(number, self._parts(action.writes, ubatch), box, flags, self._late)

        return body

    def _download(self, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        (source,), (target,) = self._memory[action.reads[0]], self._memory[action.writes[0]]
        n_rows = len(self._work.output_rows(ubatch, action.chunk))
        wanted = target.host_tensor.view(torch.float32).view(-1, self._memory.n_vocab)[:n_rows]

        def body() -> None:
            wanted.copy_(source.tensor[:n_rows], non_blocking=True)

        return body

    def _recording(self, i_device: int, works: Sequence[Callable[[], None]]) -> Recording:
        device = self._devices.all[i_device]
        stream = device.stream(Lane.COMPUTE)
        for work in works:
            stream.launch(work, label="first step")
        device.synchronize_host()
        self._work.begin_wave()
        return device.record_host(works, kept=self._tables[i_device].scratch())

    def _prepared(self, host: Sequence[_HostWork], ubatch: Ubatch) -> list[_HostWork]:
        """The same, with each share of the CPU prepared where that can be."""
        found: list[_HostWork] = []
        for work in host:
            if work.letter and len(found) > 1 and found[-1].action.verb is Verb.SHARE and found[-2].letter:
                share = self._share(found[-2].letter, found[-1].action, work.letter, ubatch)
                if share is not None:
                    found[-2:] = [_HostWork(found[-1].action, found[-2].letter, share)]
                    found.append(_HostWork(work.action, replace(work.letter, is_written=True)))
                    continue
            found.append(work)
        return found

    def _share(self, told: Letter, action: Action, answer: Letter, ubatch: Ubatch) -> HostShare | None:
        normed = self._memory[told.action.reads[0]][0].raw()
        if normed.dtype != torch.bfloat16:
            return None
        share = HostShare(list(told.boxes), answer.box, ubatch.n_tokens, self._layout.host)
        return share if self._work.prepare(share, action.layer) else None
