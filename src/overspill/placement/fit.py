"""Chooses what the user's flags leave open, so that no device is ever over its memory.

In this order, each step only if the one before is not enough:
1. everything resident, layers split by free memory (`balanced`: first tried with equal slices);
2. routed experts of as few layers as necessary in host RAM. Counts of layers shift between devices until the busiest
   link has the least to upload, which spreads the host layers evenly; a small staging ring is taken where the layers
   it keeps resident outweigh its slower uploads, that is, where the model nearly fits;
3. a lower context, if the user has set none, not below `-fitc`: until a full-size staging ring fits again, and keys and
   values in host RAM take at most half of what weights leave there;
4. leading layers computed by the CPU, if the user has set no `-ngl`.
Flags are constraints here, never overruled: what they make impossible is reported with needed and free bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overspill.placement.search import (
    Ask,
    Layout,
    counts_by_memory,
    counts_by_uploads,
    equal_counts,
    improve,
    lay_out,
    own_bytes,
    relieve,
    spare_bytes,
)

_CELLS: Final = 256
_TIGHT: Final = 8
"""A small staging slot holds 1 / _TIGHT of a layer's experts."""


def literal(ask: Ask) -> Layout:
    """The flags as they are (`-fit off`): nothing is moved, whether it fits or not."""
    return lay_out(ask, counts_by_memory(ask), ask.demand.n_expert)


def fit(ask: Ask) -> Layout:
    """The best layout found; over memory only if no allowed change makes it fit."""
    layout = _fit_context(ask)
    if not (ask.is_front_open and layout.is_over_on_devices):
        return layout
    return _move_front(replace(ask, n_ctx=ask.lowest_ctx)) or layout


