"""Slabs in staging slots: what each holds in a wave, what of it goes up, and how it lies on the device.

A slab holds a range of a layer's experts or, where ids were read, those that they name. Of these the ones that the
device keeps (`pipeline.expert_cache`) do not go up: they are placed in the slab from their slots of the cache, in the
memory of the device, before it is used. So a slab lies in its slot as if all of it had come up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch

from overspill.device.base import Stream
from overspill.kernels.sharing import CacheState
from overspill.kernels.spread import stacks_in
from overspill.models.base import Model
from overspill.pipeline.memory import Memory
from overspill.pipeline.ring import PinnedRing
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.split import Layout
from overspill.pipeline.upload import HostExperts, runs_of, staged, upload_parts, widened
from overspill.quant.experts import ExpertWeights

Held = Mapping[int, Collection[int]]
"""Experts that the devices of their layers keep, by layer; none of layers that are not named."""

NOTHING_HELD: Held = MappingProxyType({})


class Staging:
    """The slabs of one model. rings: for experts that are not pinned, by accelerator."""

    def __init__(
        self,
        model: Model,
        layout: Layout,
        memory: Memory,
        host_experts: Mapping[int, HostExperts],
        rings: Mapping[int, PinnedRing],
    ) -> None:
        self._model = model
        self._layout = layout
        self._memory = memory
        self._host_experts = host_experts
        self._rings = rings
        self._held = NOTHING_HELD
        self._chosen: dict[tuple[int, int], Sequence[int]] = {}
        self._wide: dict[tuple[int, int, int], ExpertWeights] = {}

    def begin_wave(self, held: Held) -> None:
        """Slabs hold the experts of the layout again. held: those that need not go up."""
        self._chosen.clear()
        self._held = held

    def select(self, i_layer: int, ids: set[int]) -> None:
        """From now on the layer's slabs hold these experts only, packed into as few slabs as possible."""
        ordered = deque(sorted(ids))
        for i_slab, slab in enumerate(self._layout.slabs[i_layer]):
            n = min(slab.n_experts, len(ordered))
            self._chosen[i_layer, i_slab] = [ordered.popleft() for _ in range(n)]

    def is_selected(self, action: Action) -> bool:
        """Whether ids say what the slab of an action holds."""
        return (action.layer, action.slab) in self._chosen

    def has_work(self, action: Action) -> bool:
        """Whether there is something to do: the experts selected may all have found room in earlier slabs, and none of
        a slab may lie in the cache."""
        if action.slab < 0:
            return True
        return bool(self._placed(action) if action.verb is Verb.PLACE else self._ids_of(action))

    def placed_bytes(self, action: Action) -> int:
        """What PLACE copies."""
        experts = self._host_experts[action.layer]
        return len(self._placed(action)) * experts.n_bytes // experts.n_experts

    def upload(self, action: Action, stream: Stream) -> None:
        """Give the copies of a slab to the stream."""
        parts = upload_parts(self._host_experts[action.layer], self._ids_of(action), self._held_of(action))
        slot = self._memory.one(("slot", action.device, action.slot))
        pinned = [part for part in parts if part.src.is_pinned]
        if pinned:
            stream.upload(slot, pinned, label=action.label)
        if len(pinned) < len(parts):
            pageable = [part for part in parts if not part.src.is_pinned]
            self._rings[action.device].upload(stream, slot, pageable, label=action.label)

    def place(self, action: Action) -> Callable[[], None]:
        """What the device keeps of a slab, to where the slab has it."""
        ids, ops, held = self._ids_of(action), self._model.ops(action.layer), self._held_of(action)
        runs = [run for run in runs_of(ids) if any(e in held for e in range(run.first, run.first + run.n))]

        def body() -> None:
            slots, state = self.kept(action)
            stacks = stacks_in(slots, self._host_experts[action.layer].in_place().parts, action.n_slices)
            kept = ExpertWeights(*stacks, state.slot_of, n_slices=action.n_slices)
            parts = self._staged(action, ids).parts
            for at, first, n in runs:
                ops.place(kept, [part.rows(at, at + n) for part in parts], first)

        return body

    def widen(self, action: Action) -> Callable[[], None]:
        """Dequantise a slab."""
        ids, ops = self._ids_of(action), self._model.ops(action.layer)
        assert ops.widen is not None
        widen = ops.widen

        def body() -> None:
            widen(self._staged(action, ids), self._widened(action, ids))

        return body

    def weights(self, action: Action) -> Callable[[], ExpertWeights]:
        """The experts of the slab that an action reads, in its slot or dequantised; for work on the device."""
        find = self._widened if ("wide", action.device) in action.reads else self._staged
        return partial(find, action, self._ids_of(action))

    def kept(self, action: Action) -> tuple[torch.Tensor, CacheState]:
        """The slots of a layer's cache, and what is in them."""
        slots, state = self._memory["cache", action.layer]
        experts, n_slices = self._host_experts[action.layer], action.n_slices
        known = state.tensor[:, : experts.n_experts * n_slices]
        return slots.tensor, CacheState(experts.n_in(slots.n_bytes) * n_slices, n_slices, *known)

    def _ids_of(self, action: Action) -> Sequence[int]:
        chosen = self._chosen.get((action.layer, action.slab))
        return range(*self._layout.slabs[action.layer][action.slab]) if chosen is None else chosen

    def _held_of(self, action: Action) -> Collection[int]:
        return self._held.get(action.layer, ())

    def _placed(self, action: Action) -> list[int]:
        held = self._held_of(action)
        return [e for e in self._ids_of(action) if e in held]

    def _staged(self, action: Action, ids: Sequence[int]) -> ExpertWeights:
        layer, slot = action.layer, self._memory.one(("slot", action.device, action.slot))
        resident = partial(self._model.resident_part, layer)
        return staged(self._host_experts[layer], ids, slot.tensor, resident, self._model.expert_vectors(layer))

    def _widened(self, action: Action, ids: Sequence[int]) -> ExpertWeights:
        layer, wide = action.layer, self._memory.one(("wide", action.device)).tensor
        key = layer, action.slab, len(ids)
        known = self._wide.get(key)
        if known is None or isinstance(ids, list):
            resident = partial(self._model.resident_part, layer)
            known = widened(self._host_experts[layer], ids, wide, resident, self._model.expert_vectors(layer))
            if not isinstance(ids, list):
                self._wide[key] = known
        return known
