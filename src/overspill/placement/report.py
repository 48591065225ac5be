"""A placement for people and for programs: `overspill plan` prints the lines, `--json` the dictionary."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, Final

from overspill.placement.budget import DeviceBudget
from overspill.placement.notes import ranges
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape, Role

MIB: Final = 1 << 20
_COLUMNS: Final = (
    "device",
    "layers",
    "weights",
    "kv",
    "compute",
    "staging",
    "cache",
    "sum",
    "spare",
    "free",
    "total",
    "experts",
)


def report(shape: ModelShape, placement: Placement) -> list[str]:
    """Lines of plain text: a table in MiB, a row per device and the host; then batch sizes, flags and notes."""
    rows = [_COLUMNS, *(_row(shape, placement, device) for device in range(placement.host_index + 1))]
    lines = [f"{shape.name}: {shape.n_layer} layers, {shape.total_bytes // MIB} MiB of weights (table in MiB)"]
    lines += _aligned(rows)
    lines.append(_sizes(placement))
    lines += [_placed_layers(placement, device) for device in range(placement.host_index + 1)]
    lines += [f"staging {placement.budgets[d].name}: {text}" for d, text in _staging(shape, placement)]
    lines += [
        f"cache {placement.budgets[d].name}: {n} of {shape.n_expert} experts of each layer with experts in host RAM"
        for d, n in enumerate(placement.n_cached)
        if n
    ]
    lines.append(f"flags: {shlex.join(placement.flags)}")
    return [line for line in lines if line] + [f"note: {note}" for note in placement.notes]


def as_dict(shape: ModelShape, placement: Placement) -> dict[str, Any]:
    """The same, of JSON types only; sizes in bytes, devices by name."""
    names = [budget.name for budget in placement.budgets]
    return {
        "model": shape.name,
        "arch": shape.arch,
        "n_ctx": placement.n_ctx,
        "n_ubatch": placement.n_ubatch,
        "n_wave": placement.n_wave,
        "grain": placement.grain,
        "layer_device": [names[d] for d in placement.layer_device],
        "output_device": names[placement.output_device],
        "host_expert_bytes": placement.host_expert_bytes,
        "devices": [_device_dict(shape, placement, device) for device in range(len(names))],
        "home": {name: names[d] for name, d in placement.home.items()},
        "flags": list(placement.flags),
        "notes": list(placement.notes),
    }


def count_experts(shape: ModelShape, placement: Placement, device: int) -> tuple[int, int]:
    """Layers of a device whose routed experts are all resident, and those with some in host RAM."""
    layers = {l for l in placement.layers_of(device) if shape.routed_bytes[l]}
    staged = {
        t.layer
        for t in shape.tensors
        if t.role is Role.EXPERT and t.layer in layers and placement.home[t.name] != device
    }
    return len(layers) - len(staged), len(staged)


def _device_dict(shape: ModelShape, placement: Placement, device: int) -> dict[str, Any]:
    budget = placement.budgets[device]
    n_resident, n_host = count_experts(shape, placement, device)
    staging = placement.staging[device] if device < placement.host_index else None
    return {
        "name": budget.name,
        "layers": list(placement.layers_of(device)),
        "weights_bytes": budget.weights_bytes,
        "kv_bytes": budget.kv_bytes,
        "compute_bytes": budget.compute_bytes,
        "staging_bytes": budget.staging_bytes,
        "cache_bytes": budget.cache_bytes,
        "n_cached_experts": placement.n_cached[device] if device < len(placement.n_cached) else 0,
        "used_bytes": budget.used_bytes,
        "free_bytes": budget.free_bytes,
        "total_bytes": budget.total_bytes,
        "upload_bytes": placement.upload_bytes[device] if device < placement.host_index else 0,
        "n_layers_experts_resident": n_resident,
        "n_layers_experts_host": n_host,
        "n_staging_slots": staging.n_slots if staging else 0,
        "slot_bytes": staging.slot_bytes if staging else 0,
        "slab_experts": staging.slab_experts if staging else 0,
    }


def _row(shape: ModelShape, placement: Placement, device: int) -> tuple[str, ...]:
    budget = placement.budgets[device]
    layers = f"{len(placement.layers_of(device))}{'+output' if device == placement.output_device else ''}"
    n_resident, n_host = count_experts(shape, placement, device)
    experts = f"{n_resident} resident, {n_host} host" if n_resident or n_host else "-"
    return (budget.name, layers, *(_mib(n) for n in _amounts(budget)), experts)


def _amounts(budget: DeviceBudget) -> tuple[int, ...]:
    return (
        budget.weights_bytes,
        budget.kv_bytes,
        budget.compute_bytes,
        budget.staging_bytes,
        budget.cache_bytes,
        budget.used_bytes,
        budget.spare_bytes,
        budget.free_bytes,
        budget.total_bytes,
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell: the first and the last to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _sizes(placement: Placement) -> str:
    return (
        f"context {placement.n_ctx} cells, ubatch {placement.n_ubatch}, wave {placement.n_wave}, grain "
        f"{placement.grain}, uploads per wave {_mib(placement.host_expert_bytes)} MiB"
    )


def _placed_layers(placement: Placement, device: int) -> str:
    layers = placement.layers_of(device)
    return f"layers on {placement.budgets[device].name}: {ranges(layers)}" if layers else ""


def _staging(shape: ModelShape, placement: Placement) -> list[tuple[int, str]]:
    return [
        (d, f"{plan.n_slots} slots of {_mib(plan.slot_bytes)} MiB, {plan.slab_experts} of {shape.n_expert} experts")
        for d, plan in enumerate(placement.staging)
        if plan
    ]