def largest_resident_context(ask: Ask, layout: Layout) -> int | None:
    """A context with which every routed expert would be resident, as large as found; None if none is allowed."""
    lowest = _fit_experts(replace(ask, n_ctx=ask.lowest_ctx), layout.counts)
    if layout.n_ctx == ask.lowest_ctx or not lowest.is_resident:
        return None
    cells = [
        spare_bytes(ask, lowest, device) // per_cell
        for device, per_cell in enumerate(_kv_per_cell(ask, lowest))
        if per_cell
    ]
    step = _CELLS * ask.n_parallel
    return max(lowest.n_ctx, (lowest.n_ctx + min(cells)) // step * step) if cells else None


def _fit_context(ask: Ask) -> Layout:
    """Step 3: the largest context, in steps of 256 cells a sequence, that leaves room for full-size rings."""
    layout = _fit_experts(ask)
    if ask.n_ctx == ask.lowest_ctx or _is_roomy(ask, layout):
        return layout
    best = _fit_experts(replace(ask, n_ctx=ask.lowest_ctx))
    if not _is_roomy(ask, best):
        return best
    step = _CELLS * ask.n_parallel
    low, high = ask.lowest_ctx // step, min(ask.n_ctx, _most_cells(ask)) // step + 1
    # Shifting layers at each trial is slow: only until the context is known to a sixteenth.
    for precision, search in ((16, improve), (high, _as_it_is)):
        while high - low > max(1, low // precision):
            middle = (low + high) // 2
            trial = replace(ask, n_ctx=middle * step)
            layout = search(trial, lay_out(trial, best.counts, best.slab_limit))
            if _is_roomy(ask, layout):
                best, low = layout, middle
            else:
                high = middle
    return best


def _is_roomy(ask: Ask, layout: Layout) -> bool:
    """Rings have their size, and a context that nobody asked for leaves room in host RAM, where other programs live."""
    host = layout.projection.shares[-1]
    needed = host.compute_bytes + (0 if ask.demand.is_host_mapped else host.weights_bytes)
    left = ask.demand.capacity[-1] - needed
    return layout.projection.is_roomy and host.kv_bytes <= max(0, left) // 2


def _as_it_is(_: Ask, layout: Layout) -> Layout:
    return layout


def _most_cells(ask: Ask) -> int:
    """More context cells than this the devices cannot hold together, where they compute all layers."""
    demand = ask.demand
    per_cell = sum(demand.kv_per_cell)
    if ask.n_front or ask.pins.layer_device or not per_cell:
        return ask.n_ctx
    return max(0, sum(demand.capacity[d] for d in ask.used) - sum(demand.fixed)) // per_cell


def _move_front(ask: Ask) -> Layout | None:
    """As few leading layers as possible on the CPU; None if the devices are over even without any layer."""
    best = _without_layers(ask)
    too_few = ask.n_front
    while best is not None and best.has_output and best.n_front - too_few > 1:
        layout = _fit_experts(replace(ask, n_front=(too_few + best.n_front) // 2))
        if layout.is_over_on_devices:
            too_few = layout.n_front
        else:
            best = layout
    return best


def _without_layers(ask: Ask) -> Layout | None:
    """Only the output on a device, or nothing; None if even `-ot` items alone are over."""
    for has_output in (True, False) if ask.used else (False,):
        layout = _fit_experts(replace(ask, n_front=len(ask.demand.fixed), has_output=has_output))
        if not layout.is_over_on_devices:
            return layout
    return None


def _fit_experts(ask: Ask, hint: tuple[int, ...] | None = None) -> Layout:
    """Steps 1 and 2, for one context and one number of leading layers on the CPU. `hint`: counts to start from."""
    best = _search(ask, ask.demand.n_expert, hint)
    shares = best.projection.shares
    ring_bytes = max((share.staging.n_bytes for share in shares if share.staging), default=0)
    # A small ring frees less than a full one takes: far from fitting it cannot halve the uploads.
    is_far = best.busiest_load > 3 * ring_bytes and all(share.n_slabs == 1 for share in shares)
    if best.busiest_load == 0 or is_far:
        return best
    tight = _search(ask, max(1, ask.demand.n_expert // _TIGHT), hint)
    is_better = not tight.is_over_on_devices and tight.busiest_load < best.busiest_load
    return tight if is_better else best


def _search(ask: Ask, slab_limit: int, hint: tuple[int, ...] | None) -> Layout:
    by_memory = lay_out(ask, hint or counts_by_memory(ask), slab_limit)
    if ask.shares is not None:
        return by_memory
    if ask.is_balanced:
        return _search_balanced(ask, by_memory)
    if by_memory.is_resident:
        return by_memory
    if hint or _may_be_resident(ask):
        by_memory = improve(ask, by_memory)
        if hint or by_memory.is_resident:
            return by_memory
    by_uploads = improve(ask, lay_out(ask, counts_by_uploads(ask), slab_limit))
    return min(by_uploads, by_memory, key=lambda layout: layout.score)


def _may_be_resident(ask: Ask) -> bool:
    """Whether the devices together could hold all the layers that they compute."""
    demand = ask.demand
    n_bytes = own_bytes(ask) * (len(demand.fixed) - ask.n_front) + sum(demand.movable[ask.n_front :])
    return n_bytes <= sum(demand.capacity[d] for d in ask.used)


def _search_balanced(ask: Ask, by_memory: Layout) -> Layout:
    """Equal slices, unless only unequal ones keep every expert resident, or fit at all."""
    equal = lay_out(ask, equal_counts(ask), by_memory.slab_limit)
    if equal.is_resident:
        return equal
    resident = improve(ask, by_memory)
    return resident if resident.is_resident else relieve(ask, equal)


def _kv_per_cell(ask: Ask, layout: Layout) -> list[int]:
    """By device, what a further context cell takes at most."""
    per_cell = [0] * len(ask.demand.capacity)
    for layer, device in enumerate(layout.layer_device):
        is_growing = layout.n_ctx < ask.demand.rings[layer].n_cells * ask.n_parallel
        per_cell[device] += ask.demand.kv_per_cell[layer] + is_growing * ask.demand.rings[layer].cell_bytes
    return per_cell
