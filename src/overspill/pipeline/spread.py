"""Whether and how the host experts of a few tokens are shared out among the CPU and the accelerators. Pure."""

from __future__ import annotations

from dataclasses import replace

from overspill.pipeline.parties import Party, divided, n_experts_met, parties_of, slowest_us
from overspill.pipeline.schedule import Policy, Shares, WaveSchedule
from overspill.pipeline.split import Layout
from overspill.placement.budget import KernelNeeds
from overspill.placement.machine import Machine
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape


def n_spread_tokens(shape: ModelShape, layout: Layout, placement: Placement, needs: KernelNeeds) -> int:
    """Most tokens that can be spread: their experts must have room in a staging slot. 0 where nothing can."""
    on_host = layout.host in {*layout.layer_device, layout.output_device}
    if not any(layout.slabs) or layout.mixed or on_host or not needs.n_spread_tokens:
        return 0
    room = min(plan.slab_experts for plan in placement.staging if plan is not None)
    fits = needs.n_spread_tokens if room >= shape.n_expert else room // shape.n_expert_used
    return min(needs.n_spread_tokens, fits)


def spread(
    shape: ModelShape, machine: Machine, layout: Layout, schedule: WaveSchedule, n_tokens: int, *, spreads_alone: bool
) -> WaveSchedule:
    """The schedule with the shares of everybody, by owner of a layer, for waves of so many tokens.

    spreads_alone: see `KernelNeeds`.
    """
    owners = owners_of(layout)
    shares: list[Shares] = []
    for owner in range(layout.n_accelerators):
        others = () if spreads_alone else tuple(p for p in owners if p != owner)
        layers = [i for i, slabs in enumerate(layout.slabs) if slabs and layout.layer_device[i] == owner]
        if layers:
            expert_bytes = sum(shape.expert_bytes(i) for i in layers) / len(layers) / shape.n_expert
            n_missed = n_experts_met(shape.n_expert, shape.n_expert_used, n_tokens) * missed(schedule, shape, owner)
            shares.append(_shares(machine, owner, others, n_tokens, max(1, round(n_missed)), expert_bytes))
        else:
            shares.append(())
    return replace(schedule, policy=Policy.SPREAD, shares=tuple(shares))


def owners_of(layout: Layout) -> list[int]:
    """The devices that compute layers whose experts are in host RAM."""
    return sorted({layout.layer_device[i] for i, slabs in enumerate(layout.slabs) if slabs})


def missed(schedule: WaveSchedule, shape: ModelShape, owner: int) -> float:
    """Of the experts that tokens pick uniformly, the share that the owner of their layer does not keep."""
    return 1.0 - sum(schedule.n_cached[owner : owner + 1]) / shape.n_expert


def _shares(
    machine: Machine, owner: int, others: tuple[int, ...], n_tokens: int, n_experts: int, expert_bytes: float
) -> Shares:
    """By links alone, or with the CPU where that is sooner: its reading slows the links down."""
    readers = (owner, *others)
    links = parties_of(machine, owner, others, readers, n_tokens, expert_bytes)
    everybody = parties_of(machine, owner, (*others, machine.host_index), readers, n_tokens, expert_bytes)
    by_links, by_all = divided(links, n_experts), divided(everybody, n_experts)
    has_cpu_part = by_all[-1] > 0 and slowest_us(everybody, by_all) < slowest_us(links, by_links)
    return _taking_part(everybody, by_all) if has_cpu_part else _taking_part(links, by_links)


def _taking_part(parties: list[Party], counts: list[int]) -> Shares:
    """The owner, and whoever else gets an expert."""
    (owner, *helpers), (first, *others) = parties, counts
    return ((owner.number, first), *((p.number, n) for p, n in zip(helpers, others, strict=True) if n))
