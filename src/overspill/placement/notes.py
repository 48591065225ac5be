"""What a user should know about a placement, one line each: what was not as asked, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overspill.options import Options
from overspill.placement.fit import largest_resident_context
from overspill.placement.machine import Machine
from overspill.placement.override import Pins, unmet_wishes
from overspill.placement.search import Ask, Layout
from overspill.placement.shape import ModelShape
from overspill.placement.stages import Stages


def plan_notes(
    shape: ModelShape,
    machine: Machine,
    options: Options,
    stages: Stages,
    pins: Pins,
    ask: Ask,
    layout: Layout,
    home: Mapping[str, int],
) -> tuple[str, ...]:
    """All notes of a placement, in the order a reader wants them: flags first, then memory, then the pipeline."""
    return (
        *pins.notes,
        *unmet_wishes(pins, home),
        *_moved_layers(machine, pins),
        *stages.notes,
        *_dropped_devices(machine, stages, layout),
        *_context_notes(ask, layout),
        *_front_notes(ask, layout),
        *_host_layer_notes(options, layout),
        *_pipeline_notes(machine, layout),
        *_host_memory_notes(machine, ask, layout),
    )


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs shortened: 0-3,7,9-10."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _moved_layers(machine: Machine, pins: Pins) -> list[str]:
    by_device: dict[int, list[int]] = {}
    for layer, device in sorted(pins.layer_device.items()):
        by_device.setdefault(device, []).append(layer)
    return [f"-ot: layers {ranges(layers)} compute on {machine.names[d]}" for d, layers in by_device.items()]


def _dropped_devices(machine: Machine, stages: Stages, layout: Layout) -> list[str]:
    active = {*layout.layer_device, layout.output_device}
    return [
        f"{machine.names[d]} is not used: no layer fits it or is left for it" for d in stages.used if d not in active
    ]


def _context_notes(ask: Ask, layout: Layout) -> list[str]:
    notes = []
    if layout.n_ctx < ask.n_ctx:
        notes.append(f"context lowered from {ask.n_ctx} to {layout.n_ctx} cells to fit; -c overrides")
    is_forced = any(ask.demand.pinned) or ask.demand.n_cpu_moe
    if not (layout.is_resident or is_forced) and layout.n_front == ask.n_front:
        n_ctx = largest_resident_context(ask, layout)
        if n_ctx:
            notes.append(f"with -c {n_ctx} or less every routed expert would be resident")
    return notes


def _front_notes(ask: Ask, layout: Layout) -> list[str]:
    if layout.n_front == ask.n_front:
        return []
    where = f"layers 0-{layout.n_front - 1} are computed by the CPU"
    return [f"{where}: the devices cannot hold more, not even without routed experts"]


def _host_layer_notes(options: Options, layout: Layout) -> list[str]:
    layers = sorted(layer for share in layout.projection.shares for layer in share.host_layers)
    if not (layers and options.n_cpu_moe):
        return []
    return [
        f"--n-cpu-moe {options.n_cpu_moe}: routed experts of {len(layers)} layers are in host RAM, spread over the "
        f"devices (layers {ranges(layers)})"
    ]


def _pipeline_notes(machine: Machine, layout: Layout) -> list[str]:
    active = sorted({*layout.layer_device, layout.output_device} - {machine.host_index})
    if len(machine.devices) < 2 or not active:
        return []
    if len(active) == 1:
        return [f"pipeline off: {machine.names[active[0]]} is the only stage"]
    loaded = [d for d in active if layout.projection.upload_bytes[d]]
    if len(loaded) != 1:
        return []
    return [f"host weights on one device only: all uploads go through the link of {machine.names[loaded[0]]}"]


def _host_memory_notes(machine: Machine, ask: Ask, layout: Layout) -> list[str]:
    weights = layout.projection.shares[-1].weights_bytes
    if not ask.demand.is_host_mapped or layout.projection.shares[-1].used_bytes <= machine.host_bytes:
        return []
    return [f"host RAM cannot hold its {weights >> 20} MiB of weights: they are read from the file again (-lm mmap)"]
