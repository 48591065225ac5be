"""What goes wrong comes out: errors of any stream reach the host, and mistakes of the pipeline are found by running it.

The last part shows that the equality test can fail: a ledger with a blind spot gives wrong logits or an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import cast
from unittest.mock import patch

import pytest
import torch

from overspill.device.base import UndeclaredAccess
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualBackend
from overspill.pipeline import runner
from overspill.pipeline.runner import Runner
from overspill.pipeline.schedule import Action, Order, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Layout
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.blind import blind_to
from tests.helpers.latches import Piece
from tests.helpers.pipe import EXACT_POLICIES, Pipe, Shape, cut_wave, cut_waves, pipe, rare_delays
from tests.helpers.reference import Reference, reference_logits
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source

SIZES = (3, 2, 2)
IDS = [(7 * i + 3) % N_VOCAB for i in range(sum(SIZES))]
WAVE = cut_wave(IDS, SIZES)
PATIENCE_S = 60.0


def open_pipe(shape: Shape, *, max_in_flight: int = 64) -> AbstractContextManager[Pipe]:
    n_tokens = len(IDS)
    return pipe(tiny_source(), shape, n_ubatch=3, n_ubatches=len(SIZES), n_cells=n_tokens, max_in_flight=max_in_flight)


def without_hanging(work: Callable[[], object]) -> BaseException | None:
    """What `work` raises; that it ends is part of the question."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the test
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the host hangs"
    return raised[0] if raised else None


class Broken(Exception):
    pass


def break_at(p: Pipe, piece: Piece) -> None:
    def before(lane: Lane, label: str) -> None:
        if label == piece.label:
            raise Broken(label)

    cast(VirtualBackend, p.devices.all[piece.device]).before = before


PIECES = [
    (Piece(0, "inputs"), Policy.ALL),
    (Piece(2, "embed m0"), Policy.ALL),
    (Piece(0, "upload L0 s0"), Policy.ALL),
    (Piece(1, "upload L3 s1"), Policy.ALL),
    (Piece(0, "hand_off m1"), Policy.ALL),
    (Piece(1, "attend L1 m2"), Policy.ALL),
    (Piece(1, "experts L3 s1 m2"), Policy.ALL),
    (Piece(1, "output m0"), Policy.ALL),
    (Piece(1, "download m1"), Policy.ALL),
    (Piece(1, "read_ids L1 m0"), Policy.SELECTED),
    (Piece(2, "experts L2 m1"), Policy.CPU),
]


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize(("piece", "policy"), PIECES)
def test_an_error_in_any_stream_reaches_the_host_and_stays(piece: Piece, policy: Policy, order: Order) -> None:
    with open_pipe(Shape(2, slab_experts=2), max_in_flight=2) as p:
        break_at(p, piece)
        schedule = p.schedule(order, policy)
        first = without_hanging(lambda: p.runner.run(WAVE, schedule))
        assert isinstance(first, Broken)
        assert f"in {piece.label} on" in first.__notes__[0]
        assert isinstance(without_hanging(lambda: p.runner.run(WAVE, schedule)), Broken)


def test_an_error_of_a_wave_without_outputs_reaches_the_next() -> None:
    with open_pipe(Shape(2), max_in_flight=1000) as p:
        break_at(p, Piece(1, "experts L3 s0 m2"))
        schedule = p.schedule(Order.BREADTH_FIRST)
        silent = Wave(tuple(Ubatch(u.ids, u.segments) for u in WAVE.ubatches))
        assert without_hanging(lambda: p.runner.run(silent, schedule)) is None
        assert isinstance(without_hanging(lambda: p.runner.run(WAVE, schedule)), Broken)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("policy", EXACT_POLICIES)
@pytest.mark.parametrize("n_before", [0, 3, 20])
def test_an_interrupted_wave_leaves_nothing_to_the_next(order: Order, policy: Policy, n_before: int) -> None:
    """As when the user presses Ctrl-C while the host issues, or waits for logits."""
    expected = reference_logits(tiny_model(), [WAVE], n_cells=len(IDS))
    with open_pipe(Shape(2, slab_experts=2)) as p:
        schedule = p.schedule(order, policy)
        with patch.object(Runner, "_remember", interrupt_after(n_before, Runner._remember)):
            assert isinstance(without_hanging(lambda: p.runner.run(WAVE, schedule)), KeyboardInterrupt)
        with patch.object(Runner, "_read_logits_host", side_effect=KeyboardInterrupt):
            assert isinstance(without_hanging(lambda: p.runner.run(WAVE, schedule)), KeyboardInterrupt)
        assert torch.equal(torch.cat(p.runner.run(WAVE, schedule)), expected)


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("n_before", [0, 1, 5])
def test_a_wave_that_is_given_up_stops_at_a_split_and_leaves_nothing_to_the_next(order: Order, n_before: int) -> None:
    expected = reference_logits(tiny_model(), [WAVE], n_cells=len(IDS))
    calls: list[int] = []

    def give_up() -> None:
        calls.append(len(calls))
        if len(calls) > n_before:
            raise Broken

    with open_pipe(Shape(2, slab_experts=2)) as p:
        schedule = p.schedule(order)
        assert isinstance(without_hanging(lambda: p.runner.run(WAVE, schedule, give_up)), Broken)
        assert len(calls) == n_before + 1
        assert torch.equal(torch.cat(p.runner.run(WAVE, schedule)), expected)


