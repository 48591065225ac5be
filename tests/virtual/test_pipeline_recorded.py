"""Prompts by replay: the bits of issued ones, whatever the tokens, the slot and the length; and what is kept of them.

A recording of a virtual device runs the same closures again, as they were bound when they were made: what they have
bound of the wave that was recorded, its tokens say, gives the next one wrong logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from overspill.device.base import CannotRecord, Recording, Stream
from overspill.device.virtual import VirtualDevice, VirtualStream
from overspill.pipeline import recorded
from overspill.pipeline.runner import Runner
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.helpers.pipe import OPS, ORDERS_AND_POLICIES, Pipe, Shape, cut_wave, pipe, rare_delays
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_moe import N_LAYER, N_VOCAB, tiny_model, tiny_source

SIZES = (4, 4, 3)
N_TOKENS = sum(SIZES)


def prompt(which: int, n: int = N_TOKENS) -> list[int]:
    return [((7 + 4 * which) * i + 3 + which) % N_VOCAB for i in range(n)]


def expected(which: int, sizes: Sequence[int] = SIZES) -> torch.Tensor:
    return reference_logits(tiny_model(), [cut_wave(prompt(which), sizes)], n_cells=N_TOKENS)


@contextmanager
def watched() -> Iterator[dict[str, list[str]]]:
    """Labels of what is launched, recorded and replayed meanwhile on accelerators."""
    found: dict[str, list[str]] = {"launch": [], "replay": [], "record": []}

    def noting(name: str, real: Callable[..., None]) -> Callable[..., None]:
        def call(self: Stream, work: object, *, label: str, **how: object) -> None:
            if not self.device.is_host:
                found[name].append(label)
            real(self, work, label=label, **how)

        return call

    record = VirtualDevice.record

    def recording(self: VirtualDevice, works: object, **how: object) -> Recording:
        found["record"].append(self.name)
        return record(self, works, **how)  # type: ignore[arg-type]

    replay = VirtualStream.replay
    with (
        patch.object(VirtualStream, "replay", noting("replay", replay)),
        patch.object(VirtualStream, "launch", noting("launch", VirtualStream.launch)),
        patch.object(VirtualDevice, "record", recording),
    ):
        yield found


SHAPES = [
    Shape(1, slab_experts=3),
    Shape(2),
    Shape(2, widens=True, slab_experts=3),
    Shape(1, widens=True, slab_experts=3, n_staging=3),
    Shape(3, host_layers="odd", embeds=True),
    Shape(2, host_layers="none", grain=2),
    Shape(2, mixed_layers="odd", n_layers_on_cpu=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("order", "policy"), ORDERS_AND_POLICIES)
def test_replayed_prompts_give_the_same_bits(order: Order, policy: Policy, shape: Shape) -> None:
    """Two prompts in turn, on poisoned memory: issued, recorded, and replayed."""
    wanted = [expected(which) for which in (0, 1)]
    with pipe(tiny_source(), shape, n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS) as p, watched() as found:
        for i in range(5):
            for labels in found.values():
                labels.clear()
            p.poison()
            with rare_delays(i):
                logits = p.runner.run(cut_wave(prompt(i % 2), SIZES), p.schedule(order, policy))
            assert torch.equal(torch.cat(logits), wanted[i % 2]), i
            assert bool(found["record"]) == (i == 1), i
            # Slabs may come several times in a wave.
            assert any(not label.startswith("widen") for label in found["replay"]) == (i > 1), i
    left = {label.split()[0] for label in set(found["launch"]) - set(found["replay"])}
    assert left <= {"embed", "output"} | ({"experts", "widen"} if policy is Policy.SELECTED else set())


def test_other_prompts_share_what_is_equal() -> None:
    """A longer prompt finds the ubatches of a shorter one, not its last; another slot finds none."""
    schedule_of = (Order.BREADTH_FIRST, Policy.ALL)
    with pipe(tiny_source(), Shape(2), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS, n_slots=2) as p:
        for _ in range(2):
            p.runner.run(cut_wave(prompt(0, 6), (4, 2)), p.schedule(*schedule_of))
        p.poison()
        with watched() as found:
            logits = p.runner.run(cut_wave(prompt(1), SIZES), p.schedule(*schedule_of))
        assert torch.equal(torch.cat(logits), expected(1))
        assert {label.split()[-1] for label in found["replay"]} == {"m0"}
        p.poison()
        with watched() as found:
            logits = p.runner.run(cut_wave(prompt(1), SIZES, slot=1), p.schedule(*schedule_of))
        assert torch.equal(torch.cat(logits), expected(1))
        assert not found["replay"]


def test_slots_in_turn_and_together() -> None:
    """Ubatches of two sequences, interleaved, the same again with their tokens exchanged."""

    def wave(a: int, b: int) -> Wave:
        pieces = [(a, 0, 0, 4), (b, 1, 0, 4), (a, 0, 4, 3), (b, 1, 4, 3)]
        first = [
            Ubatch(tuple(prompt(which)[at : at + n]), (Segment(slot, at, n),), tuple(range(n)))
            for which, slot, at, n in pieces
        ]
        both = (*prompt(a)[7:9], *prompt(b)[7:9])
        return Wave((*first, Ubatch(both, (Segment(0, 7, 2), Segment(1, 7, 2)), (0, 1, 2, 3))))

    wanted = [reference_logits(tiny_model(), [wave(*order)], n_slots=2, n_cells=N_TOKENS) for order in ((0, 1), (1, 0))]
    with pipe(tiny_source(), Shape(3, slab_experts=3), n_ubatch=4, n_ubatches=5, n_cells=N_TOKENS, n_slots=2) as p:
        for i in range(5):
            p.poison()
            with rare_delays(i):
                logits = p.runner.run(wave(i % 2, 1 - i % 2), p.schedule(Order.BREADTH_FIRST))
            assert torch.equal(torch.cat(logits), wanted[i % 2]), i


@pytest.mark.parametrize("n_seen", [1, 2, 3])
def test_an_interrupted_wave_leaves_good_recordings(n_seen: int) -> None:
    calls = iter(range(7))

    def give_up() -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    def interrupt(*args: object) -> None:
        give_up()
        real(*args)

    real = Runner._remember
    with pipe(tiny_source(), Shape(2, slab_experts=3), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS) as p:
        schedule = p.schedule(Order.BREADTH_FIRST)
        for _ in range(n_seen - 1):
            p.runner.run(cut_wave(prompt(0), SIZES), schedule)
        with pytest.raises(KeyboardInterrupt):
            p.runner.run(cut_wave(prompt(1), SIZES), schedule, give_up)
        calls = iter(range(20))
        with patch.object(Runner, "_remember", interrupt), pytest.raises(KeyboardInterrupt):
            p.runner.run(cut_wave(prompt(1), SIZES), schedule)
        for i in range(3):
            p.poison()
            assert torch.equal(torch.cat(p.runner.run(cut_wave(prompt(i % 2), SIZES), schedule)), expected(i % 2))


def run(p: Pipe, i: int) -> None:
    logits = p.runner.run(cut_wave(prompt(i % 2), SIZES), p.schedule(Order.BREADTH_FIRST))
    assert torch.equal(torch.cat(logits), expected(i % 2)), i


def test_recordings_are_forgotten_when_scratch_memory_has_grown() -> None:
    scratch = [torch.zeros(4)]
    ops = replace(OPS, scratch=lambda: list(scratch))
    with pipe(tiny_source(), Shape(1), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS, ops=ops) as p, watched() as found:
        for i in range(3):
            run(p, i)
        n_recordings, n_replays = len(found["record"]), len(found["replay"])
        assert n_replays == n_recordings == 2 * 3 * N_LAYER
        scratch[:] = [torch.zeros(8)]
        for i in range(2):
            run(p, i)
        assert len(found["record"]) == 2 * n_recordings
        assert len(found["replay"]) == 2 * n_replays


def test_a_wave_that_has_too_many_is_issued_in_part() -> None:
    """And nothing is recorded over and over."""
    with (
        patch.object(recorded, "MAX_RECORDED_LAYERS", 9),
        pipe(tiny_source(), Shape(1), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS) as p,
        watched() as found,
    ):
        for i in range(5):
            run(p, i)
        assert len(found["record"]) == 9
        assert len(found["replay"]) == 3 * 9


def test_the_oldest_ubatches_are_forgotten() -> None:
    """Two slots in turn, where there is room for one."""
    with (
        patch.object(recorded, "MAX_RECORDED_LAYERS", 2 * 3 * N_LAYER),
        pipe(tiny_source(), Shape(1), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS, n_slots=2) as p,
        watched() as found,
    ):
        for i, slot in enumerate((0, 0, 0, 1, 1, 1, 0, 0)):
            found["record"].clear()
            found["replay"].clear()
            wave = cut_wave(prompt(i % 2), SIZES, slot=slot)
            logits = p.runner.run(wave, p.schedule(Order.BREADTH_FIRST))
            assert torch.equal(torch.cat(logits), expected(i % 2)), i
            assert bool(found["record"]) == (i in (1, 4, 6)), i
            assert bool(found["replay"]) == (i in (2, 5, 7)), i


def test_work_that_cannot_be_recorded_is_issued_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with (
        patch.object(VirtualDevice, "record", side_effect=CannotRecord("it waits")) as tried,
        pipe(tiny_source(), Shape(2), n_ubatch=4, n_ubatches=3, n_cells=N_TOKENS) as p,
        caplog.at_level(logging.WARNING),
    ):
        for i in range(4):
            run(p, i)
    assert tried.call_count == 2
    assert [r.getMessage() for r in caplog.records if "it waits" in r.getMessage()] == [
        f"virtual:{i}: prompts are issued kernel by kernel, which costs time: it waits" for i in range(2)
    ]
