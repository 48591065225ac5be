"""The words of a schedule: what an action does, and how a wave is run. Values only, see `pipeline.schedule`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from overspill.pipeline.ledger import Resource, StreamId

Shares = tuple[tuple[int, int], ...]
"""Who computes the experts of a layer, the owner first, and the weight of each."""


class Order(StrEnum):
    """The schedules."""

    SERIAL = "serial"
    DEPTH_FIRST = "depth-first"
    BREADTH_FIRST = "breadth-first"


class Policy(StrEnum):
    """What happens to a layer's host experts: all go up, those that the ids name go up, or the CPU computes them.

    SPREAD: those that the ids name are shared out among the CPU and all accelerators, each of which reads its own from
    host memory over its own link (few tokens: every link works on every token).
    """

    ALL = "all"
    SELECTED = "selected"
    CPU = "cpu"
    SPREAD = "spread"


class Verb(StrEnum):
    """What an action does."""

    INPUTS = "inputs"
    EMBED = "embed"
    LAYERS = "layers"
    ATTEND = "attend"
    READ_IDS = "read_ids"
    UPLOAD = "upload"
    PLACE = "place"
    WIDEN = "widen"
    EXPERTS = "experts"
    DIVIDE = "divide"
    SHARE = "share"
    ADD = "add"
    HAND_OFF = "hand_off"
    HAND_DOWN = "hand_down"
    HAND_UP = "hand_up"
    OUTPUT = "output"
    DOWNLOAD = "download"


@dataclass(frozen=True)
class Action:
    """One launch. Fields that a verb does not use are -1.

    layer, last_layer: the layers computed. slab: index into the layer's slabs. slot: staging slot (or logits buffer
    of OUTPUT and DOWNLOAD). source: where a hand-off comes from. chunk: which rows of the outputs, or which tile of a
    hand-off through the host. shares: of DIVIDE. n_slices: of DIVIDE, SHARE and PLACE, see `ExpertWeights`.
    """

    verb: Verb
    stream: StreamId
    reads: tuple[Resource, ...]
    writes: tuple[Resource, ...]
    layer: int = -1
    last_layer: int = -1
    ubatch: int = -1
    slab: int = -1
    slot: int = -1
    source: int = -1
    chunk: int = -1
    shares: Shares = ()
    n_slices: int = 1

    @property
    def device(self) -> int:
        return self.stream.device

    @cached_property
    def work_name(self) -> tuple[Hashable, ...]:
        """What decides about the work of an action that computes, on its device and of its ubatch."""
        return self.verb, self.layer, self.last_layer, self.slab, self.slot, *(resource[0] for resource in self.reads)

    @cached_property
    def label(self) -> str:
        """Short text for traces and grids, such as `attend L3 m1`."""
        parts = [self.verb.value]
        if self.layer >= 0:
            last = self.last_layer - 1
            parts.append(f"L{self.layer}" if last <= self.layer else f"L{self.layer}-{last}")
        if self.slab >= 0:
            parts.append(f"s{self.slab}")
        if self.ubatch >= 0:
            parts.append(f"m{self.ubatch}")
        return " ".join(parts)


@dataclass(frozen=True)
class WaveSchedule:
    """How waves are run.

    widen: dequantise each staged slab once, before the ubatches use it (devices whose kernels want that).
    shares: for SPREAD, by the number of the device that owns a layer. n_cached: likewise, how many of its experts the
    device keeps, none where it is empty: SPREAD uses and changes them, and what goes up goes without them. n_slices:
    into so many, experts are shared out and kept. is_recorded: work of prompts is replayed where it was there before.
    """

    order: Order
    policy: Policy = Policy.ALL
    n_staging_slots: int = 2
    widen: bool = False
    shares: tuple[Shares, ...] = ()
    n_cached: tuple[int, ...] = ()
    n_slices: int = 1
    is_recorded: bool = False
