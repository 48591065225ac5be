"""Hand-offs through the host as values: which actions, in which order, and how long the simulator thinks they take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.device.lane import Lane
from overspill.pipeline.ledger import StreamId
from overspill.pipeline.schedule import Action, Order, Verb, WaveSchedule, actions
from overspill.pipeline.simulate import WaveShape, costs, grid, simulate
from overspill.pipeline.split import Detour, Layout, detours
from overspill.placement.machine import DeviceSpec, Machine
from tests.pure.placement_models import make_shape

DEPTH_FIRST = WaveSchedule(Order.DEPTH_FIRST)
RESIDENT = Layout(2, (0, 1, 1, 0), 0, ((), (), (), ()), detour=Detour(frozenset({(0, 1)}), 1024))


def hand_offs(layout: Layout, n_tiles: list[int]) -> list[Action]:
    verbs = (Verb.HAND_OFF, Verb.HAND_DOWN, Verb.HAND_UP)
    return [a for a in actions(layout, DEPTH_FIRST, [1] * len(n_tiles), n_tiles) if a.verb in verbs]


def test_one_direction_through_the_host_the_other_direct() -> None:
    assert detours(RESIDENT) == [(0, 1)]
    found = hand_offs(RESIDENT, [2, 1])
    from_host, *rest = [(a.verb, a.stream, a.reads, a.writes, a.ubatch, a.chunk) for a in found if a.ubatch == 0]
    assert from_host[0] is Verb.HAND_OFF
    down, up = StreamId(0, Lane.HAND_OFF), StreamId(1, Lane.HAND_OFF)
    x, y, tiles = ("x", 0, 0), ("x", 1, 0), [("tile", 0, 1, 0), ("tile", 0, 1, 1)]
    assert rest == [
        (Verb.HAND_DOWN, down, (x,), (tiles[0],), 0, 0),
        (Verb.HAND_UP, up, (tiles[0],), (y,), 0, 0),
        (Verb.HAND_DOWN, down, (x,), (tiles[1],), 0, 1),
        (Verb.HAND_UP, up, (tiles[1],), (y,), 0, 1),
        (Verb.HAND_OFF, down, (y,), (x,), 0, -1),
    ]
    # The third tile of the pair takes the place of the first, also when it belongs to the next ubatch.
    assert [a.writes[0] for a in found if a.ubatch == 1 and a.verb is Verb.HAND_DOWN] == [tiles[0]]


def test_tiles_overlap_but_a_tile_in_use_is_waited_for() -> None:
    """Down and up take one unit each: a tile goes down while the one before goes up, and none faster than that."""
    timed = simulate(actions(RESIDENT, DEPTH_FIRST, [0], [4]), lambda action: 1.0)
    start = {(t.action.verb, t.action.chunk): t.start_us for t in timed}
    first = start[Verb.HAND_DOWN, 0]
    assert [start[Verb.HAND_DOWN, i] - first for i in range(4)] == [0, 1, 2, 3]
    assert [start[Verb.HAND_UP, i] - first for i in range(4)] == [1, 2, 3, 4]
    slow_up = simulate(actions(RESIDENT, DEPTH_FIRST, [0], [4]), lambda a: 5.0 if a.verb is Verb.HAND_UP else 1.0)
    start = {(t.action.verb, t.action.chunk): t.start_us for t in slow_up}
    assert [start[Verb.HAND_DOWN, i] - first for i in range(4)] == [0, 1, 6, 11]


def test_tiles_cost_what_their_bytes_take_on_the_links() -> None:
    device = DeviceSpec("a", 1 << 30, 1 << 30, 10.0, 1.0)
    machine = Machine(1 << 30, (device, replace(device, name="b", h2d_gbps=2.0)), 1000.0, 500.0, 10.0)
    shape = make_shape(n_layer=4)
    row_bytes = 4 * shape.n_embd
    layout = replace(RESIDENT, detour=Detour(frozenset({(0, 1)}), 4 * row_bytes))
    wave = WaveShape((6,))
    cost_us = costs(shape, machine, layout, wave, DEPTH_FIRST)
    found = [a for a in hand_offs(layout, [layout.detour.n_tiles(6 * row_bytes)]) if a.verb is not Verb.HAND_OFF]
    latency_us = 20.0
    assert [(a.verb, round(cost_us(a) - latency_us, 6)) for a in found] == [
        (Verb.HAND_DOWN, pytest.approx(4 * row_bytes / 10e3)),
        (Verb.HAND_UP, pytest.approx(4 * row_bytes / 2e3)),
        (Verb.HAND_DOWN, pytest.approx(2 * row_bytes / 10e3)),
        (Verb.HAND_UP, pytest.approx(2 * row_bytes / 2e3)),
    ]


def test_the_grid_shows_them() -> None:
    text = grid(RESIDENT, DEPTH_FIRST, 1)
    assert "hd.0" in text
    assert "hu.0" in text
