"""The pipeline overlaps what it should, shown by latches instead of clocks.

Pieces of work on different streams wait for each other. Where the schedule lets them be in flight together they meet;
where it does not, they would wait for ever, and a time-out says so.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
import torch

from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.latches import Gate, Meeting, Piece
from tests.helpers.pipe import Pipe, Shape, cut_wave, pipe
from tests.helpers.reference import Reference
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source

NEVER_S = 0.3
FAILURE_S = 30.0
M = 8


def open_pipe(shape: Shape) -> AbstractContextManager[Pipe]:
    return pipe(tiny_source(), shape, n_ubatch=2, n_ubatches=M, n_cells=4 * M, max_in_flight=1000)


def prompt(n_ubatches: int, first_pos: int = 0) -> Wave:
    ids = [(7 * i + 3) % N_VOCAB for i in range(first_pos, first_pos + 2 * n_ubatches)]
    return cut_wave(ids, (2,) * n_ubatches, first_pos=first_pos)


def without_outputs(wave: Wave) -> Wave:
    return Wave(tuple(Ubatch(u.ids, u.segments) for u in wave.ubatches))


def only_last_output(wave: Wave) -> Wave:
    *others, last = wave.ubatches
    return Wave((*without_outputs(Wave(tuple(others))).ubatches, replace(last, output_rows=(last.n_tokens - 1,))))


def meet(p: Pipe, pieces: list[Piece], order: Order, policy: Policy = Policy.ALL) -> bool:
    """Whether the pieces of a prompt can be in flight together; its logits must be right either way."""
    timeout_s = NEVER_S if order is Order.SERIAL else FAILURE_S
    meeting = Meeting(p.devices, pieces, timeout_s=timeout_s)
    wave = only_last_output(prompt(M))
    logits = p.runner.run(wave, p.schedule(order, policy))
    expected = Reference(tiny_model(), n_cells=4 * M).run(wave)
    assert all(torch.equal(a, b) for a, b in zip(logits, expected, strict=True))
    return meeting.took_place


NEIGHBOURS = [Piece(1, "attend L1 m0"), Piece(0, "experts L0 s0 m1")]


def test_a_device_starts_a_ubatch_while_the_one_before_computes_the_next() -> None:
    with open_pipe(Shape(2)) as p:
        assert meet(p, NEIGHBOURS, Order.BREADTH_FIRST)


def test_depth_first_overlaps_stages() -> None:
    with open_pipe(Shape(2, grain=2)) as p:
        assert meet(p, [Piece(1, "experts L3 s0 m0"), Piece(0, "attend L1 m1")], Order.DEPTH_FIRST)


@pytest.mark.parametrize(
    "pieces",
    [
        NEIGHBOURS,
        [Piece(0, "experts L0 s0 m0"), Piece(0, "upload L2 s0")],
        [Piece(0, "upload L0 s0"), Piece(1, "upload L1 s0")],
    ],
)
def test_serial_overlaps_nothing(pieces: list[Piece]) -> None:
    with open_pipe(Shape(2)) as p:
        assert not meet(p, pieces, Order.SERIAL)


@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_the_next_slab_goes_up_while_this_one_is_used(order: Order) -> None:
    """Within a layer (two slabs) and from layer to layer (one slab)."""
    with open_pipe(Shape(1, slab_experts=2)) as p:
        assert meet(p, [Piece(0, "experts L0 s0 m0"), Piece(0, "upload L0 s1")], order)
    with open_pipe(Shape(1)) as p:
        assert meet(p, [Piece(0, "experts L1 s0 m0"), Piece(0, "upload L2 s0")], order)


def test_uploads_of_all_devices_go_on_together() -> None:
    with open_pipe(Shape(4)) as p:
        assert meet(p, [Piece(i, f"upload L{i} s0") for i in range(4)], Order.BREADTH_FIRST)


@pytest.mark.parametrize("part", ["attend L{0} m{1}", "experts L{0} s0 m{1}"])
def test_four_devices_compute_four_ubatches_at_once(part: str) -> None:
    """Host experts on every device: each is one ubatch behind the device before it, and none waits for a whole wave."""
    with open_pipe(Shape(4)) as p:
        pieces = [Piece(i, part.format(i, 4 - i)) for i in range(4)]
        assert meet(p, pieces, Order.BREADTH_FIRST)


@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_four_devices_with_resident_experts_compute_at_once(order: Order) -> None:
    with open_pipe(Shape(4, host_layers="none")) as p:
        assert meet(p, [Piece(i, f"layers L{i} m{4 - i}") for i in range(4)], order)


def test_the_cpu_computes_experts_while_the_devices_attend() -> None:
    with open_pipe(Shape(2)) as p:
        pieces = [Piece(2, "experts L0 m1"), Piece(1, "attend L1 m0"), Piece(0, "attend L0 m2")]
        assert meet(p, pieces, Order.BREADTH_FIRST, Policy.CPU)


def test_embedding_runs_ahead_of_the_first_layer() -> None:
    with open_pipe(Shape(2)) as p:
        assert meet(p, [Piece(2, "embed m1"), Piece(0, "attend L0 m0")], Order.BREADTH_FIRST)


def test_a_wave_without_outputs_is_issued_while_the_one_before_computes() -> None:
    first, second = without_outputs(prompt(4)), prompt(4, first_pos=8)
    with open_pipe(Shape(2)) as p:
        gate = Gate(p.devices, Piece(1, "experts L3 s0 m3"))
        schedule = p.schedule(Order.BREADTH_FIRST)
        assert p.runner.run(first, schedule)[0].shape == (0, N_VOCAB)
        n_issued = p.runner._n_issued
        assert p.runner.run(without_outputs(second), schedule)[0].shape == (0, N_VOCAB)
        assert p.runner._n_issued == 2 * n_issued
        gate.open()
        reference = Reference(tiny_model(), n_cells=4 * M)
        reference.run(first)
        logits = p.runner.run(second, schedule)
        assert all(torch.equal(a, b) for a, b in zip(logits, reference.run(second), strict=True))
