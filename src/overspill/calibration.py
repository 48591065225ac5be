"""Rates of links and CPU for the experts of few tokens: measured, or saved by an earlier measurement.

`calibrate` measures experts that it makes up, at leisure, for `overspill calibrate` to save. A model that spreads
experts takes saved rates of its machine and type; without any it is measured on the model's own experts, once they are
in memory, in about a second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind
from overspill.gguf.types import TensorType
from overspill.kernels import Ops, cpu
from overspill.models.base import Routing
from overspill.pipeline.choose import Plan
from overspill.pipeline.together import (
    N_TOKENS,
    Alone,
    Experts,
    Setting,
    measure_alone,
    measure_together,
    n_experts_in_part,
)
from overspill.pipeline.upload import HostExperts, HostPart
from overspill.placement.budget import SLOT_PADDING
from overspill.placement.machine import Machine
from overspill.placement.rates import PartyRates
from overspill.quant.experts import NO_VECTORS, Activation, ExpertWeights
from overspill.saved_rates import Hardware, load_rates

_AT_LOAD_S, _AT_LEISURE_S = 0.1, 0.4
_MADE_BYTES = 2 << 30
_TILE_BYTES = 16 << 20
_log = logging.getLogger(__name__)

OpsOf = Callable[[Device], Ops]


@dataclass(frozen=True)
class ExpertShape:
    """Experts of a layer: how many, how many a token uses, and their matrices, `[n_ff, n_embd]`."""

    n_expert: int
    n_used: int
    n_ff: int
    n_embd: int


QWEN3_30B: Final = ExpertShape(n_expert=128, n_used=8, n_ff=768, n_embd=2048)


@dataclass(frozen=True)
class Calibration:
    """Rates of one type of weights, with everybody at work, and of each party alone, by number of tokens."""

    type: TensorType
    together: tuple[PartyRates, ...]
    alone: tuple[Alone, ...]


def hardware_of(devices: Sequence[Device], host: Device, n_threads: int) -> Hardware:
    """What measured rates hold for."""
    return Hardware.of([d.description for d in devices], n_threads=n_threads, memory_bytes=host.total_bytes)


# --- made-up experts, at leisure


class _Plain:
    """Experts as most models have them."""

    def experts(self, i_layer: int, x: torch.Tensor, routing: Routing, weights: ExpertWeights, ops: Ops) -> None:
        ops.experts(routing.normed, routing.ids, routing.mix, weights, Activation.SILU, x)


def calibrate(
    devices: Devices, ops_of: OpsOf, type: TensorType, n_threads: int, shape: ExpertShape = QWEN3_30B
) -> Calibration:
    """Measure with experts of that type and shape, which take up to 2 GiB of pinned memory meanwhile."""
    host, accelerators = devices.host, devices.accelerators
    layers = _made_layers(devices, type, shape)
    part = n_experts_in_part(shape.n_expert, shape.n_used, N_TOKENS[-1], len(accelerators))
    room_bytes = part * layers[0].n_bytes // shape.n_expert + SLOT_PADDING
    rooms = [d.allocate((room_bytes,), torch.uint8, kind=MemoryKind.STAGING, name="rates") for d in accelerators]
    setting = Setting(
        host=host,
        devices=accelerators,
        tables=[ops_of(device) for device in accelerators],
        rooms=rooms,
        layers=dict(enumerate(layers)),
        experts=_Plain(),
        host_ops=cpu.OPS,
        n_used=shape.n_used,
        n_threads=n_threads,
        seconds=_AT_LEISURE_S,
    )
    try:
        together = tuple(measure_together(setting, n) for n in N_TOKENS)
        alone = tuple(measure_alone(setting, n) for n in N_TOKENS)
    finally:
        for device, room in zip(accelerators, rooms, strict=True):
            device.free(room)
        for made in (part for layer in layers for part in layer.host_parts):
            host.free(made.buffer)
    return Calibration(type, together, alone)


def _made_layers(devices: Devices, type: TensorType, shape: ExpertShape) -> list[HostExperts]:
    wide, narrow = (shape.n_ff, shape.n_embd), (shape.n_embd, shape.n_ff)
    layer_bytes = shape.n_expert * sum(rows * type.row_bytes(cols) for rows, cols in (wide, wide, narrow))
    n_layers = max(1, min(_MADE_BYTES, devices.host.free_bytes // 4) // layer_bytes)
    tile = torch.randint(0, 256, (_TILE_BYTES,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    def part(rows: int, cols: int) -> HostPart:
        buffer = devices.host.allocate_pinned(shape.n_expert * rows * type.row_bytes(cols), name="rates")
        for piece in buffer.host_tensor.split(_TILE_BYTES):
            piece.copy_(tile[: len(piece)])
        return HostPart(buffer, type, (shape.n_expert, rows, cols))

    return [HostExperts((part(*wide), part(*wide), part(*narrow)), shape.n_expert, NO_VECTORS) for _ in range(n_layers)]


# --- a model's own experts


def with_saved_rates(plan: Plan, devices: Devices, n_threads: int, type_name: str) -> Plan:
    """The plan with rates that were saved of this machine for weights of that type, where there are any."""
    owners = plan.spread_owners
    hardware = hardware_of([devices.accelerators[i] for i in owners], devices.host, n_threads)
    saved = load_rates(hardware).get(type_name)
    if saved is None:
        return plan
    rates = tuple(_of_machine(plan.machine, owners, of_some) for of_some in saved.party_rates)
    return plan.with_party_rates(rates, f"saved {saved.measured}")


def with_rates(
    plan: Plan,
    devices: Devices,
    ops_of: OpsOf,
    rooms: Mapping[int, Buffer],
    host_experts: Mapping[int, HostExperts],
    experts: Experts,
    n_threads: int,
    type_name: str,
) -> Plan:
    """The plan of a loaded model with saved rates or, without any, those of its own experts.

    rooms: memory for experts, by device. host_experts: by layer; `experts` computes them.
    """
    counted = with_saved_rates(plan, devices, n_threads, type_name)
    if counted is plan:
        owners = plan.spread_owners
        setting = Setting(
            host=devices.host,
            devices=[devices.accelerators[i] for i in owners],
            tables=[ops_of(devices.accelerators[i]) for i in owners],
            rooms=[rooms[i] for i in owners],
            layers=host_experts,
            experts=experts,
            host_ops=cpu.OPS,
            n_used=plan.shape.n_expert_used,
            n_threads=n_threads,
            seconds=_AT_LOAD_S,
        )
        measured = [measure_together(setting, n) for n in N_TOKENS if n <= plan.n_spread_tokens]
        rates = tuple(_of_machine(plan.machine, owners, of_some) for of_some in measured)
        counted = plan.with_party_rates(rates, "measured at load")
    _log.info("rates of links and CPU: %s", counted.party_rates_from)
    return counted


def _of_machine(machine: Machine, owners: Sequence[int], rates: PartyRates) -> PartyRates:
    """Rates of some devices as those of all: the others read no experts, what is said of them does not matter."""
    links, beside = [d.h2d_gbps for d in machine.devices], [d.h2d_gbps for d in machine.devices]
    for i, link, link_beside in zip(owners, rates.links_gbps, rates.links_beside_cpu_gbps, strict=True):
        links[i], beside[i] = link, link_beside
    return replace(rates, links_gbps=tuple(links), links_beside_cpu_gbps=tuple(beside))
