"""Chooses what the user's flags leave open, so that no device is ever over its memory.

In this order, each step only if the one before is not enough:
1. everything resident, layers split by free memory (`balanced`: first tried with equal slices);
2. routed experts of as few layers as necessary in host RAM. Counts of layers shift between devices until the busiest
   link has the least to upload, which spreads the host layers evenly; a small staging ring is taken where that at
   least halves the busiest link's bytes, that is, where the model nearly fits;
3. a lower context, if the user has set none, not below `-fitc`: until a full-size staging ring fits again;
4. leading layers computed by the CPU, if the user has set no `-ngl`.
Flags are constraints here, never overruled: what they make impossible is reported with needed and free bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from overspill.placement.layout import apportion, deal
from overspill.placement.override import Pins
from overspill.placement.project import Demand, Projection, project

_CELLS: Final = 256
_N_RECEIVERS: Final = 3
_TIGHT: Final = 8
"""A small staging slot holds 1 / _TIGHT of a layer's experts."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be placed, and what is fixed about it.

    used: devices that may compute. shares: of the user, per used device, or None. n_front: leading layers on the CPU.
    has_output: whether a device computes the output. is_front_open: fit may raise `n_front`. n_ctx, lowest_ctx:
    context cells wanted and acceptable (equal where the user has set them). n_parallel: sequences that share them.
    """

    demand: Demand
    pins: Pins
    used: tuple[int, ...]
    shares: tuple[float, ...] | None
    grain: int
    n_front: int
    has_output: bool
    is_front_open: bool
    is_balanced: bool
    n_ctx: int
    lowest_ctx: int
    n_parallel: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to place it. counts: layers per used device before `-ot` moves any. slab_limit: most experts a slab."""

    counts: tuple[int, ...]
    n_front: int
    has_output: bool
    n_ctx: int
    slab_limit: int
    layer_device: tuple[int, ...]
    output_device: int
    projection: Projection

    @property
    def is_resident(self) -> bool:
        return self.projection.is_fitting and not any(self.projection.upload_bytes)

    @property
    def busiest_bytes(self) -> int:
        """Most bytes one device has to upload."""
        return max(self.projection.upload_bytes, default=0)

    @property
    def is_over_on_devices(self) -> bool:
        return any(self.projection.over[:-1])

    @property
    def burdens(self) -> tuple[tuple[int, ...], ...]:
        """Bytes per device, the worst kind first: over its memory, missing in its ring, to upload."""
        return self.projection.over[:-1], self.projection.short_bytes, self.projection.upload_bytes

    @property
    def score(self) -> list[list[int]]:
        """Lower is better: the worst device of the worst kind of burden decides."""
        return [sorted(burden, reverse=True) for burden in self.burdens]


