"""Cutting a model into splits: runs of work on one device between two synchronisation points.

Consecutive layers that need nothing from outside fuse into one split. A layer whose experts lie in host RAM makes
two: attention with routing, and the experts. Devices are numbered as in the plan, the host last.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class Slab(NamedTuple):
    """A range of experts `first <= e < last` of one layer, the unit of upload."""

    first: int
    last: int

    @property
    def n_experts(self) -> int:
        return self.last - self.first


N_TILES = 2
"""So that one tile is filled while the one before is emptied."""


@dataclass(frozen=True)
class Detour:
    """Hand-offs through pinned host memory, a tile at a time.

    pairs: ordered pairs (source, target) of accelerators that have to go that way. tile_bytes: of one tile.
    """

    pairs: frozenset[tuple[int, int]] = frozenset()
    tile_bytes: int = 1 << 24

    def n_tiles(self, n_bytes: int) -> int:
        """Tiles that so many bytes take."""
        return -(-n_bytes // self.tile_bytes)


@dataclass(frozen=True)
class Layout:
    """Where each layer computes and which layers upload their experts.

    layer_device: per layer, `host` = the CPU. slabs: per layer, the slabs its host experts go up in; empty where the
    experts are resident or the layer has none. mixed: layers of which a part (say, the down matrices) is resident:
    their slabs always go up whole, because the CPU cannot reach that part. detour: hand-offs that cannot be direct.
    """

    n_accelerators: int
    layer_device: tuple[int, ...]
    output_device: int
    slabs: tuple[tuple[Slab, ...], ...]
    mixed: frozenset[int] = frozenset()
    embed_on: int | None = None
    detour: Detour = Detour()

    @property
    def embed_device(self) -> int:
        """Where token ids become hidden states: the host unless the plan found room on a device."""
        return self.host if self.embed_on is None else self.embed_on

    @property
    def input_devices(self) -> list[int]:
        """Devices that need a wave's positions (and ids)."""
        embedding = set() if self.embed_on is None else {self.embed_on}
        return sorted({*self.layer_device} | embedding)

    @property
    def host(self) -> int:
        """Number of the host among the devices."""
        return self.n_accelerators

    @property
    def n_layer(self) -> int:
        return len(self.layer_device)

    def has_host_experts(self, i_layer: int) -> bool:
        """Whether the layer's experts are uploaded (or computed on the CPU) rather than resident."""
        return bool(self.slabs[i_layer])


class SplitKind(StrEnum):
    """What a split does; the names of the model contract."""

    EMBED = "embed"
    LAYERS = "layers"
    ATTEND = "attend"
    EXPERTS = "experts"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Split:
    """Layers `first <= i < last` on one device."""

    kind: SplitKind
    device: int
    first: int = -1
    last: int = -1


def cut(layout: Layout) -> tuple[Split, ...]:
    """All splits of a model in the order of computation."""
    splits = [Split(SplitKind.EMBED, layout.embed_device)]
    for i in range(layout.n_layer):
        device = layout.layer_device[i]
        if layout.has_host_experts(i):
            splits += [Split(SplitKind.ATTEND, device, i, i + 1), Split(SplitKind.EXPERTS, device, i, i + 1)]
        elif splits[-1].kind is SplitKind.LAYERS and splits[-1].device == device:
            splits[-1] = Split(SplitKind.LAYERS, device, splits[-1].first, i + 1)
        else:
            splits.append(Split(SplitKind.LAYERS, device, i, i + 1))
    return (*splits, Split(SplitKind.OUTPUT, layout.output_device))


def detours(layout: Layout) -> list[tuple[int, int]]:
    """Pairs of accelerators between which this layout hands off hidden states through the host."""
    devices = [split.device for split in cut(layout)]
    return sorted({*pairwise(devices)} & layout.detour.pairs)
