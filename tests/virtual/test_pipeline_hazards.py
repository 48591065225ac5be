"""Proof without timing: in what null devices write down, every two conflicting accesses are ordered by an event.

And proof that the proof can fail: a ledger that is blind to one kind of resource is found out, and so is every single
wait that is missing from the log, unless the rest of the log implies it. What is implied is decided by a search of the
log as a graph, which knows nothing of the checker's clocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import product

import pytest
import torch

from overspill.device import hazard
from overspill.device.base import Buffer
from overspill.device.hazard import HOST, Entry, Hazard, HazardKind, Verb
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.blind import blind_to
from tests.helpers.pipe import ORDERS_AND_POLICIES, Pipe, Shape, cut_wave, cut_waves, pipe
from tests.helpers.tiny_moe import N_VOCAB, tiny_source

IDS = [(7 * i + 3) % N_VOCAB for i in range(15)]
NO_THROTTLE = 1 << 30  # a host that waits would order things by the way


def without_outputs(wave: Wave) -> Wave:
    return Wave(tuple(Ubatch(u.ids, u.segments) for u in wave.ubatches))


def waves() -> list[Wave]:
    """Two that nobody waits for, one with logits of every row, and a token after it."""
    first, second, third = cut_waves(IDS[:14], (2, 2, 1) * 2 + (2, 1, 1), 3)
    return [without_outputs(first), without_outputs(second), third, cut_wave(IDS[14:], (1,), first_pos=14)]


def null_pipe(shape: Shape, max_in_flight: int = NO_THROTTLE) -> AbstractContextManager[Pipe]:
    return pipe(
        tiny_source(),
        shape,
        n_ubatch=2,
        n_ubatches=3,
        n_cells=len(IDS),
        kind="null",
        max_in_flight=max_in_flight,
    )


def run(p: Pipe, order: Order, policy: Policy, *, chosen: Sequence[int] = (0, 2, 3), first_wave: int = 0) -> None:
    """All waves but the first so many. Null devices compute no ids: what the host finds in their place is `chosen`."""
    for buffer in p.buffers("ids"):
        ids = buffer.raw().view(torch.int32)
        ids.copy_(torch.arange(len(ids)).remainder(len(chosen)).apply_(lambda i: chosen[i]))
    for wave in waves()[first_wave:]:
        p.runner.run(wave, p.schedule(order, policy))


def hazards(p: Pipe) -> list[Hazard]:
    """Cells of the cache are named as read before any is written."""
    return hazard.check(p.log, preinitialised=p.buffers("kv"))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(n, grain=grain, slab_experts=slab, host_layers=host_layers, n_staging=n_staging)
        for n, grain, slab, host_layers, n_staging in product((1, 2, 4), (1, 2), (1, 3), ("all", "odd"), (2, 3))
    ]
    + [
        replace(special, n_devices=n)
        for n in (1, 2, 3)
        for special in (
            Shape(1, host_layers="none"),
            Shape(1, slab_experts=1, widens=True),
            Shape(1, n_layers_on_cpu=2),
            Shape(1, mixed_layers="even", slab_experts=2),
            Shape(1, embeds=True),
        )
    ],
    ids=str,
)
def test_no_plan_has_a_hazard(shape: Shape) -> None:
    with null_pipe(shape) as p:
        for order, policy in ORDERS_AND_POLICIES:
            run(p, order, policy)
        assert hazards(p) == []


@pytest.mark.parametrize("max_in_flight", [1, 2, 7])
@pytest.mark.parametrize("order", list(Order))
def test_the_host_runs_ahead_only_so_far(order: Order, max_in_flight: int) -> None:
    """Before it issues one item more it waits for the oldest, in the order of issue."""
    wave = without_outputs(cut_wave(IDS[:6], (2, 2, 2)))
    with null_pipe(Shape(2, slab_experts=2), max_in_flight) as p:
        n_loading = len(p.log)
        p.runner.run(wave, p.schedule(order))
        issued, waited_for = [], []
        for i, entry in enumerate(p.log[n_loading:], start=n_loading):
            if entry.verb is Verb.LAUNCH and entry.label.startswith(("attend", "experts")):
                issued.append(p.log[i + 1].event)
                assert len(issued) - len(waited_for) <= max_in_flight + 1
            if entry.verb is Verb.WAIT_HOST:
                waited_for.append(entry.event)
    assert waited_for == issued[: len(issued) - max_in_flight]


def blind_hazards(names: Collection[str], order: Order, policy: Policy, shape: Shape) -> list[tuple[HazardKind, str]]:
    """What the checker says of a ledger that overlooks `names`: kinds, and names of buffers without their numbers."""
    with blind_to(names), null_pipe(shape) as p:
        run(p, order, policy)
        return [(h.kind, h.buffer.name.rstrip("0123456789")) for h in hazards(p)]


ONE = Shape(1, slab_experts=1, embeds=True)
TWO = Shape(2, slab_experts=1)
RAW, WAR, WAW = HazardKind.READ_AFTER_WRITE, HazardKind.WRITE_AFTER_READ, HazardKind.WRITE_AFTER_WRITE


@pytest.mark.parametrize(
    ("shape", "names", "policy", "expected"),
    [
        (TWO, ["x"], Policy.ALL, {(RAW, "x"), (WAR, "x"), (WAW, "x")}),
        (TWO, ["x", "route"], Policy.CPU, {(kind, part) for kind in (RAW, WAR) for part in ("normed", "ids", "mix")}),
        (TWO, ["route"], Policy.SELECTED, {(RAW, "ids")}),
        (TWO, ["ids"], Policy.SELECTED, {(WAW, "host_ids")}),
        (TWO, ["slot"], Policy.ALL, {(RAW, "slot"), (WAR, "slot")}),
        (TWO, ["slot"], Policy.SELECTED, {(RAW, "slot"), (WAR, "slot")}),
        (replace(TWO, widens=True), ["slot"], Policy.ALL, {(RAW, "slot"), (WAR, "slot")}),
        (ONE, ["logits"], Policy.ALL, {(RAW, "logits"), (WAR, "logits")}),
        (TWO, ["host_pos"], Policy.ALL, {(WAR, "host_inputs")}),
    ],
)
@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_a_blind_ledger_is_found_out(
    shape: Shape, names: list[str], policy: Policy, expected: set[tuple[HazardKind, str]], order: Order
) -> None:
    assert set(blind_hazards(names, order, policy, shape)) >= expected


@pytest.mark.parametrize(("names", "policy"), [(["kv", "pos", "wide"], Policy.ALL), (["route"], Policy.CPU)])
@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_some_resources_are_in_order_anyhow(names: list[str], policy: Policy, order: Order) -> None:
    """Cells, positions and dequantised slabs are used by one stream alone; routing travels with the hidden states."""
    assert blind_hazards(names, order, policy, Shape(2, embeds=True, widens=True)) == []


def ancestors(log: Sequence[Entry]) -> list[int]:
    """For each entry the set of entries that have happened before it, itself included, as bits."""
    sets: list[int] = []
    last: dict[str, int] = {}
    recorded: dict[int, int] = {}
    for i, entry in enumerate(log):
        before = 1 << i
        for stream in (entry.stream, HOST):
            before |= last.get(stream, 0)
        if entry.verb in (Verb.WAIT, Verb.WAIT_HOST):
            assert entry.event is not None
            before |= recorded[entry.event]
        if entry.verb is Verb.RECORD:
            assert entry.event is not None
            recorded[entry.event] = before
        last[entry.stream] = before
        sets.append(before)
    return sets


def conflicts(log: Sequence[Entry]) -> list[tuple[int, int]]:
    """Pairs of entries that use one buffer, one of them writing."""
    readers: dict[Buffer, list[int]] = {}
    writers: dict[Buffer, list[int]] = {}
    pairs = []
    for i, entry in enumerate(log):
        for buffer in {*entry.reads, *entry.writes}:
            earlier = writers.get(buffer, []) + (readers.get(buffer, []) if buffer in entry.writes else [])
            pairs += [(j, i) for j in earlier if j != i]
        for buffer in entry.reads:
            readers.setdefault(buffer, []).append(i)
        for buffer in entry.writes:
            writers.setdefault(buffer, []).append(i)
    return pairs


@pytest.mark.parametrize(
    ("order", "policy"),
    [
        (Order.DEPTH_FIRST, Policy.ALL),
        (Order.BREADTH_FIRST, Policy.ALL),
        (Order.BREADTH_FIRST, Policy.SELECTED),
        (Order.DEPTH_FIRST, Policy.CPU),
    ],
)
def test_each_missing_wait_is_found_unless_it_is_implied(order: Order, policy: Policy) -> None:
    with null_pipe(Shape(2, slab_experts=2)) as p:
        n_loading = len(p.log)
        run(p, order, policy, first_wave=2)
        log, kv = p.log, p.buffers("kv")
    pairs = conflicts(log)
    found_on = set()
    for i in range(n_loading, len(log)):
        if log[i].verb is not Verb.WAIT:
            continue
        # A record that nobody waits for takes the place of the wait, so that entries keep their numbers.
        mutant = [*log[:i], replace(log[i], verb=Verb.RECORD, event=-1), *log[i + 1 :]]
        before = ancestors(mutant)
        unordered = {(a, b) for a, b in pairs if not before[b] >> a & 1}
        found = hazard.check(mutant, preinitialised=kv)
        assert {(h.i_earlier, h.i_later) for h in found} <= unordered
        assert bool(found) == bool(unordered), f"without wait #{i}"
        found_on |= {h.buffer.name.rstrip("0123456789") for h in found}
    assert found_on >= {"x", "logits"} | {Policy.CPU: {"normed", "ids", "mix"}}.get(policy, {"slot"})
