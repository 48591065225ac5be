"""The CPU's share of a layer's experts in a decoding step, prepared once and run for every token.

It stands on the way between two accelerators' kernels, so all that can be is done when a step is recorded: the
letter's boxes are read where they are, the answer is written where it will be fetched, and the compiled call knows all
its addresses.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from overspill.kernels import Ops, cpu
from overspill.kernels.numba import PreparedExperts
from overspill.models.base import Model, Routing
from overspill.pipeline.upload import HostExperts
from overspill.quant.experts import Activation, ExpertWeights


class HostShare:
    """boxes: what the owner sends: normed input, ids, mix, and who computes which expert. answer: int32 words."""

    def __init__(self, boxes: list[torch.Tensor], answer: torch.Tensor, n_tokens: int, party: int) -> None:
        normed, ids, mix, who = boxes
        self._party = party
        self._who = who.numpy()
        self._slot_of = np.full(len(who), -1, np.int32)
        self._experts = np.arange(len(who), dtype=np.int32)
        self._answer = answer.view(torch.float32).view(n_tokens, -1)
        self._normed = normed.view(torch.bfloat16).view(n_tokens, -1)
        self._x = torch.zeros(self._answer.shape)
        self._routing = Routing(self._x, ids.view(n_tokens, -1), mix.view(torch.float32).view(n_tokens, -1))
        self._prepared: PreparedExperts | None = None

    def prepare(self, model: Model, i_layer: int, experts: HostExperts, host_ops: Ops) -> bool:
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

        weights = replace(experts.in_place(), slot_of=self._slot_of)
        model.experts(i_layer, self._answer, self._routing, weights, replace(host_ops, experts=keep))
        return self._prepared is not None

    def run(self) -> None:
        """Compute what the letter asks for."""
        assert self._prepared is not None
        self._x.copy_(self._normed)
        self._slot_of.fill(-1)
        np.copyto(self._slot_of, self._experts, where=self._who == self._party)
        self._answer.zero_()
        self._prepared.run()
