"""Waves that follow each other: several sequences, decoding, every prompt length, many logits, long runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from unittest.mock import patch

import pytest
import torch

from overspill.pipeline import memory, runner
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Segment, Ubatch, Wave
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
from tests.helpers.reference import Reference, reference_logits
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source

CLOSE = 2e-5


def ids(n: int, step: int = 7) -> list[int]:
    return [(step * i + 3) % N_VOCAB for i in range(n)]


def piece(tokens: Sequence[int], slot: int, first: int, n: int) -> Ubatch:
    """A ubatch of one sequence, all rows wanted."""
    return Ubatch(tuple(tokens[first : first + n]), (Segment(slot, first, n),), tuple(range(n)))


def together(*ubatches: Ubatch) -> Ubatch:
    """One ubatch of several sequences."""
    all_ids = tuple(i for u in ubatches for i in u.ids)
    return Ubatch(all_ids, tuple(s for u in ubatches for s in u.segments), tuple(range(len(all_ids))))


def assert_same(logits: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert [len(rows) for rows in logits] == [len(rows) for rows in expected]
    for a, b in zip(logits, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("order", "policy"), ORDERS_AND_POLICIES)
def test_two_sequences_interleaved_then_decoded_together(order: Order, policy: Policy) -> None:
    """Each gets the logits it would get alone: bit for bit where it has a ubatch to itself."""
    a, b = ids(12), ids(12, step=11)
    waves = [
        Wave((piece(a, 2, 0, 3), piece(b, 0, 0, 2), piece(a, 2, 3, 3), piece(b, 0, 2, 3))),
        Wave((together(piece(a, 2, 6, 2), piece(b, 0, 5, 2)),)),
        *(Wave((together(piece(b, 0, i - 1, 1), piece(a, 2, i, 1)),)) for i in range(8, 12)),
    ]
    with_both = Reference(tiny_model(), n_slots=3, n_cells=12)
    expected = [with_both.run(wave) for wave in waves]
    alone_a = reference_logits(tiny_model(), [cut_wave(a, (3, 3, 2, 1, 1, 1, 1))], n_cells=12)
    alone_b = reference_logits(tiny_model(), [cut_wave(b, (2, 3, 2, 1, 1, 1, 1))], n_cells=12)
    with pipe(tiny_source(), Shape(3, slab_experts=3), n_ubatch=4, n_ubatches=4, n_cells=12, n_slots=3) as p:
        for seed in range(4):
            p.poison()
            with rare_delays(seed):
                results = [p.runner.run(wave, p.schedule(order, policy)) for wave in waves]
            for logits, rows in zip(results, expected, strict=True):
                assert_same(logits, rows)
    first, second, *steps = results
    assert torch.equal(torch.cat([first[0], first[2]]), alone_a[:6])
    assert torch.equal(torch.cat([first[1], first[3]]), alone_b[:5])
    rows_a = torch.cat([second[0][:2], *(step[0][1:] for step in steps)])
    rows_b = torch.cat([second[0][2:], *(step[0][:1] for step in steps)])
    torch.testing.assert_close(rows_a, alone_a[6:], rtol=0, atol=CLOSE)
    torch.testing.assert_close(rows_b, alone_b[5:11], rtol=0, atol=CLOSE)


def test_a_slot_is_used_again_by_a_longer_and_a_shorter_sequence() -> None:
    with pipe(tiny_source(), Shape(2), n_ubatch=4, n_ubatches=3, n_cells=12, n_slots=2) as p:
        for n, step in ((7, 7), (12, 11), (3, 13)):
            tokens = ids(n, step)
            sizes = [min(4, n - i) for i in range(0, n, 4)]
            expected = reference_logits(tiny_model(), [cut_wave(tokens, sizes)], n_cells=n)
            assert torch.equal(run_all(p, tokens, sizes, p.schedule(Order.BREADTH_FIRST), 1), expected)


EVERY_LENGTH = tuple(n for i in range(35) for n in (70 - i, 1 + i))
AROUND_UBATCHES = (65, 1, 33, 15, 64, 17, 49, 31, 32, 16, 48)


@pytest.mark.parametrize(
    ("order", "policy", "lengths"),
    [
        (Order.BREADTH_FIRST, Policy.ALL, EVERY_LENGTH),
        (Order.DEPTH_FIRST, Policy.SELECTED, AROUND_UBATCHES),
        (Order.BREADTH_FIRST, Policy.CPU, AROUND_UBATCHES),
    ],
)
def test_prompts_of_every_length(order: Order, policy: Policy, lengths: Sequence[int]) -> None:
    """In ubatches of 16, long and short ones in turn; the last ubatch of 17, 33, .. is one token."""
    tokens = ids(70)
    one_by_one = reference_logits(tiny_model(), [cut_wave(tokens, (1,) * 70)], n_cells=70)
    with pipe(tiny_source(), Shape(3, slab_experts=3), n_ubatch=16, n_ubatches=5, n_cells=70) as p:
        for n in lengths:
            sizes = [min(16, n - i) for i in range(0, n, 16)]
            p.poison()
            with rare_delays(n):
                logits = run_all(p, tokens[:n], sizes, p.schedule(order, policy), 1)
            expected = reference_logits(tiny_model(), [cut_wave(tokens[:n], sizes)], n_cells=n)
            assert torch.equal(logits, expected), f"{n} tokens"
            torch.testing.assert_close(logits, one_by_one[:n], rtol=0, atol=CLOSE)


def wanting(wave: Wave, rows: Sequence[Sequence[int]]) -> Wave:
    """The same ubatches with other rows wanted."""
    return Wave(tuple(Ubatch(u.ids, u.segments, tuple(r)) for u, r in zip(wave.ubatches, rows, strict=True)))


@pytest.mark.parametrize("n_devices", [2, 3])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 4])
@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_logits_of_consecutive_ubatches_in_chunks(n_devices: int, max_in_flight: int, order: Order) -> None:
    """More rows than a logits buffer holds, of every ubatch and of some rows of some; then greedy tokens."""
    tokens, sizes = ids(28), (7, 7, 7, 7)
    wave = cut_wave(tokens, sizes)
    everything = [range(7)] * 4
    some = [(), (0, 3, 4, 5, 6), (), (2, 6)]
    with (
        patch.object(memory, "N_LOGIT_ROWS", 3),
        pipe(
            tiny_source(),
            Shape(n_devices),
            n_ubatch=7,
            n_ubatches=4,
            n_cells=40,
            max_in_flight=max_in_flight,
        ) as p,
        rare_delays(n_devices),
    ):
        for rows in (everything, some, everything):
            p.poison()
            reference = Reference(tiny_model(), n_cells=40, n_rows=3)
            wanted = wanting(wave, rows)
            logits = p.runner.run(wanted, p.schedule(order))
            assert_same(logits, reference.run(wanted))
        assert greedy(p, logits[-1][-1], order) == greedy_reference(reference, logits[-1][-1])


N_GREEDY = 12


def steps(first: torch.Tensor) -> Iterator[tuple[Wave, list[int]]]:
    """Waves of one token each; the caller appends the next token to the list it is handed."""
    tokens = [int(first.argmax())]
    for i in range(N_GREEDY):
        yield cut_wave(tokens[-1:], (1,), first_pos=28 + i), tokens


def greedy(p: Pipe, first: torch.Tensor, order: Order) -> list[int]:
    tokens: list[int] = []
    for (wave, tokens), policy in zip(steps(first), cycle(EXACT_POLICIES), strict=False):
        tokens.append(int(p.runner.run(wave, p.schedule(order, policy))[0].argmax()))
    return tokens


def greedy_reference(reference: Reference, first: torch.Tensor) -> list[int]:
    tokens: list[int] = []
    for wave, tokens in steps(first):
        tokens.append(int(reference.run(wave)[0].argmax()))
    return tokens


@pytest.mark.parametrize("seed", range(4))
def test_the_schedule_may_change_from_wave_to_wave(seed: int) -> None:
    """A prompt in six waves, each under another order and policy, the staging slots used as they were left."""
    tokens, sizes = ids(24), (3, 1) * 6
    waves = cut_waves(tokens, sizes, 6)
    reference = Reference(tiny_model(), n_cells=24)
    plans = ORDERS_AND_POLICIES[seed:] + ORDERS_AND_POLICIES[:seed]
    with pipe(tiny_source(), Shape(2, slab_experts=1, n_staging=3), n_ubatch=3, n_ubatches=2, n_cells=24) as p:
        p.poison()
        with rare_delays(seed):
            for wave, (order, policy) in zip(waves, plans, strict=False):
                assert_same(p.runner.run(wave, p.schedule(order, policy)), reference.run(wave))


def test_a_smaller_wave_leaves_what_it_does_not_use_alone() -> None:
    """Rows and ubatches beyond the wave are not touched: NaN there reaches nobody."""
    with pipe(tiny_source(), Shape(2), n_ubatch=4, n_ubatches=4, n_cells=16) as p:
        p.poison()
        assert torch.equal(
            run_all(p, ids(3), (2, 1), p.schedule(Order.BREADTH_FIRST), 1),
            reference_logits(tiny_model(), [cut_wave(ids(3), (2, 1))], n_cells=3),
        )
        untouched = [b.raw() for m in (2, 3) for i in range(3) for b in p.memory["x", i, m]]
        assert all(tensor.isnan().all() for tensor in untouched)


@pytest.mark.parametrize(("order", "policy"), ORDERS_AND_POLICIES)
def test_events_of_a_long_run_are_forgotten_in_time(order: Order, policy: Policy) -> None:
    tokens = ids(30)
    reference = Reference(tiny_model(), n_cells=30)
    with (
        patch.object(runner, "_EVENTS_KEPT", 8),
        pipe(tiny_source(), Shape(3, slab_experts=3), n_ubatch=3, n_ubatches=2, n_cells=30) as p,
        rare_delays(1),
    ):
        most = 0
        for first in range(0, 30, 5):
            wave = cut_wave(tokens[first : first + 5], (3, 2), first_pos=first)
            assert_same(p.runner.run(wave, p.schedule(order, policy)), reference.run(wave))
            most = max(most, len(p.runner._events))
        assert p.runner._n_issued > 250
        assert most <= 2 * 8 + len(p.runner._ledger.live())
