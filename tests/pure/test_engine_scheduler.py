"""Waves as values: what is computed, in which order, in which slot."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.engine.params import SamplingParams
from overspill.engine.request import Request
from overspill.engine.scheduler import ContextOverflow, Scheduler, output_slots
from overspill.engine.slots import PrefixReuse
from overspill.errors import UserError
from overspill.pipeline.wave import Segment, Wave
from tests.helpers.traffic import slot_sizes

SIZES = {"n_vocab": 100, "n_ctx_slot": 64, "n_slots": 2, "n_ubatch": 4, "n_wave": 12}


def scheduler(**changes) -> Scheduler:
    return Scheduler(**(SIZES | changes))


def request(name: str, prompt, max_tokens: int = -1, **params) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), frozenset({99}))


def shape(wave: Wave | None) -> list[list[tuple[int, int, int]]]:
    """Per ubatch its segments as (slot, first position, tokens)."""
    assert wave is not None
    return [[(s.slot, s.first_pos, s.n_tokens) for s in ubatch.segments] for ubatch in wave.ubatches]


def commit_all(s: Scheduler, wave: Wave | None, token_id: int = 1):
    assert wave is not None
    return s.commit(wave, dict.fromkeys(output_slots(wave), token_id))


def finish(s: Scheduler, token_id: int = 1) -> None:
    while (wave := s.next_wave()) is not None:
        commit_all(s, wave, token_id)


# --- waves


def test_prompts_share_a_wave_but_not_a_ubatch_and_then_decode_together():
    s = scheduler()
    s.add(request("a", range(6)))
    s.add(request("b", range(10, 17)))
    wave = s.next_wave()
    assert shape(wave) == [[(0, 0, 4)], [(0, 4, 2)], [(1, 0, 4)]]
    assert [u.ids for u in wave.ubatches] == [(0, 1, 2, 3), (4, 5), (10, 11, 12, 13)]
    assert [u.output_rows for u in wave.ubatches] == [(), (1,), ()]
    assert s.commit(wave, {0: 50}) == []
    wave = s.next_wave()
    assert shape(wave) == [[(1, 4, 3)], [(0, 6, 1)]]
    assert [u.ids for u in wave.ubatches] == [(14, 15, 16), (50,)]
    assert output_slots(wave) == [1, 0]
    s.commit(wave, {1: 60, 0: 51})
    wave = s.next_wave()
    assert shape(wave) == [[(0, 7, 1), (1, 7, 1)]]
    assert wave.ubatches[0].ids == (51, 60)
    assert wave.ubatches[0].output_rows == (0, 1)


def test_a_later_prompt_does_not_overtake_one_that_does_not_fit():
    s = scheduler(n_wave=6)
    s.add(request("a", range(8)))
    s.add(request("b", range(2)))
    assert shape(s.next_wave()) == [[(0, 0, 4)]]


def test_a_wave_is_the_same_until_it_is_committed():
    s = scheduler()
    s.add(request("a", range(20)))
    assert s.next_wave() == s.next_wave()


def test_decoding_and_prompts_take_turns_where_they_do_not_fit_together():
    s = scheduler(n_wave=4)
    s.add(request("a", range(3)))
    commit_all(s, s.next_wave())
    s.add(request("b", range(12)))
    shapes = []
    for _ in range(6):
        wave = s.next_wave()
        shapes.append(shape(wave))
        commit_all(s, wave)
    assert shapes == [[[(0, 3, 1)]], [[(1, 0, 4)]], [[(0, 4, 1)]], [[(1, 4, 4)]], [[(0, 5, 1)]], [[(1, 8, 4)]]]


def test_more_decoding_sequences_than_a_ubatch_holds_make_several():
    s = scheduler(n_slots=5, n_ubatch=2)
    for i in range(5):
        s.add(request(str(i), [i]))
    commit_all(s, s.next_wave())
    assert shape(s.next_wave()) == [[(0, 1, 1), (1, 1, 1)], [(2, 1, 1), (3, 1, 1)], [(4, 1, 1)]]


def test_nothing_to_do_is_no_wave():
    assert scheduler().next_wave() is None


# --- ends


def test_ends_in_the_order_stop_length_and_max_tokens_zero_wants_no_row():
    s = scheduler()
    s.add(request("zero", range(5), max_tokens=0))
    wave = s.next_wave()
    assert output_slots(wave) == []
    assert [(q.request.id, q.n_generated, reason) for q, reason in s.commit(wave, {})] == [("zero", 0, "length")]
    s.add(request("one", range(5), max_tokens=1))
    assert [reason for _, reason in commit_all(s, s.next_wave(), token_id=5)] == ["length"]
    s.add(request("both", range(5), max_tokens=1))
    assert [reason for _, reason in commit_all(s, s.next_wave(), token_id=99)] == ["stop"]
    s.add(request("own stop id", range(5), stop_ids=frozenset({7})))
    assert [reason for _, reason in commit_all(s, s.next_wave(), token_id=7)] == ["stop"]
    assert not s.has_work


@pytest.mark.parametrize("n_prompt", [1, 62, 63])
def test_the_context_ends_a_request(n_prompt):
    s = scheduler()
    sequence = s.add(request("a", [1] * n_prompt))
    finish(s)
    assert sequence.n_generated == 64 - n_prompt
    assert not s.has_work


# --- refusals


@pytest.mark.parametrize("n_prompt", [64, 65, 1000])
def test_too_long_a_prompt_is_refused_with_both_numbers(n_prompt):
    with pytest.raises(ContextOverflow, match=f"{n_prompt} tokens.* context of 64") as caught:
        scheduler().add(request("a", [1] * n_prompt))
    assert (caught.value.n_prompt, caught.value.n_ctx) == (n_prompt, 64)


@pytest.mark.parametrize("bad", [-1, 100, 10**30, 1.0, "a", None, True, [1]])
def test_an_id_outside_the_vocabulary_is_named(bad):
    with pytest.raises(UserError, match=r"prompt: .* at place 2 .* 0 to 99") as caught:
        scheduler().add(request("a", [0, 99, bad]))
    assert repr(bad) in str(caught.value)


def test_other_requests_that_cannot_be_served():
    s = scheduler()
    with pytest.raises(UserError, match="prompt: it is empty"):
        s.add(request("a", []))
    with pytest.raises(UserError, match="stop_ids: 100 "):
        s.add(request("a", [1], stop_ids=frozenset({100})))
    with pytest.raises(UserError, match="logit_bias: 100 "):
        s.add(request("a", [1], logit_bias=((100, 1.0),)))
    with pytest.raises(UserError, match="n_probs: 101 found, the vocabulary has 100"):
        s.add(request("a", [1], n_probs=101))
    assert not s.has_work


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_wave": 3}, "raise the wave size to 4"),
        ({"n_slots": 13}, "raise the wave size to 13"),
        ({"n_slots": 0}, "slots 0"),
        ({"n_ubatch": 0}, "ubatch 0"),
        ({"n_ctx_slot": 1}, "context per slot 1"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(change, text):
    with pytest.raises(UserError, match=text):
        scheduler(**change)


# --- slots


def test_a_request_waits_until_a_slot_is_free():
    s = scheduler()
    for name in "abc":
        s.add(request(name, range(3), max_tokens=2 if name == "b" else 1))
    assert s.n_waiting == 3
    commit_all(s, s.next_wave())
    assert s.n_waiting == 1
    assert [q and q.request.id for q in s.in_slots] == [None, "b"]
    wave = s.next_wave()
    assert [q and q.request.id for q in s.in_slots] == ["c", "b"]
    assert len(commit_all(s, wave)) == 2
    assert s.in_slots == (None, None)


def test_the_least_recently_used_slot_comes_first():
    s = scheduler()
    a, b = s.add(request("a", [1], max_tokens=2)), s.add(request("b", [2], max_tokens=1))
    finish(s)
    assert (a.slot, b.slot) == (0, 1)
    c = s.add(request("c", [3], max_tokens=1))
    finish(s)
    assert c.slot == 1
    d = s.add(request("d", [4], max_tokens=1))
    finish(s)
    assert d.slot == 0


@pytest.mark.parametrize(
    ("n_same", "n_prompt", "n_reused"),
    [(10, 20, 8), (12, 20, 8), (20, 20, 8), (3, 20, 0), (4, 20, 4), (8, 8, 4), (9, 9, 8), (2, 2, 0)],
)
def test_whole_ubatches_of_the_former_prompt_are_reused(n_same, n_prompt, n_reused):
    """The former prompt has 11 tokens, two full ubatches of 4; its answer's cells are not of full ubatches."""
    s = scheduler(n_slots=1)
    former = s.add(request("a", range(11), max_tokens=20))
    finish(s)
    new = s.add(request("b", former.ids[:n_same] + [77] * (n_prompt - n_same)))
    wave = s.next_wave()
    assert new.n_reused == n_reused
    assert wave.ubatches[0].segments == (Segment(0, n_reused, min(4, n_prompt - n_reused)),)