def literal(ask: Ask) -> Layout:
    """The flags as they are (`-fit off`): nothing is moved, whether it fits or not."""
    return _lay_out(ask, _counts_by_memory(ask), ask.demand.n_expert)


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
        _spare_bytes(ask, lowest, device) // per_cell
        for device, per_cell in enumerate(_kv_per_cell(ask, lowest))
        if per_cell
    ]
    step = _CELLS * ask.n_parallel
    return max(lowest.n_ctx, (lowest.n_ctx + min(cells)) // step * step) if cells else None


def _kv_per_cell(ask: Ask, layout: Layout) -> list[int]:
    per_cell = [0] * len(ask.demand.capacity)
    for layer, device in enumerate(layout.layer_device):
        per_cell[device] += ask.demand.kv_per_cell[layer]
    return per_cell


def _fit_context(ask: Ask) -> Layout:
    """Step 3: the largest context, in steps of 256 cells a sequence, that leaves room for full-size rings."""
    layout = _fit_experts(ask)
    if layout.projection.is_roomy or ask.n_ctx == ask.lowest_ctx:
        return layout
    best = _fit_experts(replace(ask, n_ctx=ask.lowest_ctx))
    if not best.projection.is_roomy:
        return best
    step = _CELLS * ask.n_parallel
    low, high = ask.lowest_ctx // step, min(ask.n_ctx, _most_cells(ask)) // step + 1
    while high - low > 1:
        middle = (low + high) // 2
        trial = replace(ask, n_ctx=middle * step)
        layout = _improve(trial, _lay_out(trial, best.counts, best.slab_limit), n_burdens=2)
        if layout.projection.is_roomy:
            best, low = layout, middle
        else:
            high = middle
    return _improve(replace(ask, n_ctx=best.n_ctx), best)


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
    ring_bytes = max((s.staging.n_bytes for s in best.projection.shares if s.staging), default=0)
    # A small ring frees less than a full one takes: far from fitting it cannot halve the uploads.
    if best.busiest_bytes == 0 or best.busiest_bytes > 3 * ring_bytes:
        return best
    tight = _search(ask, max(1, ask.demand.n_expert // _TIGHT), hint)
    is_worth_it = not tight.is_over_on_devices and 2 * tight.busiest_bytes <= best.busiest_bytes
    return tight if is_worth_it else best


def _search(ask: Ask, slab_limit: int, hint: tuple[int, ...] | None) -> Layout:
    by_memory = _lay_out(ask, hint or _counts_by_memory(ask), slab_limit)
    if ask.is_balanced and ask.shares is None:
        return _search_balanced(ask, by_memory)
    best = _improve(ask, by_memory)
    equal = _counts(ask, [1.0] * len(ask.used))
    if best.is_resident or hint or ask.shares is not None or equal == best.counts:
        return best
    from_equal = _improve(ask, _lay_out(ask, equal, slab_limit))
    return min(best, from_equal, key=lambda layout: layout.score)


def _search_balanced(ask: Ask, by_memory: Layout) -> Layout:
    """Equal slices, unless only unequal ones keep every expert resident, or fit at all."""
    equal = _lay_out(ask, _counts(ask, [1.0] * len(ask.used)), by_memory.slab_limit)
    if equal.is_resident:
        return equal
    resident = _improve(ask, by_memory)
    return resident if resident.is_resident else _improve(ask, equal, n_burdens=1)


def _improve(ask: Ask, layout: Layout, *, n_burdens: int = 3) -> Layout:
    """Shifts layers between devices, one at a time, as long as that lowers the score and one of the `n_burdens`
    worst kinds of burden is left. The user's shares are not touched."""
    while ask.shares is None and len(ask.used) > 1 and any(any(burden) for burden in layout.burdens[:n_burdens]):
        better = next((l for l in _shifts(ask, layout) if l.score < layout.score), None)
        if better is None:
            break
        layout = better
    return layout


def _shifts(ask: Ask, layout: Layout) -> Iterator[Layout]:
    """Layouts with one layer less on the device that has most of the worst burden; the least burdened ones get it."""
    worst = next(burden for burden in layout.burdens if any(burden))
    uploads = layout.projection.upload_bytes
    by_burden = sorted(
        range(len(ask.used)),
        key=lambda i: (worst[ask.used[i]], uploads[ask.used[i]], -_spare_bytes(ask, layout, ask.used[i])),
    )
    giver = by_burden.pop()
    if layout.counts[giver] == 0 or worst[ask.used[giver]] == 0:
        return
    for receiver in by_burden if layout.is_over_on_devices else by_burden[:_N_RECEIVERS]:
        counts = list(layout.counts)
        counts[giver] -= 1
        counts[receiver] += 1
        yield _lay_out(ask, tuple(counts), layout.slab_limit)


def _spare_bytes(ask: Ask, layout: Layout, device: int) -> int:
    return ask.demand.capacity[device] - layout.projection.shares[device].used_bytes


def _counts_by_memory(ask: Ask) -> tuple[int, ...]:
    """Layers per used device by the user's shares, or by what the device has left after activations."""
    if ask.shares is not None:
        return _counts(ask, ask.shares)
    return _counts(ask, [max(0, ask.demand.capacity[d] - ask.demand.activation_bytes) for d in ask.used])


def _counts(ask: Ask, weights: Sequence[float]) -> tuple[int, ...]:
    n_layer = len(ask.demand.fixed) - ask.n_front
    if not ask.used:
        return ()
    return apportion(n_layer, weights if sum(weights) > 0 else [1.0] * len(weights))


def _lay_out(ask: Ask, counts: tuple[int, ...], slab_limit: int) -> Layout:
    dealt = [ask.used[i] for i in deal(counts, ask.grain)]
    layer_device = [ask.demand.host] * ask.n_front + dealt
    for layer, device in ask.pins.layer_device.items():
        layer_device[layer] = device
    output_device = _output_device(ask, layer_device[-1], dealt)
    projection = project(ask.demand, layer_device, output_device, n_ctx=ask.n_ctx, slab_limit=slab_limit)
    return Layout(
        counts=counts,
        n_front=ask.n_front,
        has_output=ask.has_output,
        n_ctx=ask.n_ctx,
        slab_limit=slab_limit,
        layer_device=tuple(layer_device),
        output_device=output_device,
        projection=projection,
    )


def _output_device(ask: Ask, last: int, dealt: Sequence[int]) -> int:
    """Where the last layer is, so that no activation moves for it; the CPU's last layer hands over to a device."""
    if ask.pins.output_device is not None:
        return ask.pins.output_device
    if not ask.has_output:
        return ask.demand.host
    if last != ask.demand.host:
        return last
    return dealt[-1] if dealt else max(ask.used, key=lambda d: ask.demand.capacity[d])