def interrupt_after(n: int, function: Callable[..., None]) -> Callable[..., None]:
    calls = iter(range(n))

    def interrupted(*args: object) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        function(*args)

    return interrupted


def forgetful(verb: Verb, name: str, *, reads: bool) -> Callable[..., Iterator[Action]]:
    """A schedule whose actions of one verb do not name a resource that they use (as written, or at all)."""

    def forget(resources: Sequence[object]) -> tuple[object, ...]:
        return tuple(r for r in resources if cast(tuple[object, ...], r)[0] != name)

    def emit(layout: Layout, schedule: WaveSchedule, *counts: Sequence[int]) -> Iterator[Action]:
        for action in actions(layout, schedule, *counts):
            if action.verb is verb:
                action = replace(action, writes=forget(action.writes))
                action = replace(action, reads=forget(action.reads)) if reads else action
            yield action

    return emit


def run_forgetful(p: Pipe, emit: Callable[..., Iterator[Action]]) -> BaseException | None:
    """What comes out; at the end of all streams at the latest, since what is not named is not waited for either."""

    def run() -> None:
        p.runner.run(WAVE, p.schedule(Order.BREADTH_FIRST))
        p.runner.synchronize_host()

    with patch.object(runner, "actions", emit):
        return without_hanging(run)


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        (Verb.EMBED, "x"),
        (Verb.EMBED, "pos"),
        (Verb.LAYERS, "x"),
        (Verb.LAYERS, "kv"),
        (Verb.LAYERS, "pos"),
        (Verb.ATTEND, "x"),
        (Verb.ATTEND, "kv"),
        (Verb.ATTEND, "pos"),
        (Verb.ATTEND, "route"),
        (Verb.WIDEN, "slot"),
        (Verb.WIDEN, "wide"),
        (Verb.EXPERTS, "x"),
        (Verb.EXPERTS, "route"),
        (Verb.EXPERTS, "wide"),
        (Verb.OUTPUT, "x"),
        (Verb.OUTPUT, "logits"),
    ],
)
def test_work_may_touch_only_what_its_action_names(verb: Verb, name: str) -> None:
    with open_pipe(Shape(2, host_layers="odd", embeds=True, widens=True)) as p:
        raised = run_forgetful(p, forgetful(verb, name, reads=True))
        assert isinstance(raised, UndeclaredAccess)


@pytest.mark.parametrize(
    ("verb", "name"), [(Verb.LAYERS, "x"), (Verb.LAYERS, "kv"), (Verb.ATTEND, "kv"), (Verb.EXPERTS, "x")]
)
def test_work_may_not_write_what_its_action_only_reads(verb: Verb, name: str) -> None:
    with open_pipe(Shape(2, host_layers="odd")) as p:
        raised = run_forgetful(p, forgetful(verb, name, reads=False))
        assert isinstance(raised, UndeclaredAccess)


@pytest.mark.parametrize(
    ("names", "policy"),
    [
        (["x"], Policy.ALL),
        (["x", "route"], Policy.CPU),
        (["slot"], Policy.ALL),
        (["slot"], Policy.SELECTED),
        (["logits"], Policy.ALL),
        (["route"], Policy.SELECTED),
        (["ids"], Policy.SELECTED),
        (["host_pos"], Policy.ALL),
    ],
)
@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
def test_a_blind_ledger_fails_the_equality_test(names: list[str], policy: Policy, order: Order) -> None:
    assert any(goes_wrong(names, order, policy, seed) for seed in range(20))


def goes_wrong(names: list[str], order: Order, policy: Policy, seed: int) -> bool:
    """Two waves nobody waits for and one that is compared, as the equality test compares it."""
    *silent, last = cut_waves(IDS, (2, 1, 1, 1, 1, 1), 3)
    waves = [Wave(tuple(Ubatch(u.ids, u.segments) for u in wave.ubatches)) for wave in silent] + [last]
    reference = Reference(tiny_model(), n_cells=len(IDS))
    expected = [torch.cat(reference.run(wave)) for wave in waves][-1]
    result: list[torch.Tensor] = []

    def run() -> None:
        for wave in waves:
            result[:] = p.runner.run(wave, p.schedule(order, policy))

    with blind_to(names), open_pipe(Shape(2, slab_experts=1)) as p, rare_delays(seed, share=0.5, longest_s=0.004):
        p.poison()
        raised = without_hanging(run)
    return raised is not None or not torch.equal(torch.cat(result), expected)
