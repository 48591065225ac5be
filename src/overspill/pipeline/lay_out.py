"""From a placement to the layout of a pipeline: slabs of layers, where embeddings are made, which hand-offs go around.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from overspill.options import MIB, Options
from overspill.pipeline.slabs import cut_slabs
from overspill.pipeline.split import Detour, Layout, Slab, detours
from overspill.placement.machine import Machine
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape, Role

_FASTER_THAN_HOST = 10


def with_embedding(
    shape: ModelShape, machine: Machine, placement: Placement, layout: Layout, kept: Sequence[int] = ()
) -> tuple[Placement, Layout]:
    """The token embedding on the device of the first layer, where it is faster than the host and has room for it.

    kept: bytes of each device that are not to be used, if any.
    """
    first = layout.layer_device[0]
    if (
        shape.has_lookup
        or first == layout.host
        or machine.devices[first].tflops * 1e3 < _FASTER_THAN_HOST * machine.cpu_gflops
    ):
        return placement, layout
    budget = placement.budgets[first]
    if budget.spare_bytes < shape.embed_bytes + machine.devices[first].reserve_bytes + sum(kept[first : first + 1]):
        return placement, layout
    more = replace(budget, weights_bytes=budget.weights_bytes + shape.embed_bytes)
    budgets = (*placement.budgets[:first], more, *placement.budgets[first + 1 :])
    return replace(placement, budgets=budgets), replace(layout, embed_on=first)


def with_detours(machine: Machine, options: Options, placement: Placement, layout: Layout) -> tuple[Placement, Layout]:
    """Hand-offs through host memory: everywhere, nowhere, or where direct ones have failed, as the user wants it."""
    if options.host_stage == "0":
        return placement, layout
    pairs = frozenset(permutations(range(len(machine.devices)), 2))
    if options.host_stage == "auto":
        pairs = frozenset(p for p in pairs if (machine.names[p[0]], machine.names[p[1]]) in machine.failing_pairs)
    layout = replace(layout, detour=Detour(pairs, options.host_stage_tile_mib * MIB))
    shown = ", ".join(f"{machine.names[i]} -> {machine.names[j]}" for i, j in detours(layout))
    if not shown:
        return placement, layout
    why = "-hs 1" if options.host_stage == "1" else "direct copies fail"
    return replace(placement, notes=(*placement.notes, f"hand-offs through host memory ({why}): {shown}")), layout


def layout_of(shape: ModelShape, machine: Machine, placement: Placement) -> Layout:
    """What the pipeline needs of a placement: devices of layers, and the slabs of layers with host experts."""
    host = machine.host_index
    slabs: list[tuple[Slab, ...]] = []
    mixed = set()
    for i_layer, device in enumerate(placement.layer_device):
        parts = [t for t in shape.tensors if t.layer == i_layer and t.role is Role.EXPERT]
        staged = [t.n_bytes // shape.n_expert for t in parts if placement.home[t.name] == host]
        staging = None if device == host else placement.staging[device]
        if staging and staged:
            slabs.append(cut_slabs(shape.n_expert, staged, staging.slot_bytes, at_most=staging.slab_experts))
        else:
            slabs.append(())
        if slabs[-1] and len(staged) < len(parts):
            mixed.add(i_layer)
    return Layout(host, placement.layer_device, placement.output_device, tuple(slabs), frozenset(mixed))
