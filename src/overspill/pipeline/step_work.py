"""The bodies of actions for decoding steps that are recorded: positions and ids lie on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from overspill.device.base import Buffer
from overspill.kernels import StateSteps, Steps
from overspill.models.base import UbatchView
from overspill.pipeline.host_share import HostShare
from overspill.pipeline.ledger import Resource
from overspill.pipeline.schedule import Action
from overspill.pipeline.staging import NOTHING_HELD, Held
from overspill.pipeline.wave import MAX_STEP_TOKENS, STEP_HEADER_WORDS, STEP_ROWS, Ubatch
from overspill.pipeline.work import Work


class Inputs(NamedTuple):
    """A step's inputs on one device: int64 `[1]` its number; int32 `[T]` each."""

    number: torch.Tensor
    positions: torch.Tensor
    ids: torch.Tensor
    slots: torch.Tensor
    states_before: torch.Tensor
    states_after: torch.Tensor


def inputs_in(words: torch.Tensor, n_tokens: int) -> Inputs:
    """Views of int32 `[STEP_WORDS]`."""
    rows = words[STEP_HEADER_WORDS:].view(STEP_ROWS, MAX_STEP_TOKENS)[:, :n_tokens]
    return Inputs(words[:STEP_HEADER_WORDS].view(torch.int64), *rows)


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.is_contiguous()


class StepWork(Work):
    """The bodies of actions, with positions and ids that lie on the device. inputs: by number of device, int32.

    What attention and routers compute is left where it is: nobody but the device's next actions reads it.
    """

    inputs: dict[int, Buffer]
    _latest: dict[Resource, list[torch.Tensor]]

    def begin_wave(self, ubatches: Sequence[Ubatch] = (), held: Held = NOTHING_HELD) -> None:
        super().begin_wave(ubatches, held)
        self._latest = {}

    def rows(self, resource: Resource, n_tokens: int) -> list[torch.Tensor]:
        return self._latest.get(resource) or super().rows(resource, n_tokens)

    def rows_to_write(self, resource: Resource, n_tokens: int) -> list[torch.Tensor]:
        """Where somebody else's rows go to; from now on these are the latest."""
        self._latest.pop(resource, None)
        return super().rows(resource, n_tokens)

    @property
    def adds_to_all(self) -> bool:
        """Whether experts are added to all of the hidden states."""
        return self._model.hparams.x_dim == self._model.hparams.n_embd

    def added_to(self, x: Resource, n_tokens: int) -> torch.Tensor:
        """What experts are added to of hidden states, which stay where they are."""
        return self._model.added_to(self.rows(x, n_tokens)[0])

    def _keep(self, resource: Resource, found: Sequence[torch.Tensor]) -> None:
        wanted = super().rows(resource, len(found[0]))
        if all(_are_alike(part, rows) for part, rows in zip(found, wanted, strict=True)):
            self._latest[resource] = list(found)
        else:
            self._latest.pop(resource, None)
            super()._keep(resource, found)

    def compute(self, action: Action, ubatch: Ubatch) -> None:
        """Do what an action that computes does, on its device."""
        self._compute[action.verb](action, ubatch)()

    def prepare(self, share: HostShare, action: Action) -> bool:
        """Prepare the CPU's share of a layer; False where that cannot be."""
        return share.prepare(self._model, action, self._host_experts[action.layer], self._host_ops)

    def _view(self, ubatch: Ubatch, device: int, m: int) -> UbatchView:
        if device == self._layout.host:
            raise AssertionError("layers of the CPU are not recorded")
        found = inputs_in(self.inputs[device].tensor, ubatch.n_tokens)
        return UbatchView(
            ubatch.segments,
            found.positions,
            found.ids,
            steps=Steps(found.slots, found.positions),
            state_rows=StateSteps(found.states_before, found.states_after),
        )

    def _ids(self, action: Action, ubatch: Ubatch) -> torch.Tensor:
        if action.device == self._layout.host:
            return super()._ids(action, ubatch)
        return inputs_in(self.inputs[action.device].tensor, ubatch.n_tokens).ids
