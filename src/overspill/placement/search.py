"""One way to lay a model out, and the local search that improves it.

A layout follows from how many layers each device gets. `improve` shifts one layer at a time from the device with most
of the worst burden (bytes over its memory, or else bytes to upload) to one with less, as long as the layout gets
better. Starting counts come from the user's shares, from free memory, or from an
estimate that levels the uploads; from a good start a few steps are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from overspill.placement.layout import apportion, deal
from overspill.placement.override import Pins
from overspill.placement.project import Demand, Projection, project

_N_RECEIVERS: Final = 3
_N_BISECTIONS: Final = 16


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
    def busiest_load(self) -> int:
        """Load of the busiest link, with the price of small slabs."""
        return max((share.link_load for share in self.projection.shares[:-1]), default=0)

    @property
    def is_over_on_devices(self) -> bool:
        return any(self.projection.over[:-1])

    @property
    def score(self) -> list[list[int]]:
        """Lower is better: bytes over memory decide before bytes to upload, the worst device before the others."""
        return [sorted(self.projection.over[:-1], reverse=True), sorted(self.projection.upload_bytes, reverse=True)]


def relieve(ask: Ask, layout: Layout) -> Layout:
    """`improve` no further than until no device is over its memory."""
    return _shift_while(ask, layout, lambda layout: layout.is_over_on_devices)


def improve(ask: Ask, layout: Layout) -> Layout:
    """Shifts layers between devices, one at a time, as long as that lowers the score. The user's shares stay."""
    return _shift_while(ask, layout, lambda layout: layout.is_over_on_devices or layout.busiest_load > 0)


def _shift_while(ask: Ask, layout: Layout, is_wanting: Callable[[Layout], bool]) -> Layout:
    while ask.shares is None and len(ask.used) > 1 and is_wanting(layout):
        better = next((l for l in _shifts(ask, layout) if l.score < layout.score), None)
        if better is None:
            break
        layout = better
    return layout


def _shifts(ask: Ask, layout: Layout) -> Iterator[Layout]:
    """Layouts with one layer less on the device that has most of the worst burden; the least burdened ones get it."""
    uploads = layout.projection.upload_bytes
    worst = layout.projection.over if layout.is_over_on_devices else uploads
    giver = max(range(len(ask.used)), key=lambda i: worst[ask.used[i]])
    if layout.counts[giver] == 0 or worst[ask.used[giver]] == 0:
        return
    spare = [spare_bytes(ask, layout, device) for device in ask.used]
    receivers = [i for i in range(len(ask.used)) if i != giver]
    receivers.sort(key=lambda i: (worst[ask.used[i]], uploads[ask.used[i]], -spare[i]))
    for receiver in receivers if layout.is_over_on_devices else receivers[:_N_RECEIVERS]:
        counts = list(layout.counts)
        counts[giver] -= 1
        counts[receiver] += 1
        yield lay_out(ask, tuple(counts), layout.slab_limit)


def own_bytes(ask: Ask) -> float:
    """What a layer takes without its movable experts, on average over the layers on devices."""
    demand, n_layer = ask.demand, len(ask.demand.fixed)
    layers = range(ask.n_front, n_layer)
    total = sum(demand.fixed[ask.n_front :]) + sum(demand.kv_bytes(l, ask.n_ctx) - demand.state[l] for l in layers)
    return max(1.0, total / max(1, len(layers)))


def spare_bytes(ask: Ask, layout: Layout, device: int) -> int:
    """What the layout leaves of a device's capacity; negative where it is over."""
    return ask.demand.capacity[device] - layout.projection.shares[device].used_bytes


def counts_by_memory(ask: Ask) -> tuple[int, ...]:
    """Layers per used device by the user's shares, or by what the device has left after activations."""
    if ask.shares is not None:
        return _counts(ask, ask.shares)
    return _counts(ask, [max(0, ask.demand.capacity[d] - ask.demand.activation_bytes) for d in ask.used])


def counts_by_uploads(ask: Ask) -> tuple[int, ...]:
    """Layers per used device such that all have about equally many with experts in host RAM.

    A layer takes `own` bytes, and `routed` more where its experts are resident. With n host layers each, a device
    with `room` bytes holds min(n, room / own) of them and (room - n * own) / (own + routed) resident ones; the least
    n with which all layers find a place is bisected.
    """
    demand, layers = ask.demand, range(ask.n_front, len(ask.demand.fixed))
    if not (layers and ask.used):
        return counts_by_memory(ask)
    routed = sum(demand.movable[l] for l in layers) / len(layers)
    own = own_bytes(ask)
    ring = demand.n_slots * max(demand.movable[l] + demand.pinned[l] for l in layers)
    free = [max(0, demand.capacity[d] - demand.activation_bytes) for d in ask.used]
    rooms = [room - min(ring, room / 2) for room in free]
    low, high = min(demand.n_cpu_moe, len(layers)) / len(rooms), float(len(layers))
    for _ in range(_N_BISECTIONS):
        middle = (low + high) / 2
        host, resident = _held(rooms, own, routed, middle)
        low, high = (low, middle) if sum(host) + sum(resident) >= len(layers) else (middle, high)
    host, resident = _held(rooms, own, routed, high)
    scale = max(0.0, len(layers) - sum(host)) / (sum(resident) or 1.0)
    return _counts(ask, [h + scale * r for h, r in zip(host, resident, strict=True)])


def _held(rooms: Sequence[float], own: float, routed: float, n: float) -> tuple[list[float], list[float]]:
    """Host layers and resident layers per device, with up to `n` host layers each."""
    host = [min(n, room / own) for room in rooms]
    resident = [max(0.0, room - n * own) / (own + routed) if routed else 0.0 for room in rooms]
    return host, resident


def equal_counts(ask: Ask) -> tuple[int, ...]:
    """The same number of layers for each used device."""
    return _counts(ask, [1.0] * len(ask.used))


def _counts(ask: Ask, weights: Sequence[float]) -> tuple[int, ...]:
    n_layer = len(ask.demand.fixed) - ask.n_front
    if not ask.used:
        return ()
    return apportion(n_layer, weights if sum(weights) > 0 else [1.0] * len(weights))


def lay_out(ask: Ask, counts: tuple[int, ...], slab_limit: int) -> Layout:
    """Deals the layers out, moves those that `-ot` sends elsewhere, and projects the bytes."""
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
