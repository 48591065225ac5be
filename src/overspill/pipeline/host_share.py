"""The CPU's part of a step, prepared once and run for every token: all letters and experts in one compiled call.

It stands on the way between accelerators' kernels, so all that can be is done when a step is recorded: letters are
opened where they lie, answers are written where they will be fetched, and Python has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from overspill.kernels import Ops, cpu
from overspill.kernels.numba import PreparedExperts
from overspill.kernels.numba.crew import Crew
from overspill.kernels.numba.mail import Opening, Waiting, open_address, raise_address, wait_address
from overspill.kernels.numba.native import Step
from overspill.kernels.numba.pieces import Pieces
from overspill.models.base import Model, Routing
from overspill.pipeline.letters import Letter
from overspill.pipeline.schedule import Action
from overspill.pipeline.upload import HostExperts
from overspill.quant.experts import Activation, ExpertWeights


class HostShare:
    """The CPU's share of one layer's experts.

    told: the letter with normed input, ids, mix, and who computes which slice of an expert; the host computes whole
    experts. answer: the one that goes back.
    """

    def __init__(self, told: Letter, answer: Letter, n_tokens: int, party: int, normed: torch.dtype) -> None:
        self._told = told
        self._answer = answer
        self._party = party
        normed_box, ids, mix, self._who = told.boxes
        (out,) = answer.boxes
        self._normed = normed_box.view(normed)
        self._out = out.view(torch.float32).view(n_tokens, -1)
        self._x = torch.zeros(self._out.shape)
        self._routing = Routing(self._x, ids.view(n_tokens, -1), mix.view(torch.float32).view(n_tokens, -1))
        self._prepared: PreparedExperts | None = None

    def prepare(self, model: Model, action: Action, experts: HostExperts, host_ops: Ops) -> bool:
        """Ask the model what it would have the kernels do. False where that cannot be prepared."""

        def keep(
            x: torch.Tensor,
            ids: torch.Tensor,
            mix: torch.Tensor,
            weights: ExpertWeights,
            activation: Activation,
            out: torch.Tensor,
        ) -> None:
            self._prepared = cpu.prepare_experts(x, ids, mix, weights, activation, out)

        self._n_slices = action.n_slices
        self._slot_of = np.full(experts.n_experts, -1, np.int32)
        weights = replace(experts.in_place(), slot_of=self._slot_of)
        ops = replace(host_ops, experts=keep, token_experts=None)
        model.experts(action.layer, self._out, self._routing, weights, ops)
        return self._prepared is not None

    def steps(self, number: torch.Tensor, late: torch.Tensor, pieces: Pieces) -> list[Step]:
        """Wait for the letter, compute, send the answer. number, late: int64 `[1]` in pinned memory."""
        assert self._prepared is not None
        opening = Opening(
            normed=self._normed.data_ptr(),
            n_bytes=self._normed.itemsize,
            n_values=self._x.numel(),
            x=self._x.data_ptr(),
            who=self._who.data_ptr(),
            n_experts=len(self._slot_of),
            n_slices=self._n_slices,
            party=self._party,
            slot_of=self._slot_of.__array_interface__["data"][0],
            out=self._out.data_ptr(),
            n_out=self._out.numel(),
        )
        return [
            Step(wait_address(), _waiting(self._told, number, late, pieces)),
            Step(open_address(), _written(opening, pieces)),
            *self._prepared.steps,
            Step(raise_address(), _waiting(self._answer, number, late, pieces)),
        ]

    def check(self) -> None:
        """After the steps. Raises IndexError for ids that are no experts."""
        assert self._prepared is not None
        self._prepared.check()


class HostShares:
    """The CPU's shares of all layers of a step."""

    def __init__(self, shares: Sequence[HostShare], number: torch.Tensor, late: torch.Tensor, n_threads: int) -> None:
        self._shares = shares
        pieces = Pieces()
        steps = [step for share in shares for step in share.steps(number, late, pieces)]
        self._crew = Crew(steps, n_threads, pieces.kept)

    def run(self) -> None:
        """Compute what the letters ask for."""
        self._crew.run()
        for share in self._shares:
            share.check()


def _waiting(letter: Letter, number: torch.Tensor, late: torch.Tensor, pieces: Pieces) -> int:
    flags = letter.flags
    return _written(Waiting(flags.data_ptr(), len(flags), number.data_ptr(), late.data_ptr()), pieces)


def _written(fields: Waiting | Opening, pieces: Pieces) -> int:
    memory = pieces.memory("fields", 8 * len(fields))
    memory.write(tuple(fields))
    return memory.address
