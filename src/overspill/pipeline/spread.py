"""Whether and how the host experts of a few tokens are shared out among the CPU and the accelerators.

Each party's weight is the rate at which it can read host memory while the others do the same. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from overspill.pipeline.schedule import Policy, WaveSchedule
from overspill.pipeline.simulate import cpu_beside_links_gbps
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


def spread(machine: Machine, layout: Layout, schedule: WaveSchedule, needs: KernelNeeds) -> WaveSchedule:
    """The schedule with everybody's weight, by owner of a layer."""
    owners = sorted({layout.layer_device[i] for i, slabs in enumerate(layout.slabs) if slabs})
    together = machine.h2d_total_gbps / len(owners)
    gbps = {i: min(machine.devices[i].h2d_gbps, together) for i in owners}
    gbps[layout.host] = cpu_beside_links_gbps(machine, gbps.values())
    shares = []
    for owner in range(layout.n_accelerators):
        others = [layout.host] if needs.spreads_alone else [p for p in gbps if p != owner]
        taking = [owner, *others] if owner in gbps else []
        shares.append(tuple((p, max(1, round(gbps[p]))) for p in taking))
    return replace(schedule, policy=Policy.SPREAD, shares=tuple(shares))