@pytest.mark.parametrize(("n_same", "n_prompt", "n_reused"), [(10, 20, 10), (25, 40, 25), (30, 31, 30), (30, 30, 29)])
def test_any_point_reuses_answers_too_and_cuts_at_the_same_places(n_same, n_prompt, n_reused):
    s = scheduler(n_slots=1, reuse=PrefixReuse.ANY_POINT)
    former = s.add(request("a", range(11), max_tokens=20))
    finish(s)
    assert former.n_done == 30
    new = s.add(request("b", former.ids[:n_same] + [77] * (n_prompt - n_same)))
    first = s.next_wave().ubatches[0].segments[0]
    assert (new.n_reused, first.first_pos) == (n_reused, n_reused)
    assert first.first_pos + first.n_tokens == min(n_prompt, n_reused // 4 * 4 + 4)


def test_no_reuse_where_the_model_cannot_be_cut_back():
    s = scheduler(n_slots=1, reuse=PrefixReuse.NONE)
    for name in "ab":
        s.add(request(name, range(20), max_tokens=1))
        assert s.next_wave().ubatches[0].segments[0].first_pos == 0
        finish(s)


def test_the_slot_with_the_longest_usable_prefix_is_chosen():
    s = scheduler()
    s.add(request("a", [*range(8), 1], max_tokens=1))
    s.add(request("b", [*range(20, 28), 1], max_tokens=1))
    finish(s)
    new = s.add(request("c", [*range(20, 28), 5]))
    s.next_wave()
    assert (new.slot, new.n_reused) == (1, 8)


def test_dropping_frees_the_slot_and_keeps_cells_only_when_told():
    for keep_cells, n_reused in ((True, 12), (False, 0)):
        s = scheduler(n_slots=1)
        a, b = s.add(request("a", range(30))), s.add(request("b", range(30)))
        commit_all(s, s.next_wave())
        s.drop(a, keep_cells=keep_cells)
        s.next_wave()
        assert (b.slot, b.n_reused) == (0, n_reused)


def test_dropping_a_waiting_request_and_forgetting_cells():
    s = scheduler(n_slots=1)
    a, b = s.add(request("a", range(9), max_tokens=1)), s.add(request("b", range(9)))
    s.next_wave()
    s.drop(b, keep_cells=True)
    finish(s)
    assert a.n_generated == 1
    s.forget_cells()
    c = s.add(request("c", range(9)))
    s.next_wave()
    assert c.n_reused == 0


# --- for any traffic


@st.composite
def traffic(draw):
    sizes = draw(slot_sizes(n_ubatch=6, n_slots=5))
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=39)
    requests = draw(st.lists(st.tuples(prompts, st.integers(-1, 6), st.integers(0, 8)), min_size=1, max_size=10))
    return sizes, requests


