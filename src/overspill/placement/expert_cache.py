"""Memory of devices for experts whose home is the host: how many of each layer have a slot there.

The experts that tokens use most stay in these slots from step to step (`kernels.expert_cache`). All layers of a device
have equally many, at least as many as a token uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overspill.errors import UserError
from overspill.options import MIB, Options
from overspill.placement.budget import SLOT_PADDING
from overspill.placement.machine import Machine
from overspill.placement.plan import Placement, capacities
from overspill.placement.shape import ModelShape, Role

_STATE_BYTES = 2 * 4 * 4
"""Of each expert of a layer: four numbers for each of two slices say what is in the slots."""


def kept_bytes(options: Options, placement: Placement) -> list[int]:
    """What each device has to leave free for the cache that the user asks for, by the bytes of its host experts."""
    total = sum(placement.upload_bytes)
    if options.moe_cache_mib == "auto" or not total:
        return []
    return [int(options.moe_cache_mib) * MIB * n_bytes // total for n_bytes in placement.upload_bytes]


def with_cache(
    shape: ModelShape, machine: Machine, options: Options, placement: Placement, kept: Sequence[int]
) -> Placement:
    """The placement with as many slots as fit in `kept` bytes of each device or, if there are none, in what is left.

    `UserError` where a cache that the user has asked for holds fewer experts of a layer than a token uses.
    """
    layers = [_host_layers(shape, placement, d) for d in range(placement.host_index)]
    used = [budget.used_bytes for budget in placement.budgets[:-1]]
    rooms = kept or [a - b for a, b in zip(capacities(machine, options), used, strict=True)]
    counts = [_n_slots(shape, each, room) if each else 0 for each, room in zip(layers, rooms, strict=True)]
    few = [d for d, n in enumerate(counts) if layers[d] and n < shape.n_expert_used]
    if kept and few:
        raise UserError(_too_few(shape, options, placement, layers, few[0], counts[few[0]]))
    counts = [n if n >= shape.n_expert_used else 0 for n in counts]
    if not any(counts):
        return placement
    n_bytes = [sum(layer_bytes(shape, l, n) for l in each) for each, n in zip(layers, counts, strict=True)]
    budgets = [replace(b, cache_bytes=n) for b, n in zip(placement.budgets[:-1], n_bytes, strict=True)]
    flags = (*placement.flags, "--moe-cache-mib", str(-(-sum(n_bytes) // MIB)))
    return replace(placement, n_cached=tuple(counts), budgets=(*budgets, placement.budgets[-1]), flags=flags)


def layer_bytes(shape: ModelShape, layer: int, n_slots: int) -> int:
    """What so many slots of a layer take, and what is known of its experts."""
    return slot_bytes(shape, layer, n_slots) + _STATE_BYTES * shape.n_expert if n_slots else 0


def slot_bytes(shape: ModelShape, layer: int, n_slots: int) -> int:
    """Memory of so many slots of a layer."""
    return n_slots * (shape.expert_bytes(layer) // shape.n_expert) + SLOT_PADDING


def _host_layers(shape: ModelShape, placement: Placement, device: int) -> list[int]:
    """Layers of a device with experts in host RAM."""
    host = placement.host_index
    staged = {t.layer for t in shape.tensors if t.role is Role.EXPERT and placement.home[t.name] == host}
    return [l for l in placement.layers_of(device) if l in staged]


def _n_slots(shape: ModelShape, layers: Sequence[int], room: int) -> int:
    fixed = sum(layer_bytes(shape, l, 1) - shape.expert_bytes(l) // shape.n_expert for l in layers)
    unit = sum(shape.expert_bytes(l) // shape.n_expert for l in layers)
    return max(0, min(shape.n_expert, (room - fixed) // unit))


def _too_few(
    shape: ModelShape, options: Options, placement: Placement, layers: Sequence[Sequence[int]], device: int, n: int
) -> str:
    used = shape.n_expert_used
    # Bytes are divided among devices in whole MiB at best, so one more for each.
    needed = sum(layer_bytes(shape, l, used) for each in layers for l in each) // MIB + len(layers)
    return (
        f"--moe-cache-mib {options.moe_cache_mib}: {placement.budgets[device].name} would keep {n} experts of a layer, "
        f"and a token uses {used}; give at least {needed}, or 0"
    )
