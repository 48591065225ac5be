"""Whether and how the host experts of a few tokens are shared out among the CPU and the accelerators. Pure."""

from __future__ import annotations

from dataclasses import replace

from overspill.gpu_memory import FEW_TOKENS
from overspill.pipeline.parties import ExpertLoad, Party, divided, n_experts_met, parties_of, slowest_us
from overspill.pipeline.schedule import Policy, Shares, WaveSchedule
from overspill.pipeline.split import Layout
from overspill.placement.budget import KernelNeeds
from overspill.placement.machine import Machine
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape

_FEW_EXPERTS = 24
"""Up to so many, parties would wait for each other for a good part of an expert: halves are shared out."""


def n_spread_tokens(shape: ModelShape, layout: Layout, placement: Placement, needs: KernelNeeds) -> int:
    """Most tokens that can be spread: their experts must have room in a staging slot. 0 where nothing can."""
    on_host = layout.host in {*layout.layer_device, layout.output_device}
    if not any(layout.slabs) or layout.mixed or on_host or not needs.n_spread_tokens:
        return 0
    room = min(plan.slab_experts for plan in placement.staging if plan is not None)
    fits = needs.n_spread_tokens if room >= shape.n_expert else room // shape.n_expert_used
    return min(needs.n_spread_tokens, fits)


def spread(
    shape: ModelShape,
    machine: Machine,
    layout: Layout,
    schedule: WaveSchedule,
    n_tokens: int,
    *,
    spreads_alone: bool,
    is_step: bool = False,
) -> WaveSchedule:
    """The schedule with the shares of everybody, by owner of a layer, for waves of so many tokens.

    The CPU takes part for few tokens, and in steps: where work is issued, each layer would wait for a thread of Python,
    which the links need not. spreads_alone: see `KernelNeeds`.
    """
    owners, n_met = owners_of(layout), n_experts_met(shape.n_expert, shape.n_expert_used, n_tokens)
    n_slices = shape.n_expert_slices if n_met <= _FEW_EXPERTS else 1
    if any(schedule.n_cached):
        n_slices = n_kept_slices(shape, layout, spreads_alone=spreads_alone)
    shares: list[Shares] = []
    for owner in range(layout.n_accelerators):
        others = () if spreads_alone else tuple(p for p in owners if p != owner)
        layers = [i for i, slabs in enumerate(layout.slabs) if slabs and layout.layer_device[i] == owner]
        if layers:
            expert = ExpertLoad(
                sum(shape.expert_bytes(i) for i in layers) / len(layers) / shape.n_expert,
                sum(shape.expert_flops(i) for i in layers) / len(layers) * n_tokens / n_met,
            )
            with_cpu = is_step or n_tokens <= FEW_TOKENS
            helpers = [others, (*others, machine.host_index)] if with_cpu else [others]
            choices = [parties_of(machine, owner, h, (owner, *others), n_tokens, expert) for h in helpers]
            n_missed = max(1, round(n_met * missed(schedule, shape, owner)))
            shares.append(_soonest(choices, n_missed, n_slices, machine.host_index))
        else:
            shares.append(())
    return replace(schedule, policy=Policy.SPREAD, shares=tuple(shares), n_slices=n_slices)


def n_kept_slices(shape: ModelShape, layout: Layout, *, spreads_alone: bool) -> int:
    """Into so many, experts are cut that devices keep, once and for all: beside one link alone there is nobody to give
    a half to."""
    return shape.n_expert_slices if len(owners_of(layout)) > 1 and not spreads_alone else 1


def owners_of(layout: Layout) -> list[int]:
    """The devices that compute layers whose experts are in host RAM."""
    return sorted({layout.layer_device[i] for i, slabs in enumerate(layout.slabs) if slabs})


def missed(schedule: WaveSchedule, shape: ModelShape, owner: int) -> float:
    """Of the experts that tokens pick uniformly, the share that the owner of their layer does not keep."""
    return 1.0 - sum(schedule.n_cached[owner : owner + 1]) / shape.n_expert


def _soonest(choices: list[list[Party]], n_experts: int, n_slices: int, host: int) -> Shares:
    """By links alone, the first, or with the CPU where that is sooner: its reading slows the links down.

    Where the CPU, the last, gets nothing, it does not read, so the rates beside it do not hold.
    """
    divisions = [(parties, divided(parties, n_experts, n_slices=n_slices, whole=host)) for parties in choices]
    true_ones = [found for found in divisions if found[0][-1].number != host or found[1][-1]]
    return _taking_part(*min(true_ones, key=lambda found: slowest_us(found[0], [n / n_slices for n in found[1]])))


def _taking_part(parties: list[Party], counts: list[int]) -> Shares:
    """The owner, and whoever else gets an expert."""
    (owner, *helpers), (first, *others) = parties, counts
    return ((owner.number, first), *((p.number, n) for p, n in zip(helpers, others, strict=True) if n))