@given(traffic())
@settings(deadline=None, max_examples=150)
def test_every_token_is_computed_once_in_order_and_within_the_sizes(case):
    sizes, arrivals = case
    s = Scheduler(**sizes)
    pending = list(enumerate(arrivals))
    sequences, next_pos = [], {}
    for i_wave in range(2000):
        for i, (prompt, max_tokens, when) in list(pending):
            if when <= i_wave:
                sequences.append(s.add(request(str(i), prompt, max_tokens)))
                pending.remove((i, (prompt, max_tokens, when)))
        wave = s.next_wave()
        if wave is None:
            if not pending:
                break
            continue
        assert wave.n_tokens <= sizes["n_wave"]
        prefilling = []
        for ubatch in wave.ubatches:
            assert ubatch.n_tokens <= sizes["n_ubatch"]
            at = 0
            for segment in ubatch.segments:
                sequence = s.in_slots[segment.slot]
                name = sequence.request.id
                if name not in next_pos:
                    next_pos[name] = sequence.n_reused
                    assert sequence.n_reused < sequence.n_prompt
                assert segment.first_pos == next_pos[name]
                last = segment.first_pos + segment.n_tokens
                assert ubatch.ids[at : at + segment.n_tokens] == tuple(sequence.ids[segment.first_pos : last])
                if segment.first_pos < sequence.n_prompt:
                    assert len(ubatch.segments) == 1
                    assert last % sizes["n_ubatch"] == 0 or last == sequence.n_prompt
                    assert segment.first_pos // sizes["n_ubatch"] == (last - 1) // sizes["n_ubatch"]
                    prefilling.append(int(name))
                next_pos[name] = last
                at += segment.n_tokens
        order = [sequences.index(q) for q in s.sequences_in(wave) if int(q.request.id) in prefilling]
        assert order == sorted(order), "first come, first served"
        commit_all(s, wave, token_id=i_wave % 3)
    assert not s.has_work
    for sequence in sequences:
        limit = sequence.request.params.max_tokens
        room = sizes["n_ctx_slot"] - sequence.n_prompt
        assert sequence.n_generated == (room if limit == -1 else min(limit, room))
        assert next_pos[sequence.request.id] == sequence.n_prompt + max(0, sequence.n_generated - 1)


@given(st.integers(1, 6), st.integers(0, 10), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_nobody_starves(n_ubatch, extra, n_slots):
    """Under an endless stream of prompts, a decoding sequence gets a token at least every second wave."""
    s = Scheduler(
        n_vocab=100, n_ctx_slot=64, n_slots=n_slots + 1, n_ubatch=n_ubatch, n_wave=max(n_ubatch, n_slots + 1) + extra
    )
    first = s.add(request("first", [1]))
    commit_all(s, s.next_wave())
    n_prompts_done = 0
    for i in range(40):
        if s.n_waiting == 0:
            s.add(request(str(i), [2] * 20, max_tokens=1))
        n_prompts_done += sum(q.request.id != "first" for q, _ in commit_all(s, s.next_wave()))
    assert first.n_generated >= 20
    n_cuts = -(-20 // n_ubatch)
    assert n_prompts_done >= 19 // n_cuts


def test_the_scheduler_needs_no_torch():
    code = "import sys, overspill.engine.scheduler; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
