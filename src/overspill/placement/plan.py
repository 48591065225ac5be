"""The placement: where each layer computes, where each tensor lives, what every device holds.

`place` is a pure function of model, machine, options and the batch sizes and grain to plan for; it returns a value
that loading, the runner, the simulator and `overspill plan` read. Devices are numbered in pipeline order, and the
number after the last one means the host: a layer there is computed by the CPU, a tensor there stays in host RAM.

Invariants: every budget fits its device (and the host, unless `-lm mmap`), or `UserError` with needed and free bytes;
equal arguments give equal placements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from overspill.errors import UserError
from overspill.options import MIB, Options
from overspill.placement.budget import (
    NO_NEEDS,
    DeviceBudget,
    KernelNeeds,
    StagingPlan,
    activation_bytes,
    most_spread_bytes,
    pinned_end_bytes,
)
from overspill.placement.fit import fit, literal
from overspill.placement.machine import Machine
from overspill.placement.notes import plan_notes
from overspill.placement.override import Pins, resolve
from overspill.placement.project import Demand, Ring, Share
from overspill.placement.search import Ask, Layout
from overspill.placement.shape import ModelShape, Role
from overspill.placement.stages import Stages, choose_stages

GIB: Final = 1 << 30


@dataclass(frozen=True)
class Placement:
    """A finished placement.

    layer_device: device that computes each layer. output_device: device that computes logits. home: device of every
    tensor; routed experts at home on the host whose layer computes on a device are uploaded through its staging
    ring. Where the output is tied to the token embedding (at home on the host), the output device holds a copy.
    n_ctx: context cells over all sequences. staging: per device, None without host experts. budgets: per device, the
    host last. upload_bytes: per device, its layers' host experts. n_cached: per device, how many of each of those
    layers' experts it keeps for decoding. notes: one line each, for the user. flags: the same placement as literal
    flags.
    """

    layer_device: tuple[int, ...]
    output_device: int
    home: Mapping[str, int]
    n_ctx: int
    n_ubatch: int
    n_wave: int
    grain: int
    staging: tuple[StagingPlan | None, ...]
    budgets: tuple[DeviceBudget, ...]
    upload_bytes: tuple[int, ...]
    notes: tuple[str, ...]
    flags: tuple[str, ...]
    n_cached: tuple[int, ...] = ()

    @property
    def host_index(self) -> int:
        """The number that means the host."""
        return len(self.budgets) - 1

    @property
    def host_expert_bytes(self) -> int:
        """Bytes that a wave uploads: routed experts in host RAM of layers that devices compute."""
        return sum(self.upload_bytes)

    @property
    def used_devices(self) -> tuple[int, ...]:
        """The devices that are stages, in pipeline order, without the host."""
        used = {*self.layer_device, self.output_device} - {self.host_index}
        return tuple(sorted(used))

    def layers_of(self, device: int) -> tuple[int, ...]:
        """Layers that a device computes, in order."""
        return tuple(l for l, d in enumerate(self.layer_device) if d == device)


def place(
    shape: ModelShape,
    machine: Machine,
    options: Options,
    *,
    n_ubatch: int,
    n_wave: int,
    grain: int,
    needs: KernelNeeds = NO_NEEDS,
    kept_bytes: Sequence[int] = (),
) -> Placement:
    """Place `shape` on `machine` for waves of `n_wave` tokens in ubatches of `n_ubatch`, `grain` layers a turn.

    needs: what the kernels of the accelerators take, for ubatches of `n_ubatch`. kept_bytes: per device, what is not
    to be used, if any.

    `-dev` and `--device-memory` are applied to the machine before (`Machine.select`, `Machine.capped`). `UserError`
    for flags that this machine or model cannot follow, and when it does not fit.
    """
    stages = choose_stages(machine, options)
    pins = resolve(shape, machine, options)
    demand = _demand(shape, machine, options, pins, n_ubatch, n_wave, needs)
    demand = replace(demand, capacity=_less(demand.capacity, kept_bytes))
    ask = _ask(shape, options, stages, pins, demand, grain)
    layout = literal(ask) if options.fit == "off" else fit(ask)
    _refuse_overflow(machine, options, demand, layout)
    home = _homes(shape, pins, layout, demand.host)
    shares = layout.projection.shares
    return Placement(
        layer_device=layout.layer_device,
        output_device=layout.output_device,
        home=MappingProxyType(home),
        n_ctx=layout.n_ctx,
        n_ubatch=n_ubatch,
        n_wave=n_wave,
        grain=grain,
        staging=tuple(share.staging for share in shares[:-1]),
        budgets=_budgets(machine, shares),
        upload_bytes=layout.projection.upload_bytes,
        notes=plan_notes(shape, machine, options, stages, pins, ask, layout, home),
        flags=_literal_flags(options, ask, layout, machine),
    )


def _demand(
    shape: ModelShape,
    machine: Machine,
    options: Options,
    pins: Pins,
    n_ubatch: int,
    n_wave: int,
    needs: KernelNeeds,
) -> Demand:
    host = machine.host_index
    pinned, resident = [0] * shape.n_layer, [0] * shape.n_layer
    for t in shape.tensors if pins.expert_home else ():
        if t.layer is not None and t.name in pins.expert_home:
            (pinned if pins.expert_home[t.name] == host else resident)[t.layer] += t.n_bytes
    routed = shape.routed_bytes
    movable = [routed[l] - pinned[l] - resident[l] for l in range(shape.n_layer)]
    if options.fit == "off":
        resident = [routed[l] - pinned[l] for l in range(shape.n_layer)]
        movable = [0] * shape.n_layer
    activations = activation_bytes(
        shape, n_ubatch=n_ubatch, n_wave=n_wave, has_output=True, normed_value_bytes=needs.normed_value_bytes
    )
    pinned_ends = pinned_end_bytes(shape, activations, n_ubatch)
    spread = most_spread_bytes(shape, n_ubatches=activations.n_slots, needs=needs, n_devices=host)
    return Demand(
        fixed=tuple(a + b for a, b in zip(shape.dense_bytes, resident, strict=True)),
        movable=tuple(movable),
        pinned=tuple(pinned),
        weights=tuple(a + b for a, b in zip(shape.dense_bytes, routed, strict=True)),
        kv_per_cell=shape.kv_bytes_per_cell,
        state=tuple(
            n_bytes * (options.n_parallel * options.n_states + needs.n_trials) for n_bytes in shape.state_bytes
        ),
        rings=_rings(shape, n_ubatch),
        capacity=(*capacities(machine, options), machine.host_bytes - pinned_ends - options.n_image_bytes),
        n_expert=shape.n_expert,
        n_cpu_moe=0 if options.fit == "off" else options.n_cpu_moe,
        output_bytes=shape.output_bytes,
        tied_bytes=shape.tied_bytes,
        embed_bytes=shape.embed_bytes,
        activation_bytes=activations.total - activations.logits + needs.scratch_bytes + spread,
        logits_bytes=activations.logits + needs.head_bytes,
        n_slots=options.n_staging_slots,
        resident_bytes=needs.resident_bytes,
        read_cell_bytes=(*[needs.read_cell_bytes] * host, needs.host_read_cell_bytes),
        n_parallel=options.n_parallel,
        wide_expert_bytes=needs.wide_value_bytes * shape.expert_values,
        slab_bytes=None if options.slab_mib is None else options.slab_mib * MIB,
        is_host_mapped=options.load_mode == "mmap",
    )


def _rings(shape: ModelShape, n_ubatch: int) -> tuple[Ring, ...]:
    rings = shape.rings or (None,) * shape.n_layer
    return tuple(Ring(0, 0) if ring is None else Ring(ring.reach + n_ubatch, ring.cell_bytes) for ring in rings)


def _less(capacity: tuple[int, ...], kept_bytes: Sequence[int]) -> tuple[int, ...]:
    kept = (*kept_bytes, *[0] * (len(capacity) - len(kept_bytes)))
    return tuple(max(0, a - b) for a, b in zip(capacity, kept, strict=True))


def capacities(machine: Machine, options: Options) -> list[int]:
    """Bytes each device may use: what is free, less what is to stay free (nothing stays free with `-fit off`)."""
    if options.fit == "off":
        return [d.free_bytes for d in machine.devices]
    targets = options.fit_target_mib
    if targets is None:
        return [max(0, d.free_bytes - d.reserve_bytes) for d in machine.devices]
    each = targets * len(machine.devices) if len(targets) == 1 else targets
    if len(each) != len(machine.devices):
        raise UserError(f"-fitt has {len(targets)} values for {len(machine.devices)} devices; give one, or one each")
    return [max(0, d.free_bytes - mib * MIB) for d, mib in zip(machine.devices, each, strict=True)]


def _ask(shape: ModelShape, options: Options, stages: Stages, pins: Pins, demand: Demand, grain: int) -> Ask:
    n_units = shape.n_layer + 1
    n_offloaded = (
        options.n_gpu_layers if isinstance(options.n_gpu_layers, int) and options.n_gpu_layers >= 0 else n_units
    )
    if not stages.used:
        n_offloaded = 0
    n_ctx = options.n_ctx or shape.n_ctx_train * options.n_parallel
    return Ask(
        demand=demand,
        pins=pins,
        used=stages.used,
        shares=stages.shares,
        grain=grain,
        n_front=min(shape.n_layer, max(0, n_units - n_offloaded)),
        has_output=n_offloaded > 0,
        is_front_open=options.is_layer_count_open,
        is_balanced=options.fit == "balanced",
        n_ctx=n_ctx,
        lowest_ctx=options.n_ctx or min(n_ctx, options.fit_ctx * options.n_parallel),
        n_parallel=options.n_parallel,
    )


def _homes(shape: ModelShape, pins: Pins, layout: Layout, host: int) -> dict[str, int]:
    """Device of every tensor."""
    staged = {layer for share in layout.projection.shares for layer in share.host_layers}
    home: dict[str, int] = {}
    for t in shape.tensors:
        if t.layer is None:
            home[t.name] = layout.output_device if t.role is Role.OUTPUT else host
            continue
        device = layout.layer_device[t.layer]
        if t.role is Role.EXPERT and device != host:
            device = pins.expert_home.get(t.name, host if t.layer in staged else device)
        home[t.name] = device
    return home


def _budgets(machine: Machine, shares: tuple[Share, ...]) -> tuple[DeviceBudget, ...]:
    sizes = [(d.total_bytes, d.free_bytes) for d in machine.devices] + [(machine.host_bytes, machine.host_bytes)]
    return tuple(
        DeviceBudget(
            name=name,
            total_bytes=total,
            free_bytes=free,
            weights_bytes=share.weights_bytes,
            kv_bytes=share.kv_bytes,
            compute_bytes=share.compute_bytes,
            staging_bytes=share.staging.n_bytes if share.staging else 0,
        )
        for name, (total, free), share in zip(machine.names, sizes, shares, strict=True)
    )


def _refuse_overflow(machine: Machine, options: Options, demand: Demand, layout: Layout) -> None:
    if layout.projection.is_fitting:
        return
    shares, over = layout.projection.shares, layout.projection.over
    needs = ", ".join(
        f"{machine.names[d]} needs {_gib(shares[d].used_bytes)} (weights {_gib(shares[d].weights_bytes)}, "
        f"KV {_gib(shares[d].kv_bytes)}) and may use {_gib(demand.capacity[d])}"
        for d in range(len(over))
        if over[d]
    )
    raise UserError(f"the model does not fit: {needs}; {_remedy(options, bool(over[-1]), any(over[:-1]))}")


def _remedy(options: Options, is_host_over: bool, is_device_over: bool) -> str:
    if is_host_over and not is_device_over:
        return "lower -c, or read weights from the file as they are needed (-lm mmap)"
    if options.fit == "off":
        return "lower -c or -ngl, raise --n-cpu-moe, or let it fit (-fit on)"
    return "lower -c or the batch sizes, or leave -ngl, -ts, -ot and --slab-mib open so that it can be fitted"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f} GiB"


def _literal_flags(options: Options, ask: Ask, layout: Layout, machine: Machine) -> tuple[str, ...]:
    """Flags that give the same placement with `-fit off`, whatever the memory."""
    n_offloaded = len(layout.layer_device) - layout.n_front + 1 if layout.has_output else 0
    flags = ["-fit", "off", "-ngl", str(n_offloaded), "-c", str(layout.n_ctx)]
    counts = [0] * len(machine.devices)
    for device, count in zip(ask.used, layout.counts, strict=True):
        counts[device] = count
    if sum(counts):
        flags += ["-ts", ",".join(map(str, counts))]
    elif layout.has_output and layout.output_device < machine.host_index:
        flags += ["-sm", "none", "-mg", str(layout.output_device)]
    host_layers = sorted(layer for share in layout.projection.shares for layer in share.host_layers)
    items = list(options.override_tensor)
    if host_layers:
        numbers = "|".join(map(str, host_layers))
        items.append(rf"blk\.({numbers})\.ffn_(gate|up|down|gate_up)(_(ch)?exps|\.[0-9]+)\.weight=CPU")
    if items:
        flags += ["-ot", ",".join(items)]
    if options.fit == "off" and options.n_cpu_moe:
        flags += ["-ncmoe", str(options.n_cpu_moe)]
    return (*flags, "-cmoe") if options.cpu_moe else tuple(flags)
