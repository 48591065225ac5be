"""Hand-offs of pairs that no direct copy connects: through tiles of pinned memory, the same logits bit for bit."""

from __future__ import annotations

from contextlib import AbstractContextManager
from itertools import permutations

import pytest
import torch

from overspill.device import hazard
from overspill.device.handoff import failing_pairs
from overspill.device.hazard import HazardKind
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.split import Detour, detours
from tests.helpers.blind import blind_to
from tests.helpers.broken import Fault, broken_devices
from tests.helpers.pipe import (
    EXACT_POLICIES,
    ORDERS_AND_POLICIES,
    Pipe,
    Shape,
    cut_wave,
    cut_waves,
    pipe,
    rare_delays,
    run_all,
)
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source

SIZES = (3, 3, 2, 3, 1)
N_TOKENS = sum(SIZES)
IDS = [(7 * i + 3) % N_VOCAB for i in range(N_TOKENS)]
ROW_BYTES = 4 * tiny_model().hparams.n_embd
# Tiles that hold less than a row, cut rows apart, hold some rows, hold all.
TILES = (ROW_BYTES // 2 + 4, ROW_BYTES, 2 * ROW_BYTES + 20, 1 << 24)


def every_pair(n: int) -> frozenset[tuple[int, int]]:
    return frozenset(permutations(range(n), 2))


def expected() -> torch.Tensor:
    return reference_logits(tiny_model(), cut_waves(IDS, SIZES, 1), n_cells=N_TOKENS)


def open_pipe(shape: Shape, **options: object) -> AbstractContextManager[Pipe]:
    return pipe(tiny_source(), shape, n_ubatch=3, n_ubatches=len(SIZES), n_cells=N_TOKENS, **options)  # type: ignore[arg-type]


def logits(p: Pipe, order: Order, policy: Policy, seed: int = 0, n_waves: int = 1) -> torch.Tensor:
    p.poison()
    with rare_delays(seed):
        return run_all(p, IDS, SIZES, p.schedule(order, policy), n_waves)


SHAPES = [Shape(2), Shape(3, host_layers="odd"), Shape(4, embeds=True), Shape(3, grain=2, n_layers_on_cpu=1)]


@pytest.mark.parametrize(
    ("shape", "tile_bytes"), list(zip(SHAPES * 2, TILES + TILES[1:] + TILES[:1], strict=True)), ids=str
)
def test_logits_are_those_of_the_plain_model(shape: Shape, tile_bytes: int) -> None:
    wanted = expected()
    with open_pipe(shape, detour=Detour(every_pair(shape.n_devices), tile_bytes)) as p:
        for seed, (order, policy) in enumerate(ORDERS_AND_POLICIES):
            n_waves = 1 + seed % 2
            assert torch.equal(logits(p, order, policy, seed, n_waves), wanted), (order, policy, n_waves)


@pytest.mark.parametrize(
    ("pair", "fault"), [((0, 1), Fault.DROPPED), ((1, 2), Fault.ZEROS), ((2, 0), Fault.LATE), ((0, 1), Fault.LATE)]
)
def test_a_pair_that_fails_the_test_goes_through_the_host(pair: tuple[int, int], fault: Fault) -> None:
    """And it has to: what the broken pair would have delivered directly is nonsense."""
    wanted, shape = expected(), Shape(3, embeds=True)
    devices = broken_devices(3, fault, pair)
    with open_pipe(shape, devices=devices, detour=Detour(failing_pairs(devices), TILES[2])) as p:
        for order, policy in zip(Order, EXACT_POLICIES, strict=True):
            assert torch.equal(logits(p, order, policy), wanted), (order, policy)
    with open_pipe(shape, devices=broken_devices(3, fault, pair)) as p:
        assert not torch.equal(logits(p, Order.BREADTH_FIRST, Policy.ALL), wanted)


def test_only_the_pairs_asked_for_make_a_detour() -> None:
    with open_pipe(Shape(3), detour=Detour(frozenset({(1, 2), (0, 2)}), ROW_BYTES)) as p:
        assert detours(p.layout) == [(1, 2)]  # cyclic layers: nothing goes from 0 to 2
        assert [b.n_bytes for b in p.buffers("tile")] == [ROW_BYTES] * 2
        p.runner.run(cut_wave(IDS, SIZES), p.schedule(Order.BREADTH_FIRST))
        down = [d.counters.downloaded_bytes for d in p.devices.accelerators]
    n_hops = sum(
        1 for i, device in enumerate(p.layout.layer_device[1:]) if (p.layout.layer_device[i], device) == (1, 2)
    )
    assert n_hops > 0
    logits_bytes = 4 * N_VOCAB * N_TOKENS
    own = [0, n_hops * ROW_BYTES * N_TOKENS, 0]
    own[p.layout.output_device] += logits_bytes
    assert down == own


def test_a_tile_is_not_larger_than_hidden_states_are() -> None:
    with open_pipe(Shape(2), detour=Detour(every_pair(2))) as p:
        assert {b.n_bytes for b in p.buffers("tile")} == {3 * ROW_BYTES}


@pytest.mark.parametrize("tile_bytes", TILES[:3])
@pytest.mark.parametrize("n_devices", [2, 3])
def test_no_hazard(n_devices: int, tile_bytes: int) -> None:
    detour = Detour(every_pair(n_devices), tile_bytes)
    with open_pipe(Shape(n_devices, embeds=True), kind="null", detour=detour, max_in_flight=1 << 30) as p:
        for order, policy in ORDERS_AND_POLICIES:
            for buffer in p.buffers("ids"):
                buffer.raw().zero_()
            p.runner.run(cut_wave(IDS, SIZES), p.schedule(order, policy))
        assert sum("hand_down" in entry.label for entry in p.log) > len(ORDERS_AND_POLICIES)
        assert hazard.check(p.log, preinitialised=p.buffers("kv")) == []


@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_a_ledger_that_overlooks_tiles_is_found_out(order: Order) -> None:
    detour = Detour(every_pair(2), TILES[1])
    with blind_to(["tile"]), open_pipe(Shape(2), kind="null", detour=detour, max_in_flight=1 << 30) as p:
        p.runner.run(cut_wave(IDS, SIZES), p.schedule(order))
        found = hazard.check(p.log, preinitialised=p.buffers("kv"))
    kinds = {h.kind for h in found if h.buffer.name.startswith("tile")}
    assert kinds == {HazardKind.READ_AFTER_WRITE, HazardKind.WRITE_AFTER_READ}


@pytest.mark.parametrize(("order", "policy"), list(zip(Order, EXACT_POLICIES, strict=True)))
def test_the_host_waits_between_devices_when_asked(order: Order, policy: Policy) -> None:
    def n_waits(waits_on_host: bool) -> int:
        with open_pipe(Shape(3), waits_on_host=waits_on_host) as p:
            assert torch.equal(logits(p, order, policy), wanted)
            return sum(device.counters.n_host_waits for device in p.devices.all)

    wanted = expected()
    assert n_waits(True) >= n_waits(False) + len(SIZES)
