"""How a staged slab goes up and lies in its slot, see `pipeline.slabs`.

In the slot its gate, up and down parts stand one behind the other, each
from an aligned offset; in host RAM each part is one contiguous range of the stacked tensor, so a whole slab is three
copies, and a slab of which only some experts go up three per run of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.device.base import Buffer, Part
from overspill.gguf.types import TensorType
from overspill.pipeline.slabs import ALIGNMENT, WIDE_VALUE_BYTES, align
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor


@dataclass(frozen=True, eq=False)
class HostPart:
    """One stacked expert tensor in host RAM: `[E, rows, cols]` of `type`, in a buffer of its own."""

    buffer: Buffer
    type: TensorType
    shape: tuple[int, int, int]

    @property
    def expert_bytes(self) -> int:
        return self.shape[1] * self.type.row_bytes(self.shape[2])

    def stacked(self, raw: torch.Tensor, n_experts: int) -> QTensor:
        """View `n_experts` experts at the start of `raw` (uint8) as a stack."""
        return QTensor.from_bytes(raw[: n_experts * self.expert_bytes], self.type, (n_experts, *self.shape[1:]))


@dataclass(frozen=True, eq=False)
class HostExperts:
    """The routed experts of one layer in host RAM; a part that lives on the layer's device is None.

    parts: gate, up, down. n_experts: of the layer. vectors: their biases and scales, for the CPU; the layer's device
    has its own.
    """

    parts: tuple[HostPart | None, HostPart | None, HostPart | None]
    n_experts: int
    vectors: ExpertVectors

    @property
    def host_parts(self) -> Iterator[HostPart]:
        """The parts that have to go up."""
        return (part for part in self.parts if part is not None)

    @property
    def n_bytes(self) -> int:
        return self.n_experts * sum(part.expert_bytes for part in self.host_parts)

    def n_in(self, n_bytes: int) -> int:
        """How many experts have room in so many bytes, each part from an aligned offset."""
        sizes = [part.expert_bytes for part in self.host_parts]
        return min(self.n_experts, (n_bytes - len(sizes) * (ALIGNMENT - 1)) // sum(sizes))

    def of_party(self, who: torch.Tensor, party: int) -> ExpertWeights:
        """Those that a party computes, where they are, for the CPU. who: int32 `[E n_slices]` on the host."""
        mine = who.view(self.n_experts, -1)[:, 0].numpy() == party
        slot_of = np.where(mine, np.arange(self.n_experts, dtype=np.int32), np.int32(-1))
        return replace(self.in_place(), slot_of=slot_of)

    def in_place(self) -> ExpertWeights:
        """All experts where they are, for the CPU; every part must be on the host."""
        gate, up, down = (part.stacked(part.buffer.host_tensor, self.n_experts) for part in self.host_parts)
        return ExpertWeights(gate, up, down, vectors=self.vectors)


class Run(NamedTuple):
    """Experts `first <= e < first + n`, one behind the other from place `at` of a slab on."""

    at: int
    first: int
    n: int


def runs_of(ids: Sequence[int], but: Collection[int] = ()) -> list[Run]:
    """Neighbours among the experts `ids` (ascending) of a slab, as long as they get. but: without these."""
    places = [at for at, e in enumerate(ids) if e not in but]
    runs, start = [], 0
    for i in range(1, len(places) + 1):
        if i == len(places) or ids[places[i]] != ids[places[i - 1]] + 1:
            runs.append(Run(places[start], ids[places[start]], i - start))
            start = i
    return runs


def upload_parts(experts: HostExperts, ids: Sequence[int], held: Collection[int] = ()) -> list[Part]:
    """Copies that bring the experts `ids` (ascending) into a slot, each to its place; held: but for these."""
    copies = []
    base, runs = 0, runs_of(ids, held)
    for part in experts.host_parts:
        size = part.expert_bytes
        copies += [Part(part.buffer, first * size, base + at * size, n * size) for at, first, n in runs]
        base = align(base + len(ids) * size)
    return copies


def staged(
    experts: HostExperts,
    ids: Sequence[int],
    slot: torch.Tensor,
    resident: Callable[[int], QTensor],
    vectors: ExpertVectors,
) -> ExpertWeights:
    """The experts `ids` as they lie in a slot (uint8) that `upload_parts` of the same ids has filled.

    resident: the whole stack of part 0, 1 or 2 (gate, up, down) if it is on the device; `ids` is a range in that case.
    vectors: biases and scales of all the layer's experts, on the device.
    """
    stacks: list[QTensor] = []
    base = 0
    for i, part in enumerate(experts.parts):
        if part is None:
            stacks.append(resident(i).rows(ids[0], ids[-1] + 1))
        else:
            stacks.append(part.stacked(slot[base:], len(ids)))
            base = align(base + len(ids) * part.expert_bytes)
    return ExpertWeights(stacks[0], stacks[1], stacks[2], _slot_of(experts.n_experts, ids), vectors)


def widened(
    experts: HostExperts,
    ids: Sequence[int],
    wide: torch.Tensor,
    resident: Callable[[int], QTensor],
    vectors: ExpertVectors,
) -> ExpertWeights:
    """The experts `ids` as they lie, in bfloat16, in the buffer of a dequantised slab (uint8).

    Gate and up of an expert stand one behind the other, `[E', 2 F, D]`, so that one product can serve both.
    """
    shapes = [part.shape[1:] if part is not None else resident(i).shape[1:] for i, part in enumerate(experts.parts)]
    gate, up, down = _plain_stacks(wide, len(ids), *shapes[0])
    return ExpertWeights(gate, up, down, _slot_of(experts.n_experts, ids), vectors)


def widened_alike(weights: ExpertWeights, wide: torch.Tensor) -> ExpertWeights:
    """Room for experts whose slots only the device knows, laid out like `widened`."""
    n, n_hidden, n_model = weights.gate.shape
    gate, up, down = _plain_stacks(wide, n, n_hidden, n_model)
    return replace(weights, gate=gate, up=up, down=down)


def _plain_stacks(wide: torch.Tensor, n: int, n_hidden: int, n_model: int) -> tuple[QTensor, QTensor, QTensor]:
    n_bytes = n * 2 * n_hidden * n_model * WIDE_VALUE_BYTES
    both = QTensor.from_bytes(wide[:n_bytes], TensorType.BF16, (n, 2 * n_hidden, n_model))
    gate = QTensor(both.data[:, :n_hidden], TensorType.BF16, (n, n_hidden, n_model))
    up = QTensor(both.data[:, n_hidden:], TensorType.BF16, (n, n_hidden, n_model))
    rest = wide[n_bytes : n_bytes + n_bytes // 2]
    return gate, up, QTensor.from_bytes(rest, TensorType.BF16, (n, n_model, n_hidden))


def _slot_of(n_experts: int, ids: Sequence[int]) -> NDArray[np.int32]:
    slot_of = np.full(n_experts, -1, np.int32)
    slot_of[list(ids)] = np.arange(len(ids), dtype=np.int32)
    return slot_of
