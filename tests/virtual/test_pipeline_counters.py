"""What a run moves, allocates and waits for, counted: uploads, hand-offs, inputs; nothing allocated, nothing synced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from overspill.device.base import MemoryKind
from overspill.device.lane import Lane
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.pipe import EXACT_POLICIES, ORDERS_AND_POLICIES, Pipe, Shape, cut_wave, expert_bytes, pipe
from tests.helpers.reference import Reference
from tests.helpers.tiny_moe import N_EXPERT, N_LAYER, N_USED, N_VOCAB, tiny_model, tiny_source

SIZES = (3, 3, 2, 1)
N_TOKENS = sum(SIZES)
D_MODEL = tiny_model().hparams.n_embd


def ids(n: int) -> list[int]:
    return [(7 * i + 3) % N_VOCAB for i in range(n)]


def open_pipe(shape: Shape) -> AbstractContextManager[Pipe]:
    return pipe(tiny_source(), shape, n_ubatch=3, n_ubatches=len(SIZES), n_cells=N_TOKENS)


def layer_bytes(i_layer: int, shape: Shape, n_experts: int = N_EXPERT) -> int:
    """Host bytes of so many experts."""
    return n_experts * sum(expert_bytes(tiny_source(), i_layer, shape))


SHAPES = [
    Shape(1),
    Shape(2, slab_experts=1),
    Shape(3, slab_experts=3, n_staging=3),
    Shape(4, host_layers="odd"),
    Shape(2, grain=2, host_layers="even", slab_experts=3),
    Shape(2, n_layers_on_cpu=1),
    Shape(2, mixed_layers="odd"),
    Shape(3, host_layers="none"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", list(Order))
def test_all_uploads_each_device_its_host_layers_once_per_pass(order: Order, shape: Shape) -> None:
    """A pass is a wave, breadth-first, and a ubatch in the other orders."""
    n_passes = 1 if order is Order.BREADTH_FIRST else len(SIZES)
    with open_pipe(shape) as p:
        p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(order))
        own = [0] * shape.n_devices
        for i in filter(shape.is_host, range(N_LAYER)):
            own[shape.device_of(i)] += layer_bytes(i, shape)
        assert p.uploaded_bytes() == [n_passes * n_bytes for n_bytes in own]
        assert sum(own) == p.n_host_expert_bytes


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
@pytest.mark.parametrize("order", list(Order))
def test_selected_uploads_what_the_routers_name(order: Order, shape: Shape) -> None:
    wave = cut_wave(ids(N_TOKENS), SIZES)
    reference = Reference(tiny_model(), n_cells=N_TOKENS)
    reference.run(wave)
    everything = range(len(SIZES))
    groups = [everything] if order is Order.BREADTH_FIRST else [[m] for m in everything]
    expected = [0] * shape.n_devices
    for i in filter(shape.is_host, range(N_LAYER)):
        for group in groups:
            named = set().union(*(reference.chosen[m][i] for m in group))
            expected[shape.device_of(i)] += layer_bytes(i, shape, len(named))
    with open_pipe(shape) as p:
        p.runner.run(wave, p.schedule(order, Policy.SELECTED))
        assert p.uploaded_bytes() == expected
        assert order is Order.BREADTH_FIRST or sum(expected) < len(SIZES) * p.n_host_expert_bytes


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_the_cpu_policy_uploads_nothing(shape: Shape) -> None:
    with open_pipe(shape) as p:
        for order in Order:
            p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(order, Policy.CPU))
        assert p.uploaded_bytes() == [0] * shape.n_devices


def test_mixed_layers_go_up_whole_whatever_the_policy() -> None:
    shape = Shape(2, mixed_layers="all", slab_experts=3)
    with open_pipe(shape) as p:
        for policy in EXACT_POLICIES:
            p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(Order.BREADTH_FIRST, policy))
        assert sum(p.uploaded_bytes()) == len(EXACT_POLICIES) * p.n_host_expert_bytes


def lengths() -> Iterator[tuple[int, ...]]:
    """Prompts as ubatch sizes: the longest, short ones, and single tokens."""
    return iter([(3, 3, 3, 3), (1,), (3, 1), (3, 3, 1), (2,), (3, 3, 3, 2), (1,), (1, 1, 1, 1)])


@pytest.mark.parametrize("shape", [Shape(2, slab_experts=3), Shape(3, host_layers="odd", embeds=True)], ids=str)
def test_no_request_allocates_or_synchronises(shape: Shape) -> None:
    """With and without logits, whatever was run before; memory stays at what loading reserved."""
    with pipe(tiny_source(), shape, n_ubatch=3, n_ubatches=4, n_cells=12) as p:
        peaks = [device.peak_bytes for device in p.devices.all]
        for order, policy in ORDERS_AND_POLICIES:
            for sizes in lengths():
                wave = cut_wave(ids(sum(sizes)), sizes)
                p.runner.run(wave, p.schedule(order, policy))
                p.runner.run(Wave(tuple(Ubatch(u.ids, u.segments) for u in wave.ubatches)), p.schedule(order, policy))
        assert [device.counters.n_allocations for device in p.devices.all] == [0] * (shape.n_devices + 1)
        assert [device.counters.n_device_syncs for device in p.devices.all] == [0] * (shape.n_devices + 1)
        assert [device.peak_bytes for device in p.devices.all] == peaks


@pytest.mark.parametrize("shape", [Shape(2, slab_experts=3), Shape(3, host_layers="none", embeds=True)], ids=str)
def test_loading_leaves_no_memory_of_its_own(shape: Shape) -> None:
    """What is held is what runs use, and the weights."""
    with open_pipe(shape) as p:
        for device in p.devices.all:
            held = device.allocated_bytes
            used = sum(b.n_bytes for b in p.buffers() if b.device is device)
            assert sum(held.values()) - held[MemoryKind.WEIGHTS] == used


def test_a_wave_in_flight_makes_the_host_wait_for_its_logits_alone() -> None:
    with pipe(tiny_source(), Shape(2), n_ubatch=3, n_ubatches=4, n_cells=12, max_in_flight=1000) as p:
        p.runner.run(cut_wave(ids(12), (3, 3, 3, 3)), p.schedule(Order.BREADTH_FIRST))
        assert sum(device.counters.n_host_waits for device in p.devices.all) == 4


@pytest.mark.parametrize("shape", [Shape(1), Shape(3), Shape(4, n_layers_on_cpu=2), Shape(2, embeds=True)], ids=str)
@pytest.mark.parametrize("order", list(Order))
def test_inputs_go_once_to_each_device_and_wave(shape: Shape, order: Order) -> None:
    with open_pipe(shape) as p:
        for device in p.devices.all:
            device.start_trace()
        for _ in range(2):
            p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(order))
        in_use = {shape.device_of(i) for i in range(N_LAYER)} | ({shape.n_devices - 1} if shape.embeds else set())
        spans = [[s for s in device.take_trace() if s.label == "inputs"] for device in p.devices.all]
        assert [len(s) for s in spans] == [2 * (i in in_use) for i in range(shape.n_devices + 1)]
        n_bytes = 4 * 2 * 3 * len(SIZES)
        assert {(s.lane, s.n_bytes) for group in spans for s in group} == {(Lane.COMPUTE, n_bytes)}


@pytest.mark.parametrize(("order", "policy"), ORDERS_AND_POLICIES)
def test_hand_offs_carry_the_tokens_there_are(order: Order, policy: Policy) -> None:
    """Grain 1 over two devices. The CPU policy brings hidden states back from the host before each layer."""
    with open_pipe(Shape(2)) as p:
        p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(order, policy))
        inputs = 2 * (4 * 2 * 3 * len(SIZES))
        x_bytes = 4 * D_MODEL * N_TOKENS
        hops = N_LAYER + (1 if policy is Policy.CPU else 0)
        assert sum(d.counters.handed_off_bytes for d in p.devices.accelerators) == inputs + hops * x_bytes
        routing_bytes = N_TOKENS * (4 * D_MODEL + 8 * N_USED)
        logits_bytes = 4 * N_VOCAB * N_TOKENS
        extra = {
            Policy.ALL: 0,
            Policy.SELECTED: N_LAYER * 4 * N_USED * N_TOKENS,
            Policy.CPU: N_LAYER * (x_bytes + routing_bytes),
        }
        downloaded = sum(d.counters.downloaded_bytes for d in p.devices.accelerators)
        assert downloaded == logits_bytes + extra[policy]


def test_the_runner_counts_waves() -> None:
    with open_pipe(Shape(2)) as p:
        p.runner.run(cut_wave(ids(N_TOKENS), SIZES), p.schedule(Order.BREADTH_FIRST))
        p.runner.run(cut_wave(ids(2), (1, 1)), p.schedule(Order.SERIAL))
        counters = p.runner.counters
        assert (counters.n_waves, counters.n_ubatches, counters.n_tokens) == (2, len(SIZES) + 2, N_TOKENS + 2)
        assert counters.wall_us > 0
        p.runner.reset_counters()
        assert p.runner.counters.n_waves == 0
