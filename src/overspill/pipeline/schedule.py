"""Schedules: from a wave to the actions that compute it, in issue order.

All schedules are orders of the same actions. Depth-first takes each ubatch through all layers; breadth-first takes
all ubatches of the wave through each layer, so that a layer's host experts go up once per wave; serial is
depth-first with every action waiting for the one before it. For one layer the order of ubatches is always the same,
so results are bit for bit the same. Where a layer's experts go up as one slab, each ubatch attends just before it uses
them: the next device can start on the first ubatch while this one computes the second. Pure: reads values, yields
values, knows no device.

A resource is a tuple that starts with its name: ("x", device, ubatch) hidden states, ("route", device, ubatch)
normed input, ids and weights of routing, ("who", device, ubatch) which party computes which expert, ("y", device) and
("heard", device, party) what a party computed of the experts, where it did so and where it is wanted, ("tally", device)
and ("host_tally", device) how many each party got, ("cache", layer) experts that the layer's device keeps, ("pos",
device) positions and token ids, ("slot", device, i) a staging slot, ("wide", device) a dequantised slab, ("kv", layer),
("ids", ubatch) expert ids on the host, ("logits", device, i), ("host_logits", i), ("tile", source, target, i) pinned
memory between two accelerators that no direct copy connects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from overspill.device.lane import Lane
from overspill.pipeline.action import Action, Order, Policy, Shares, Verb, WaveSchedule
from overspill.pipeline.ledger import Resource, StreamId
from overspill.pipeline.split import N_TILES, Layout, Split, SplitKind, cut
from overspill.placement.budget import N_LOGIT_BUFFERS

__all__ = ["Action", "Order", "Policy", "Shares", "Verb", "WaveSchedule", "actions"]


def actions(
    layout: Layout, schedule: WaveSchedule, n_chunks: Sequence[int], n_tiles: Sequence[int] | None = None
) -> Iterator[Action]:
    """Actions of one wave.

    n_chunks: per ubatch, how many pieces its output rows are computed in (0 = none wanted). n_tiles: per ubatch, how
    many tiles its hidden states take where they go through the host; None: one.
    """
    return _Emitter(layout, schedule, n_chunks, n_tiles or [1] * len(n_chunks)).emit()


class _Upload(NamedTuple):
    """A slab that is to go up, and the ids on the host that say what of it."""

    layer: int
    slab: int
    ids: tuple[Resource, ...] = ()


class _Emitter:
    """State while a wave's actions are listed: where each ubatch is, and which slab goes up next."""

    def __init__(self, layout: Layout, schedule: WaveSchedule, n_chunks: Sequence[int], n_tiles: Sequence[int]) -> None:
        self._layout = layout
        self._schedule = schedule
        self._n_chunks = n_chunks
        self._n_tiles = n_tiles
        self._n_tiles_used: dict[tuple[int, int], int] = {}
        self._splits = cut(layout)
        self._place = [layout.host] * len(n_chunks)
        self._to_upload: list[deque[_Upload]] = [deque() for _ in range(layout.n_accelerators)]
        self._n_uploaded = [0] * layout.n_accelerators
        self._n_used = [0] * layout.n_accelerators
        self._n_outputs = 0

    def emit(self) -> Iterator[Action]:
        ubatches = range(len(self._n_chunks))
        is_breadth_first = self._schedule.order is Order.BREADTH_FIRST
        groups = [tuple(ubatches)] if is_breadth_first else [(m,) for m in ubatches]
        yield from self._inputs()
        if self._schedule.policy is Policy.ALL:
            self._queue_uploads(len(groups))
            for device in range(self._layout.n_accelerators):
                yield from self._fill_slots(device)
        for group in groups:
            for split in self._splits:
                yield from self._run(split, group)

    def _inputs(self) -> Iterator[Action]:
        for device in self._layout.input_devices:
            yield Action(Verb.INPUTS, StreamId(device, Lane.COMPUTE), (("host_pos",),), (("pos", device),))

    def _queue_uploads(self, n_passes: int) -> None:
        for _ in range(n_passes):
            for i_layer, slabs in enumerate(self._layout.slabs):
                for i_slab in range(len(slabs)):
                    self._to_upload[self._layout.layer_device[i_layer]].append(_Upload(i_layer, i_slab))

    def _fill_slots(self, device: int) -> Iterator[Action]:
        for _ in range(min(self._schedule.n_staging_slots, len(self._to_upload[device]))):
            yield self._upload_next(device)

    def _upload_next(self, device: int) -> Action:
        upload = self._to_upload[device].popleft()
        slot = self._n_uploaded[device] % self._schedule.n_staging_slots
        self._n_uploaded[device] += 1
        stream = StreamId(device, Lane.UPLOAD)
        writes = (("slot", device, slot),)
        return Action(Verb.UPLOAD, stream, upload.ids, writes, layer=upload.layer, slab=upload.slab, slot=slot)

    def _run(self, split: Split, group: tuple[int, ...]) -> Iterator[Action]:
        match split.kind:
            case SplitKind.ATTEND if not self._attends_first(split):
                pass  # goes with the experts, ubatch by ubatch
            case SplitKind.EXPERTS if self._policy(split.first) is Policy.CPU:
                yield from self._experts_on_host(split, group)
            case SplitKind.EXPERTS if self._policy(split.first) is Policy.SPREAD:
                following = self._splits[self._splits.index(split) + 1].device
                for m in group:
                    yield from self._spread(split, m, following)
            case SplitKind.EXPERTS:
                yield from self._experts(split, group)
            case SplitKind.OUTPUT:
                for m in group:
                    yield from self._output(split, m)
            case _:
                for m in group:
                    yield from self._compute(split, m)

    def _move(self, device: int, m: int, *, with_route: bool = False) -> Iterator[Action]:
        source = self._place[m]
        if source == device:
            return
        self._place[m] = device
        if (source, device) in self._layout.detour.pairs:
            yield from self._move_by_host(source, device, m)
            return
        names = ("x", "route") if with_route else ("x",)
        reads, writes = (tuple((name, end, m) for name in names) for end in (source, device))
        yield self._pass(source, device, m, reads, writes)

    def _move_by_host(self, source: int, device: int, m: int) -> Iterator[Action]:
        """Down from one accelerator and up to the other, a tile at a time, each on its own stream."""
        down, up = StreamId(source, Lane.HAND_OFF), StreamId(device, Lane.HAND_OFF)
        x, target = ("x", source, m), ("x", device, m)
        for i in range(self._n_tiles[m]):
            n_used = self._n_tiles_used.get((source, device), 0)
            self._n_tiles_used[source, device] = n_used + 1
            tile = ("tile", source, device, n_used % N_TILES)
            yield Action(Verb.HAND_DOWN, down, (x,), (tile,), ubatch=m, source=source, chunk=i)
            yield Action(Verb.HAND_UP, up, (tile,), (target,), ubatch=m, source=source, chunk=i)

    def _compute(self, split: Split, m: int) -> Iterator[Action]:
        device, x = split.device, ("x", split.device, m)
        stream = StreamId(device, Lane.COMPUTE)
        if split.kind is SplitKind.EMBED:
            self._place[m] = device
            ids: tuple[Resource, ...] = () if device == self._layout.host else (("pos", device),)
            yield Action(Verb.EMBED, stream, ids, (x,), ubatch=m)
            return
        yield from self._move(device, m)
        kv: tuple[Resource, ...] = tuple(("kv", i) for i in range(split.first, split.last))
        reads, writes = (x, ("pos", device), *kv), (x, *kv)
        verb = Verb.LAYERS
        if split.kind is SplitKind.ATTEND:
            verb, writes = Verb.ATTEND, (*writes, ("route", device, m))
        yield Action(verb, stream, reads, writes, layer=split.first, last_layer=split.last, ubatch=m)

    def _experts_on_host(self, split: Split, group: tuple[int, ...]) -> Iterator[Action]:
        """The next ubatch comes to the device before this one leaves it: both travel on the device's one stream."""
        for m, following in pairwise((None, *group, None)):
            if following is not None:
                yield from self._attend(split, following)
            if m is not None:
                yield from self._compute_on_host(split, m)

    def _compute_on_host(self, split: Split, m: int) -> Iterator[Action]:
        host = self._layout.host
        yield from self._move(host, m, with_route=True)
        x = ("x", host, m)
        reads, stream = (x, ("route", host, m)), StreamId(host, Lane.COMPUTE)
        yield Action(Verb.EXPERTS, stream, reads, (x,), layer=split.first, last_layer=split.last, ubatch=m)

    def _spread(self, split: Split, m: int, following: int) -> Iterator[Action]:
        """The owner tells the others what to compute, and does its own part meanwhile.

        All is added up on the device that goes on, so that what it has computed itself need not travel.
        """
        yield from self._attend(split, m)
        owner, layer = split.device, split.first
        shares = self._schedule.shares[owner]
        helpers = [party for party, _ in shares[1:]]
        routed = tuple((name, owner, m) for name in ("route", "who"))
        stream = StreamId(owner, Lane.COMPUTE)
        kept = self._kept(split)
        writes, n_slices = (*routed[1:], ("tally", owner), *kept), self._schedule.n_slices
        yield Action(Verb.DIVIDE, stream, routed[:1], writes, layer=layer, ubatch=m, shares=shares, n_slices=n_slices)
        for p in helpers:
            yield self._pass(owner, p, m, routed, tuple((name, p, m) for name in ("route", "who")))
            yield self._share(p, layer, m, (), (("y", p),))
        # Its own reading would hold up what the others are told until it ends, so it waits for that.
        told = tuple(("who", p, m) for p in helpers)
        x = ("x", owner, m)
        yield self._share(owner, layer, m, (x, *told), (x, *kept))
        yield from self._move(following, m)
        terms: list[Resource] = [("x", following, m)]
        for p in helpers:
            terms.append(("y", p) if p == following else ("heard", following, p))
            if p != following:
                yield self._pass(p, following, m, (("y", p),), (terms[-1],))
        if helpers:
            adding = StreamId(following, Lane.COMPUTE)
            yield Action(Verb.ADD, adding, tuple(terms), tuple(terms[:1]), layer=layer, ubatch=m)

    def _share(
        self, party: int, layer: int, m: int, reads: tuple[Resource, ...], writes: tuple[Resource, ...]
    ) -> Action:
        room: tuple[Resource, ...] = () if party == self._layout.host else (("slot", party, 0),)
        room += (("wide", party),) if room and self._schedule.widen else ()
        reads = (("route", party, m), ("who", party, m), *reads)
        stream = StreamId(party, Lane.COMPUTE)
        writes, n_slices = (*writes, *room), self._schedule.n_slices
        return Action(Verb.SHARE, stream, reads, writes, layer=layer, ubatch=m, slot=0, n_slices=n_slices)

    def _pass(
        self, source: int, target: int, m: int, reads: tuple[Resource, ...], writes: tuple[Resource, ...]
    ) -> Action:
        lane_of = target if target != self._layout.host else source
        return Action(Verb.HAND_OFF, StreamId(lane_of, Lane.HAND_OFF), reads, writes, ubatch=m, source=source)

    def _experts(self, split: Split, group: tuple[int, ...]) -> Iterator[Action]:
        if self._schedule.policy is not Policy.ALL:
            ids: tuple[Resource, ...] = ()
            if self._policy(split.first) is Policy.SELECTED:
                yield from self._read_ids(split, group)
                ids = tuple(("ids", m) for m in group)
            n_slabs = len(self._layout.slabs[split.first])
            self._to_upload[split.device].extend(_Upload(split.first, i, ids) for i in range(n_slabs))
            yield from self._fill_slots(split.device)
        for i_slab in range(len(self._layout.slabs[split.first])):
            yield from self._slab(split, i_slab, group)

    def _kept(self, split: Split) -> tuple[Resource, ...]:
        """The experts of a split's layer that its device keeps."""
        return (("cache", split.first),) if any(self._schedule.n_cached[split.device : split.device + 1]) else ()

    def _policy(self, i_layer: int) -> Policy:
        return Policy.ALL if i_layer in self._layout.mixed else self._schedule.policy

    def _attends_first(self, split: Split) -> bool:
        """Whether all ubatches attend before the first expert.

        For `selected`, the upload must know the routers' ids. With several slabs the next device cannot start before
        the last of them anyhow, and attention gives the slabs time to arrive.
        """
        policy, n_slabs = self._policy(split.first), len(self._layout.slabs[split.first])
        return policy is Policy.SELECTED or (policy is Policy.ALL and n_slabs > 1)

    def _attend(self, split: Split, m: int) -> Iterator[Action]:
        return self._compute(replace(split, kind=SplitKind.ATTEND), m)

    def _read_ids(self, split: Split, group: tuple[int, ...]) -> Iterator[Action]:
        for m in group:
            stream = StreamId(split.device, Lane.HAND_OFF)
            reads, writes = (("route", split.device, m),), (("ids", m),)
            yield Action(Verb.READ_IDS, stream, reads, writes, layer=split.first, ubatch=m)

    def _slab(self, split: Split, i_slab: int, group: tuple[int, ...]) -> Iterator[Action]:
        device, i_layer = split.device, split.first
        slot = self._n_used[device] % self._schedule.n_staging_slots
        self._n_used[device] += 1
        weights: Resource = ("slot", device, slot)
        stream = StreamId(device, Lane.COMPUTE)
        if kept := self._kept(split):
            n, where = self._schedule.n_slices, (weights,)
            yield Action(Verb.PLACE, stream, kept, where, layer=i_layer, slab=i_slab, slot=slot, n_slices=n)
        if self._schedule.widen:
            yield Action(Verb.WIDEN, stream, (weights,), (("wide", device),), layer=i_layer, slab=i_slab, slot=slot)
            weights = ("wide", device)
            yield from self._refill(device)
        for m in group:
            if i_slab == 0 and not self._attends_first(split):
                yield from self._attend(split, m)
            x = ("x", device, m)
            reads = (x, ("route", device, m), weights)
            yield Action(Verb.EXPERTS, stream, reads, (x,), layer=i_layer, ubatch=m, slab=i_slab, slot=slot)
        if not self._schedule.widen:
            yield from self._refill(device)

    def _refill(self, device: int) -> Iterator[Action]:
        if self._to_upload[device]:
            yield self._upload_next(device)

    def _output(self, split: Split, m: int) -> Iterator[Action]:
        if self._n_chunks[m]:
            yield from self._move(split.device, m)
        for chunk in range(self._n_chunks[m]):
            slot = self._n_outputs % N_LOGIT_BUFFERS
            self._n_outputs += 1
            logits, on_host = ("logits", split.device, slot), ("host_logits", slot)
            compute, down = StreamId(split.device, Lane.COMPUTE), StreamId(split.device, Lane.HAND_OFF)
            x = ("x", split.device, m)
            yield Action(Verb.OUTPUT, compute, (x,), (logits,), ubatch=m, slot=slot, chunk=chunk)
            yield Action(Verb.DOWNLOAD, down, (logits,), (on_host,), ubatch=m, slot=slot, chunk=chunk)
