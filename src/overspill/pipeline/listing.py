"""What each device does in a step that is recorded, from the actions of its wave.

Letters that are only added up are not taken out of their boxes before: the op that adds reads them there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from overspill.kernels import Ops
from overspill.kernels.sharing import Mail, Term
from overspill.pipeline.ledger import Resource
from overspill.pipeline.letters import Letter
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.step_work import StepWork, inputs_in
from overspill.pipeline.wave import Ubatch

Body = Callable[[], None]


class HostWork(NamedTuple):
    """Something the issuing thread does in a step: a letter to take or to send, or an action to compute."""

    action: Action
    letter: Letter | None = None


class Listing:
    """The lists of one step: `of` gives those of the accelerators, by number; `host` is the CPU's.

    inputs: pinned, what every accelerator reads first. late: pinned, see `kernels.triton.mail`.
    """

    def __init__(
        self,
        work: StepWork,
        memory: Memory,
        tables: Sequence[Ops],
        i_host: int,
        inputs: torch.Tensor,
        late: torch.Tensor,
    ) -> None:
        self._work = work
        self._memory = memory
        self._tables = tables
        self._i_host = i_host
        self._inputs = inputs
        self._late = late
        self._works: defaultdict[int, list[Body]] = defaultdict(list)
        self._unopened: defaultdict[int, dict[Resource, Letter]] = defaultdict(dict)
        self.host: list[HostWork] = []

    def of(self, listed: Sequence[Action], letters: Mapping[int, Letter], ubatch: Ubatch) -> dict[int, list[Body]]:
        """What accelerators do. letters: by `id` of their actions."""
        for action in listed:
            if action.verb is Verb.HAND_OFF:
                self._hand_off(action, letters[id(action)], ubatch)
            elif action.device == self._i_host:
                self.host.append(HostWork(action))
            elif action.verb is Verb.ADD:
                self._add(action, ubatch)
            else:
                self._open_all(action.device, ubatch)
                self._works[action.device].append(self._body(action, ubatch))
        return self._works

    def _body(self, action: Action, ubatch: Ubatch) -> Body:
        match action.verb:
            case Verb.INPUTS:
                return self._take_inputs(action.device)
            case Verb.DOWNLOAD:
                return self._download(action, ubatch)
            case _:
                return partial(self._work.compute, action, ubatch)

    # --- letters

    def _hand_off(self, action: Action, letter: Letter, ubatch: Ubatch) -> None:
        source, target = action.source, action.writes[0][1]
        assert isinstance(target, int)
        if not letter.is_copy:
            self._send(source, letter, ubatch)
        if target == self._i_host:
            self.host.append(HostWork(action, letter))
        elif len(action.writes) == 1:
            self._unopened[target][action.writes[0]] = letter
        else:
            self._open_all(target, ubatch)
            self._works[target].append(self._take(target, letter, ubatch))

    def _send(self, source: int, letter: Letter, ubatch: Ubatch) -> None:
        if source == self._i_host:
            self.host.append(HostWork(letter.action, letter))
            return
        self._open_all(source, ubatch)
        mail = self._mail_of(source)

        def body() -> None:
            parts = [part for r in letter.action.reads for part in self._work.rows(r, ubatch.n_tokens)]
            mail.put(self._number(source, ubatch), parts, letter.box, letter.flags)

        self._works[source].append(body)

    def _take(self, target: int, letter: Letter, ubatch: Ubatch) -> Body:
        mail = self._mail_of(target)

        def body() -> None:
            parts = [part for r in letter.action.writes for part in self._work.rows_to_write(r, ubatch.n_tokens)]
            mail.take(self._number(target, ubatch), parts, letter.box, letter.flags, self._late)

        return body

    def _open_all(self, device: int, ubatch: Ubatch) -> None:
        letters = self._unopened.pop(device, {})
        self._works[device] += [self._take(device, letter, ubatch) for letter in letters.values()]

    def _add(self, action: Action, ubatch: Ubatch) -> None:
        """Hidden states that hold more than the sum must lie there, those that are one may be read from their box."""
        device, mail, is_all = action.device, self._mail_of(action.device), self._work.adds_to_all
        summed = action.reads if is_all else action.reads[1:]
        letters = {r: self._unopened[device].pop(r) for r in summed if r in self._unopened[device]}
        self._open_all(device, ubatch)

        def term(resource: Resource) -> Term:
            letter = letters.get(resource)
            return Term(letter.box, letter.flags) if letter else Term(self._work.rows(resource, ubatch.n_tokens)[0])

        def body() -> None:
            terms = [term(resource) for resource in summed]
            number, x = self._number(device, ubatch), action.writes[0]
            if is_all:
                (out,) = self._work.rows_to_write(x, ubatch.n_tokens)
                mail.add(number, out, terms, self._late)
            else:
                part = self._work.added_to(x, ubatch.n_tokens)
                out = part.contiguous()
                mail.add(number, out, [Term(out), *terms], self._late)
                part.copy_(out)

        self._works[device].append(body)

    def _number(self, device: int, ubatch: Ubatch) -> torch.Tensor:
        return inputs_in(self._work.inputs[device].tensor, ubatch.n_tokens).number

    def _mail_of(self, i_device: int) -> Mail:
        mail = self._tables[i_device].mail
        assert mail is not None
        return mail

    # --- what the host gives and gets

    def _take_inputs(self, i_device: int) -> Body:
        copy, source = self._mail_of(i_device).copy, self._inputs.view(torch.int32)
        return lambda: copy(self._work.inputs[i_device].tensor, source)

    def _download(self, action: Action, ubatch: Ubatch) -> Body:
        (source,), (target,) = self._memory[action.reads[0]], self._memory[action.writes[0]]
        n_rows = len(self._work.output_rows(ubatch, action.chunk))
        wanted = target.host_tensor.view(torch.float32).view(-1, self._memory.n_vocab)[:n_rows]

        def body() -> None:
            wanted.copy_(source.tensor[:n_rows], non_blocking=True)

        return body
