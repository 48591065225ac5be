"""Adds up what a placement takes on each device, and decides which routed experts must be staged.

Given where layers compute, each device keeps as few of its layers' routed experts in host RAM as its memory demands,
evenly apart. `project` is pure and quick: fit calls it for every layout it tries.

The ring. A slab is a range of experts of one layer. A whole layer per slot lets each ubatch finish the layer before
the next ubatch starts, so the default is a whole layer if the ring then takes at most half of what the device has
left after weights and activations (a quarter per slot with two slots); otherwise as many experts as fit in that.
Smaller slabs have a price, see `Share.link_load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from overspill.placement.budget import SLOT_PADDING, StagingPlan
from overspill.placement.layout import spread


class Ring(NamedTuple):
    """Cells of one sequence in a layer that sees a window, of which no more are needed; 0: the layer has no such."""

    n_cells: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What model and options ask of whatever device a layer lands on. Tuples are per layer, capacity per device.

    fixed: weights that must be where the layer computes. movable: routed experts that may stay in host RAM instead.
    pinned: routed experts that do stay there. weights: all of these. kv_per_cell, state: cache bytes per context
    cell, and for all sequences together. rings: cells that do not grow in number. capacity: bytes, the host last.
    n_cpu_moe: leading layers whose number of expert sets must be in host RAM, wherever. wide_expert_bytes: one expert
    dequantised, 0 where no kernel wants that. resident_bytes: what kernels take where experts may be resident.
    read_cell_bytes: see `KernelNeeds`; for cells of one of `n_parallel` sequences. is_host_mapped: host weights need
    not fit.
    """

    fixed: tuple[int, ...]
    movable: tuple[int, ...]
    pinned: tuple[int, ...]
    weights: tuple[int, ...]
    kv_per_cell: tuple[int, ...]
    state: tuple[int, ...]
    rings: tuple[Ring, ...]
    capacity: tuple[int, ...]
    n_expert: int
    n_cpu_moe: int
    output_bytes: int
    tied_bytes: int
    embed_bytes: int
    activation_bytes: int
    logits_bytes: int
    n_slots: int
    slab_bytes: int | None
    wide_expert_bytes: int
    resident_bytes: int
    read_cell_bytes: tuple[int, ...]
    n_parallel: int
    is_host_mapped: bool

    @property
    def host(self) -> int:
        """The number that means the host."""
        return len(self.capacity) - 1

    def kv_bytes(self, layer: int, n_ctx: int) -> int:
        """Cache bytes of a layer with so many context cells."""
        n_cells, cell_bytes = self.rings[layer]
        ring_bytes = min(n_ctx, n_cells * self.n_parallel) * cell_bytes
        return self.kv_per_cell[layer] * n_ctx + ring_bytes + self.state[layer]


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds. host_layers: its layers whose movable experts stay in host RAM. upload_bytes: routed
    experts of its layers in host RAM. is_short: a ring of default size does not fit beside the KV cache.
    n_slabs: how many slabs a layer takes.
    """

    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0
    staging: StagingPlan | None = None
    host_layers: tuple[int, ...] = ()
    upload_bytes: int = 0
    is_short: bool = False

    n_slabs: int = 1

    @property
    def link_load(self) -> int:
        """Upload bytes as they delay a wave: no ubatch leaves a layer before its last slab has come, so the devices
        that follow wait for all slabs but one, and those bytes count twice."""
        return self.upload_bytes * (2 * self.n_slabs - 1) // self.n_slabs

    @property
    def used_bytes(self) -> int:
        staging_bytes = self.staging.n_bytes if self.staging else 0
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + staging_bytes


@dataclass(frozen=True, slots=True)
class Projection:
    """Shares by device, the host last, and by how many bytes each is over its capacity (0 where it fits)."""

    shares: tuple[Share, ...]
    over: tuple[int, ...]

    @property
    def is_fitting(self) -> bool:
        return not any(self.over)

    @property
    def is_roomy(self) -> bool:
        """It fits, and every staging ring has its default size."""
        return self.is_fitting and not any(share.is_short for share in self.shares)

    @property
    def upload_bytes(self) -> tuple[int, ...]:
        return tuple([share.upload_bytes for share in self.shares[:-1]])


@dataclass(slots=True)
class _Holding:
    """What computes on one device, added up while going over the layers once. `weights_bytes` leaves movable experts
    out; `largest_bytes`: the most routed expert bytes that one layer may stage; `read_bytes`: decoded cells."""

    n_layers: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    movable: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    movable_bytes: int = 0
    largest_bytes: int = 0
    read_bytes: int = 0


def project(
    demand: Demand, layer_device: Sequence[int], output_device: int, *, n_ctx: int, slab_limit: int
) -> Projection:
    """Shares when layer l computes on device `layer_device[l]`. `slab_limit`: most experts in a slab."""
    holdings = _holdings(demand, layer_device, n_ctx)
    shares = [_share(demand, holding, d, d == output_device, slab_limit) for d, holding in enumerate(holdings[:-1])]
    for d, n_host in _spread_goals(demand, layer_device, holdings, shares):
        shares[d] = _share(demand, holdings[d], d, d == output_device, slab_limit, n_host)
    shares.append(_host_share(demand, holdings[-1], shares, output_device == demand.host))
    needs = [share.used_bytes for share in shares]
    if demand.is_host_mapped:
        needs[-1] -= shares[-1].weights_bytes
    over = tuple(max(0, need - capacity) for need, capacity in zip(needs, demand.capacity, strict=True))
    return Projection(tuple(shares), over)


def _holdings(demand: Demand, layer_device: Sequence[int], n_ctx: int) -> list[_Holding]:
    holdings = [_Holding() for _ in demand.capacity]
    own_bytes = [demand.fixed] * demand.host + [demand.weights]
    for layer, device in enumerate(layer_device):
        holding = holdings[device]
        holding.n_layers += 1
        holding.read_bytes = demand.read_cell_bytes[device] * (n_ctx // demand.n_parallel)
        holding.weights_bytes += own_bytes[device][layer]
        holding.kv_bytes += demand.kv_bytes(layer, n_ctx)
        movable, pinned = demand.movable[layer], demand.pinned[layer]
        if movable:
            holding.movable.append(layer)
            holding.movable_bytes += movable
        if pinned:
            holding.pinned.append(layer)
        if movable + pinned > holding.largest_bytes:
            holding.largest_bytes = movable + pinned
    return holdings


def _share(demand: Demand, holding: _Holding, device: int, has_output: bool, slab_limit: int, n_host: int = 0) -> Share:
    """The share of one accelerator; at least `n_host` of its layers keep their movable experts in host RAM."""
    if not (holding.n_layers or has_output):
        return Share()
    weights = holding.weights_bytes + demand.output_bytes * has_output
    compute = demand.activation_bytes + demand.logits_bytes * has_output + holding.read_bytes
    compute += demand.resident_bytes * bool(holding.movable)
    room = demand.capacity[device] - weights - compute
    left = room - holding.kv_bytes
    is_resident = not (holding.pinned or n_host) and holding.movable_bytes <= left
    if is_resident or not holding.largest_bytes:
        return Share(weights + holding.movable_bytes, holding.kv_bytes, compute)
    unit = -(-holding.largest_bytes // demand.n_expert)
    slab_experts, is_short = _slab(demand, unit, room, left, slab_limit)
    wide_bytes = slab_experts * demand.wide_expert_bytes
    ring_bytes = demand.n_slots * (slab_experts * unit + SLOT_PADDING) + wide_bytes
    excess = holding.movable_bytes - (left - ring_bytes)
    chosen = _host_layers(demand, holding.movable, excess, n_host)
    staged = {l: demand.pinned[l] for l in holding.pinned}
    for l in chosen:
        staged[l] = demand.movable[l] + demand.pinned[l]
    slot_bytes = slab_experts * -(-max(staged.values()) // demand.n_expert) + SLOT_PADDING
    return Share(
        weights_bytes=weights + holding.movable_bytes - sum([demand.movable[l] for l in chosen]),
        kv_bytes=holding.kv_bytes,
        compute_bytes=compute,
        staging=StagingPlan(demand.n_slots, slot_bytes, slab_experts, wide_bytes),
        host_layers=tuple(chosen),
        upload_bytes=sum(staged.values()),
        is_short=is_short,
        n_slabs=-(-demand.n_expert // slab_experts),
    )


def _slab(demand: Demand, unit: int, room: int, left: int, slab_limit: int) -> tuple[int, bool]:
    """Experts per slab, and whether memory allows fewer than by default. `unit`: bytes of the largest expert."""
    if demand.slab_bytes is not None:
        return max(1, min(demand.n_expert, demand.slab_bytes // unit)), False
    ring_unit = demand.n_slots * unit + demand.wide_expert_bytes
    padding = demand.n_slots * SLOT_PADDING
    default = min(demand.n_expert, max(1, (room // 2 - padding) // ring_unit))
    possible = max(1, (left - padding) // ring_unit)
    return min(default, possible, slab_limit), possible < default


def _host_layers(demand: Demand, movable: Sequence[int], excess_bytes: int, n_host: int) -> list[int]:
    """The fewest layers, at least `n_host`, whose movable experts take `excess_bytes` or more; all if none do."""
    if not movable:
        return []
    largest = max([demand.movable[l] for l in movable])
    for n in range(max(n_host, -(-excess_bytes // largest)), len(movable)):
        chosen = [movable[i] for i in spread(len(movable), n)]
        if sum([demand.movable[l] for l in chosen]) >= excess_bytes:
            return chosen
    return list(movable)


def _spread_goals(
    demand: Demand, layer_device: Sequence[int], holdings: Sequence[_Holding], shares: Sequence[Share]
) -> Iterable[tuple[int, int]]:
    """(device, layers with host experts) where `--n-cpu-moe` wants more than memory does: the emptiest first."""
    leading = range(min(demand.n_cpu_moe, len(layer_device)))
    wanted = sum(1 for l in leading if demand.movable[l] and layer_device[l] != demand.host)
    goals = [len(share.host_layers) for share in shares]
    if wanted <= sum(goals):
        return []
    # Each further layer of a device is a step at a height; the lowest steps are taken.
    steps = [
        (height, d)
        for d, goal in enumerate(goals)
        for height in range(goal + len(holdings[d].pinned), len(holdings[d].movable) + len(holdings[d].pinned))
    ]
    raised = sorted(steps)[: wanted - sum(goals)]
    for _, d in raised:
        goals[d] += 1
    return [(d, goals[d]) for d in {d for _, d in raised}]


def _host_share(demand: Demand, holding: _Holding, shares: Sequence[Share], has_output: bool) -> Share:
    """What stays in host RAM: embeddings, layers the CPU computes, routed experts of other layers."""
    own = demand.embed_bytes + (demand.output_bytes - demand.tied_bytes) * has_output
    is_computing = bool(holding.n_layers or has_output)
    return Share(
        weights_bytes=own + holding.weights_bytes + sum(share.upload_bytes for share in shares),
        kv_bytes=holding.kv_bytes,
        compute_bytes=demand.activation_bytes * is_computing + demand.logits_bytes * has_output + holding.read_bytes,
    )
