"""The routed experts of a layer: sort, two grouped products, combine. No host synchronisation.

A few tokens go through `few_experts` instead. For the others:

Quantised stacks are dequantised into scratch memory first, only the experts that have tokens, and in parts where the
scratch does not hold all; widened or bfloat16 stacks are used where they lie. Which products run is decided by shapes
alone, never by where tokens went or how a layer was cut into slabs, so results do not depend on that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from overspill.kernels.triton import grouped, grouped_torch
from overspill.kernels.triton.combine import combine
from overspill.kernels.triton.dequant import dequantize_into, plain_view
from overspill.kernels.triton.few_experts import Pairs, add_experts, can_add
from overspill.kernels.triton.grouped import Extras, Shape, Stacks
from overspill.kernels.triton.norm import Gated, gated
from overspill.kernels.triton.sort import Sorted, sort_pairs
from overspill.kernels.triton.wide import gate_up_of, stacks_in, wide_bytes
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.experts import Activation, ExpertVectors, ExpertWeights, sliced

_MAPS_KEPT = 1024
# torch picks its tile by rows per matrix; above this it is the large one for a whole layer and for any slab of it.
_MANY_ROWS = 128
_TORCH_ALIGNMENT = 16


class SlotMap(NamedTuple):
    """slot_of: int32 `[E]`, slot of each expert or -1. expert_of: int32 `[E']`, expert of each slot; None where the
    host does not know it, and it is worked out if need be."""

    slot_of: torch.Tensor
    expert_of: torch.Tensor | None


class SlotMaps:
    """Maps between experts and slots on a device, each sent there once; the least recently used are dropped.

    Those of experts that follow each other stay for good: they are few, and recorded work refers to them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._maps: OrderedDict[tuple[int, bytes], SlotMap] = OrderedDict()
        self._of_runs: dict[tuple[int, bytes], SlotMap] = {}

    def of(self, weights: ExpertWeights) -> SlotMap:
        """The maps of a stack. Sends them without waiting when they are new, which no graph capture allows."""
        n_slots = weights.gate.shape[0]
        if isinstance(weights.slot_of, torch.Tensor):
            return SlotMap(weights.slot_of, None)
        slot_of = np.arange(n_slots, dtype=np.int32) if weights.slot_of is None else weights.slot_of
        key = (n_slots, slot_of.tobytes())
        if key in self._of_runs:
            return self._of_runs[key]
        if _is_run(slot_of):
            self._of_runs[key] = self._send(slot_of, n_slots)
            return self._of_runs[key]
        if key not in self._maps:
            self._maps[key] = self._send(slot_of, n_slots)
            if len(self._maps) > _MAPS_KEPT:
                self._maps.popitem(last=False)
        self._maps.move_to_end(key)
        return self._maps[key]

    def _send(self, slot_of: npt.NDArray[np.int32], n_slots: int) -> SlotMap:
        expert_of = np.zeros(n_slots, np.int32)
        (present,) = np.nonzero(slot_of >= 0)
        expert_of[slot_of[present]] = present
        return SlotMap(*(torch.from_numpy(m.copy()).to(self._device, non_blocking=True) for m in (slot_of, expert_of)))


def _is_run(slot_of: npt.NDArray[np.int32]) -> bool:
    (present,) = np.nonzero(slot_of >= 0)
    return len(present) > 0 and int(present[-1] - present[0]) == len(present) - 1


class _Part(NamedTuple):
    """Slots `first <= slot < first + n` of a stack."""

    first: int
    n: int


