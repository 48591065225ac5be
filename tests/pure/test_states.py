"""Recurrent states: whatever requests come, each segment starts from the state of exactly the tokens before it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.cache.cells import CellType, KvShape, Segment, StateRows
from overspill.cache.states import SlotStates, StateGuard
from overspill.engine.request import Request, SamplingParams
from overspill.engine.scheduler import Scheduler, output_slots
from overspill.pipeline.wave import Wave
from tests.helpers.traffic import slot_sizes

# --- rows of one slot


def advance(states: SlotStates, first_pos: int, end_pos: int, *, keeps: bool) -> StateRows:
    rows = states.plan(first_pos, keeps=keeps)
    states.put(Segment(0, first_pos, end_pos - first_pos, rows))
    return rows


def test_rows_of_slots_do_not_overlap_and_the_first_is_the_slots_own() -> None:
    rows = [SlotStates.of_slot(slot, 3, 4)._rows for slot in range(3)]
    assert [r[0] for r in rows] == [0, 1, 2]
    assert sorted(row for r in rows for row in r) == list(range(12))


def test_a_kept_state_is_not_written_again() -> None:
    states = SlotStates.of_slot(0, 1, 3)
    assert advance(states, 0, 8, keeps=True) == (0, 0)
    assert advance(states, 8, 16, keeps=True) == (0, 1)
    assert advance(states, 16, 18, keeps=True) == (1, 2)
    assert advance(states, 18, 19, keeps=False) == (2, 2)
    assert states.positions == (8, 16, 19)
    assert [states.latest(p) for p in (7, 8, 17, 18, 19, 100)] == [0, 8, 16, 16, 19, 19]


def test_one_row_keeps_nothing() -> None:
    states = SlotStates.of_slot(1, 2, 1)
    for first in range(0, 32, 8):
        assert advance(states, first, first + 8, keeps=True) == (1, 1)
    assert states.positions == (32,)


def test_rows_are_free_again_after_a_cut() -> None:
    states = SlotStates.of_slot(0, 1, 3)
    for first in range(0, 24, 8):
        advance(states, first, first + 8, keeps=True)
    states.cut(8)
    assert states.positions == (8,)
    rows = [advance(states, first, first + 8, keeps=True) for first in (8, 16)]
    assert len({rows[0].before, rows[0].after, rows[1].after}) == 3


@pytest.mark.parametrize("n_rows", range(3, 8))
def test_what_is_kept_thins_out_backwards(n_rows: int) -> None:
    """Always the last two; and to go back to any position, never much more than to twice the distance."""
    states = SlotStates.of_slot(0, 1, n_rows)
    for n in range(100):
        advance(states, n, n + 1, keeps=True)
        assert {n, n + 1} - {0} <= set(states.positions)
        assert len(states.positions) == min(n + 1, n_rows)
    if n_rows >= 6:
        assert min(states.positions) <= 75


def test_a_guard_refuses_any_other_position() -> None:
    guard = StateGuard()
    guard.advance(Segment(0, 0, 5))
    guard.advance(Segment(0, 5, 3))
    for first_pos in (5, 7, 9):
        with pytest.raises(RuntimeError, match=rf"slot 0 goes on at position {first_pos}.* row 0 .* stands at 8"):
            guard.advance(Segment(0, first_pos, 1))
    with pytest.raises(RuntimeError, match=r"slot 1 .* row 1 .* at 0"):
        guard.advance(Segment(1, 8, 1))
    guard.advance(Segment(1, 8, 1, StateRows(0, 1)))
    guard.advance(Segment(0, 0, 2))


def test_shapes_of_a_state() -> None:
    shape = KvShape.of_state((3, 5), (2, 4, 4))
    assert shape.tensor_shapes(2, 100) == ()
    assert shape.state_shapes(6) == ((6, 3, 5), (6, 2, 4, 4))
    assert (shape.cell_bytes(CellType.F32), shape.n_state_values) == (0, 15 + 32)


def test_states_need_no_torch() -> None:
    code = "import sys, overspill.cache.states; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- behind a scheduler


class Device:
    """Cells and states as the tokens that went into them; every row that is read is compared with the sequence."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, ...]] = {}
        self._guard = StateGuard()

    def run(self, wave: Wave) -> None:
        for ubatch in wave.ubatches:
            row = 0
            for segment in ubatch.segments:
                self._guard.advance(segment)
                before = self._rows[segment.states.before] if segment.first_pos else ()
                after = before + ubatch.ids[row : row + segment.n_tokens]
                self._rows[segment.states.after] = after
                row += segment.n_tokens

    def state_of(self, segment: Segment) -> tuple[int, ...]:
        return self._rows[segment.states.after]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, object], list[tuple[list[int], int, int]]]:
    sizes = draw(slot_sizes(n_ubatch=5, n_slots=3)) | {"n_states": draw(st.integers(1, 5))}
    prompts = st.lists(st.integers(0, 1), min_size=1, max_size=39)
    request = st.tuples(prompts, st.integers(0, 6), st.integers(0, 8))
    return sizes, draw(st.lists(request, min_size=1, max_size=12))


@given(traffic())
@settings(deadline=None, max_examples=200)
def test_each_segment_starts_from_the_state_of_its_own_tokens(case: tuple[dict[str, object], list]) -> None:
    sizes, requests = case
    scheduler, device = Scheduler(**sizes), Device()  # type: ignore[arg-type]
    waiting = list(enumerate(requests))
    n_waves = 0
    while waiting or scheduler.has_work:
        if waiting:
            i, (prompt, max_tokens, chance) = waiting.pop()
            sequence = scheduler.add(Request(str(i), tuple(prompt), SamplingParams(max_tokens=max_tokens)))
            if chance == 8:
                scheduler.drop(sequence, keep_cells=True)
        wave = scheduler.next_wave()
        if wave is None:
            continue
        assert scheduler.next_wave() == wave
        device.run(wave)
        sequences = {s.slot: s for s in scheduler.sequences_in(wave)}
        last = {s.slot: s for u in wave.ubatches for s in u.segments}
        for slot, segment in last.items():
            assert device.state_of(segment) == tuple(sequences[slot].ids[: segment.end_pos])
        n_waves += 1
        if n_waves % 5 == 0:  # it failed
            for sequence in sequences.values():
                scheduler.drop(sequence, keep_cells=False)
        else:
            scheduler.commit(wave, dict.fromkeys(output_slots(wave), n_waves % 2))


def test_the_next_prompt_goes_on_from_the_last_state_that_was_kept() -> None:
    s = Scheduler(n_vocab=100, n_ctx_slot=64, n_slots=1, n_ubatch=4, n_wave=12, n_states=3)
    device = Device()
    for n_same, n_reused in ((0, 0), (22, 20), (21, 20), (18, 16), (3, 0)):
        prompt = [1] * n_same + [2] * (23 - n_same)
        sequence = s.add(Request("a", tuple(prompt), SamplingParams(max_tokens=2)))
        while (wave := s.next_wave()) is not None:
            device.run(wave)
            s.commit(wave, dict.fromkeys(output_slots(wave), 7))
        assert sequence.n_reused == n_reused
        s.add(Request("b", (1,) * 23, SamplingParams(max_tokens=1)))
        while (wave := s.next_wave()) is not None:
            device.run(wave)
            s.commit(wave, dict.fromkeys(output_slots(wave), 7))
