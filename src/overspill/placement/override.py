"""What the user fixed by name: `-ot REGEX=DEVICE`, `--cpu-moe`, `--n-cpu-moe`.

A regex is searched in each tensor's full name; the first item that matches wins; `--cpu-moe` and then `--n-cpu-moe`
come after all `-ot` items and take only routed experts. What a match means depends on the tensor's role:
- routed experts go where the item says; sent to a device, they draw their whole layer there, because a layer computes
  where its resident experts are;
- the other weights of a layer move it when all of them are sent to one device; a part of them stays with its layer
  (noted), since only routed experts can live apart;
- the output matrix moves the output; embeddings are always read on the host.
With fit on, `--n-cpu-moe N` fixes only HOW MANY layers keep their experts in host RAM (as many as the first N layers
have), and fit spreads them over the devices; with fit off it means the first N layers.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from overspill.errors import UserError
from overspill.options import Options, Override
from overspill.placement.machine import Machine
from overspill.placement.shape import OUTPUT_WEIGHT, ModelShape, Role, TensorSize


@dataclass(frozen=True)
class Pins:
    """What is fixed, by device number.

    layer_device: layers that `-ot` sends somewhere. expert_home: homes of routed expert tensors that an option names.
    output_device: where `-ot` puts the output. wishes: item and target of every other tensor an item matched; they
    hold only where the tensor's layer lands there anyway. notes: items that matched nothing.
    """

    layer_device: Mapping[int, int]
    expert_home: Mapping[str, int]
    output_device: int | None
    wishes: tuple[tuple[Override, TensorSize, int], ...]
    notes: tuple[str, ...]


def resolve(shape: ModelShape, machine: Machine, options: Options) -> Pins:
    """Apply the options to the model's tensors. `UserError` for an unknown device or items that contradict."""
    items = options.overrides
    targets = [_target(item, machine) for item in items]
    winners = first_matches(shape.names, tuple(item.pattern for item in items))
    hits = [(t, i) for t, i in zip(shape.tensors, winners, strict=True) if i >= 0]
    sent = [(t, targets[i]) for t, i in hits]
    expert_home = {t.name: target for t, target in sent if t.role is Role.EXPERT}
    layer_device = _whole_layers(shape, sent)
    for layer, device in _drawn_layers(sent, machine).items():
        if layer_device.setdefault(layer, device) != device:
            raise UserError(
                f"-ot puts the routed experts of layer {layer} on {machine.names[device]} but the layer itself on "
                f"{machine.names[layer_device[layer]]}; name the same device for both, or CPU for the experts"
            )
    return Pins(
        layer_device=layer_device,
        expert_home={**_host_experts(shape, options, machine.host_index), **expert_home},
        output_device=next((target for t, target in sent if t.name == OUTPUT_WEIGHT), None),
        wishes=tuple((items[i], t, targets[i]) for t, i in hits if t.role is not Role.EXPERT),
        notes=tuple(_idle_notes(shape, items, set(winners))),
    )


def unmet_wishes(pins: Pins, home: Mapping[str, int]) -> list[str]:
    """One note per item some of whose tensors stay where their layer, or the embeddings, are."""
    unmet: dict[Override, list[str]] = {}
    for item, tensor, target in pins.wishes:
        if home[tensor.name] != target:
            unmet.setdefault(item, []).append(tensor.name)
    return [
        f"-ot {item.pattern}={item.target}: {len(names)} tensors other than routed experts stay where they are used "
        f"(such as {names[0]})"
        for item, names in unmet.items()
    ]


def n_spread_layers(shape: ModelShape, options: Options, movable: Sequence[int]) -> int:
    """How many layers `--n-cpu-moe` wants in host RAM where fit may choose which; `movable`: bytes open per layer."""
    return sum(1 for n_bytes in movable[: options.n_cpu_moe] if n_bytes > 0) if options.fit != "off" else 0


@lru_cache(maxsize=64)
def first_matches(names: tuple[str, ...], patterns: tuple[str, ...]) -> tuple[int, ...]:
    """For each name the position of the first pattern that occurs in it, -1 if none does."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return tuple(next((i for i, regex in enumerate(compiled) if regex.search(name)), -1) for name in names)


def _target(item: Override, machine: Machine) -> int:
    index = machine.find(item.target)
    if index is None:
        names = ", ".join((*machine.names[:-1], "CPU"))
        raise UserError(f"-ot {item.pattern}={item.target}: no such device; there are {names}")
    if index < machine.host_index and machine.devices[index].free_bytes == 0:
        raise UserError(f"-ot {item.pattern}={item.target}: that device has no free memory; name another one")
    return index


def _whole_layers(shape: ModelShape, sent: Iterable[tuple[TensorSize, int]]) -> dict[int, int]:
    """Layers all of whose own weights are sent to one device."""
    per_target = Counter((t.layer, target) for t, target in sent if t.role is Role.LAYER)
    if not per_target:
        return {}
    n_weights = Counter(t.layer for t in shape.tensors if t.role is Role.LAYER)
    return {layer: target for (layer, target), n in per_target.items() if layer is not None and n == n_weights[layer]}


def _drawn_layers(sent: Iterable[tuple[TensorSize, int]], machine: Machine) -> dict[int, int]:
    """Layers some of whose routed experts are sent to a device."""
    drawn: dict[int, int] = {}
    for t, target in sent:
        if t.role is not Role.EXPERT or t.layer is None or target == machine.host_index:
            continue
        if drawn.setdefault(t.layer, target) != target:
            first, second = machine.names[drawn[t.layer]], machine.names[target]
            raise UserError(f"-ot puts routed experts of layer {t.layer} on {first} and {second}; name one device")
    return drawn


def _host_experts(shape: ModelShape, options: Options, host: int) -> dict[str, int]:
    """Routed experts that `--cpu-moe`, or `--n-cpu-moe` taken literally, keeps in host RAM."""
    n_first = options.n_cpu_moe if options.fit == "off" else 0
    if not (options.cpu_moe or n_first):
        return {}
    return {
        t.name: host
        for t in shape.tensors
        if t.role is Role.EXPERT and (options.cpu_moe or (t.layer is not None and t.layer < n_first))
    }


def _idle_notes(shape: ModelShape, items: Sequence[Override], winners: set[int]) -> Iterable[str]:
    for i, item in enumerate(items):
        if i in winners:
            continue
        if any(w >= 0 for w in first_matches(shape.names, (item.pattern,))):
            yield f"-ot {item.pattern}={item.target}: earlier items take all it matches; put it first"
        else:
            names = ", ".join(closest_names(shape.names, item.pattern))
            yield f"-ot {item.pattern}={item.target}: matches no tensor; closest are {names}"


@lru_cache(maxsize=64)
def closest_names(names: tuple[str, ...], pattern: str) -> tuple[str, ...]:
    """Up to three tensor names most like a regex, one of each kind (layers differ only in their number)."""
    kinds = {re.sub(r"\d+", "N", name): name for name in reversed(names)}
    wanted = re.sub(r"\d+", "N", re.sub(r"\\(.)", r"\1", pattern))
    return tuple(kinds[kind] for kind in difflib.get_close_matches(wanted, kinds, n=3, cutoff=0.0))