class _Plain(NamedTuple):
    """Experts that are used where they lie, and what every call with them needs. gate_up: see `gate_up_of`."""

    weights: ExpertWeights
    maps: SlotMap
    stacks: Stacks
    gate_up: torch.Tensor | None
    extras: Extras


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What is the same for all parts of a call."""

    shape: Shape
    tile_m: int
    activate: Gated
    is_for_torch: bool


class MoeOp:
    """`kernels.Experts` on one device. dtype: of hidden values and plain weights. may_use_torch: see the module."""

    def __init__(self, workspace: Workspace, dtype: torch.dtype, *, may_use_torch: bool) -> None:
        self._workspace = workspace
        self._dtype = dtype
        self._may_use_torch = may_use_torch
        self._maps = SlotMaps(workspace.device)
        self._plain: _Plain | None = None

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        mix: torch.Tensor,
        weights: ExpertWeights,
        activation: Activation,
        out: torch.Tensor,
    ) -> None:
        """See `kernels.Experts`; `out` is float32, its rows contiguous, `x` of any float."""
        plain = self._plain_of(weights)
        maps = self._maps.of(weights) if plain is None else plain.maps
        if can_add(x.shape[0], weights.parts):
            self._add_few(x, Pairs(ids, mix, maps.slot_of, weights.n_slices), weights, activation, out)
            return
        x = x.to(self._dtype)
        ids, mix = (given.contiguous() for given in sliced(ids, mix, weights.n_slices))
        n_pairs, n_experts = ids.numel(), maps.slot_of.shape[0]
        job = _Job(
            shape=Shape(ids.shape[1], *_widths(weights)),
            tile_m=grouped.tile_rows(n_pairs, n_experts),
            activate=gated(activation, weights.vectors.limit),
            is_for_torch=self._is_for_torch(n_pairs / n_experts, weights),
        )
        if plain is not None:
            rows = sort_pairs(ids, maps.slot_of, 0, weights.gate.shape[0], job.tile_m, self._workspace)
            y = self._products(x, rows, plain.stacks, plain.gate_up, plain.extras, job)
            combine(out, y, ids, mix, rows.inverse)
            return
        for part in self._parts(weights):
            rows = sort_pairs(ids, maps.slot_of, part.first, part.n, job.tile_m, self._workspace)
            stacks = self._dequantised(weights, part, rows)
            y = self._products(x, rows, stacks, gate_up_of(stacks), _extras(weights.vectors, maps, part), job)
            combine(out, y, ids, mix, rows.inverse)

    def _plain_of(self, weights: ExpertWeights) -> _Plain | None:
        """None where they have to be dequantised. The latest are kept: all ubatches of a wave use a layer's in turn."""
        if self._plain is None or self._plain.weights is not weights:
            views = [plain_view(q, self._dtype) for q in weights.parts]
            if any(view is None for view in views):
                return None
            maps, stacks = self._maps.of(weights), Stacks(*(view for view in views if view is not None))
            extras = _extras(weights.vectors, maps, _Part(0, weights.gate.shape[0]))
            self._plain = _Plain(weights, maps, stacks, gate_up_of(stacks), extras)
        return self._plain

    def _add_few(
        self, x: torch.Tensor, pairs: Pairs, weights: ExpertWeights, activation: Activation, out: torch.Tensor
    ) -> None:
        activate = gated(activation, weights.vectors.limit)
        add_experts(x, pairs, weights.parts, weights.vectors, activate, out, dtype=self._dtype)

    def _is_for_torch(self, rows_an_expert: float, weights: ExpertWeights) -> bool:
        aligned = all(width * self._dtype.itemsize % _TORCH_ALIGNMENT == 0 for width in _widths(weights))
        return self._may_use_torch and aligned and weights.vectors.is_empty and rows_an_expert > _MANY_ROWS

    def _parts(self, weights: ExpertWeights) -> Iterator[_Part]:
        n, F, D = weights.gate.shape
        n_fit = max(1, self._workspace.weight_bytes // wide_bytes(1, D, F, dtype=self._dtype))
        for first in range(0, n, n_fit):
            yield _Part(first, min(n_fit, n - first))

    def _dequantised(self, weights: ExpertWeights, part: _Part, rows: Sorted) -> Stacks:
        """The part's matrices as plain numbers; experts without tokens stay undefined."""
        _, F, D = weights.gate.shape
        buffer = self._workspace.reserve("weights", wide_bytes(part.n, D, F, dtype=self._dtype))
        scratch = stacks_in(buffer, part.n, F, D, self._dtype)
        for q, stack in zip(weights.parts, scratch, strict=True):
            dequantize_into(q, stack, first=part.first, offsets=rows.offsets)
        return scratch

    def _products(
        self, x: torch.Tensor, rows: Sorted, stacks: Stacks, gate_up: torch.Tensor | None, extras: Extras, job: _Job
    ) -> torch.Tensor:
        """The output of every row of work, `[T K, D]`; rows from offsets[-1] on are not defined."""
        n_rows, shape = rows.order.shape[0], job.shape
        hidden = self._workspace.take("hidden", (n_rows, shape.F), self._dtype)
        y = self._workspace.take("outputs", (n_rows, shape.D), self._dtype)
        if job.is_for_torch and gate_up is not None:
            return grouped_torch.products(x, gate_up, stacks.down, rows, shape.n_used, job.activate, y, hidden)
        grouped.gate_up(x, stacks, rows, hidden, extras, shape, job.activate, job.tile_m)
        grouped.down(hidden, stacks, rows, y, extras, shape, job.tile_m)
        return y


def _widths(weights: ExpertWeights) -> tuple[int, int]:
    """D and F."""
    _, F, D = weights.gate.shape
    return D, F


def _extras(vectors: ExpertVectors, maps: SlotMap, part: _Part) -> Extras:
    if vectors.is_empty:
        return Extras(None, vectors.scales, vectors.biases)
    known = _inverse(maps.slot_of, part.first + part.n) if maps.expert_of is None else maps.expert_of
    return Extras(known[part.first :], vectors.scales, vectors.biases)


def _inverse(slot_of: torch.Tensor, n_slots: int) -> torch.Tensor:
    """The expert of each of the first slots; 0 where there is none."""
    expert_of = torch.zeros(n_slots + 1, dtype=torch.int32, device=slot_of.device)
    slots = torch.where((slot_of < 0) | (slot_of > n_slots), n_slots, slot_of)
    experts = torch.arange(len(slot_of), dtype=torch.int32, device=slot_of.device)
    return expert_of.scatter_(0, slots.long(), experts)[:n_slots]
