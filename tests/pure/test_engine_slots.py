"""Slots and waves beyond the plain case: which slot, how long a wave, and what becomes of one that nobody wants."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overspill.engine.engine import Engine, WaveAbandoned
from overspill.engine.pace import WavePace
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, Request, TokenEvent
from overspill.engine.scheduler import Scheduler
from overspill.engine.slots import PrefixReuse
from overspill.pipeline.wave import Wave
from tests.helpers.hash_model import HashModel

SIZES = {"n_vocab": 50, "n_ctx_slot": 400, "n_slots": 2, "n_ubatch": 4, "n_wave": 64}
GREEDY = SamplingParams(temperature=0, max_tokens=4)


def prompt(seed: int, n: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, 50, n))


def run(engine: Engine, *requests: Request) -> dict[str, list]:
    for request in requests:
        engine.submit(request)
    events: dict[str, list] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def tokens(events: list) -> list[int]:
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def n_cached(events: list) -> int:
    assert isinstance(events[-1], DoneEvent)
    return events[-1].timings.cache_n


# --- which slot


def used_slots(scheduler: Scheduler, *requests: Request) -> list[int | None]:
    """The slot each request gets, one after the other."""
    slots = []
    for request in requests:
        sequence = scheduler.add(request)
        while (wave := scheduler.next_wave()) is not None:
            slot = sequence.slot
            scheduler.commit(wave, {slot: 1} if wave.ubatches[-1].output_rows else {})
        slots.append(slot)
    return slots


def scheduler(**changes) -> Scheduler:
    return Scheduler(**(SIZES | changes), reuse=PrefixReuse.ANY_POINT)


def test_a_short_common_beginning_does_not_cost_another_conversation_its_cells():
    """All prompts of a template begin alike; a conversation comes back to its slot, a new one takes the other."""
    head = prompt(0, 5)
    first, second = head + prompt(1, 95), head + prompt(2, 95)
    assert used_slots(scheduler(), Request("a", first, GREEDY), Request("b", second, GREEDY)) == [0, 1]
    again = Request("c", first + prompt(3, 20), GREEDY)
    assert used_slots(scheduler(), Request("a", first, GREEDY), Request("b", second, GREEDY), again) == [0, 1, 0]


def test_without_anything_in_common_the_least_recently_used_slot_is_taken():
    requests = [Request(str(i), prompt(i, 30), GREEDY) for i in range(4)]
    assert used_slots(scheduler(n_slots=3), *requests) == [0, 1, 2, 0]


def test_a_request_waits_for_the_slot_it_names_and_lets_others_pass():
    s = scheduler()
    first = s.add(Request("a", prompt(1, 10), GREEDY))
    assert s.next_wave() is not None
    pinned = s.add(Request("b", prompt(2, 10), GREEDY, slot=4))  # modulo 2: the busy one
    other = s.add(Request("c", prompt(3, 10), GREEDY))
    assert s.next_wave() is not None
    assert (first.slot, pinned.slot, other.slot) == (0, None, 1)
    s.drop(first, keep_cells=True)
    assert s.next_wave() is not None
    assert pinned.slot == 0


def test_a_request_may_do_without_cells_of_others():
    engine = Engine(HashModel(**SIZES).run_wave, **SIZES, reuse=PrefixReuse.ANY_POINT)
    ids = prompt(1, 40)
    fresh = run(engine, Request("a", ids, GREEDY))["a"]
    reused = run(engine, Request("b", ids, GREEDY))["b"]
    alone = run(engine, Request("c", ids, GREEDY, reuses_cells=False))["c"]
    assert [n_cached(events) for events in (fresh, reused, alone)] == [0, 39, 0]
    assert tokens(fresh) == tokens(reused) == tokens(alone)


# --- how long a wave


@pytest.mark.parametrize(("fixed_ms", "token_ms"), [(0.0, 1.0), (20.0, 1.0), (90.0, 0.1), (0.0, 0.01)])
def test_the_pace_settles_within_the_bound(fixed_ms: float, token_ms: float):
    pace, walls = WavePace(max_ms=100.0, n_wave=4096, n_first=4096), []
    for _ in range(60):
        n = pace.n_tokens
        walls.append(fixed_ms + token_ms * n)
        pace.note(n, walls[-1])
    assert max(walls[20:]) <= 125.0, "a step up is no more than a quarter"
    assert min(walls[20:]) >= 60.0 or pace.n_tokens == 4096, "and no time is left unused"
    late = [wall for wall in walls[20:] if wall > 100.0]
    assert len(late) <= len(walls[20:]) / 2


def test_the_pace_takes_one_token_at_least_and_recovers():
    pace = WavePace(max_ms=10.0, n_wave=100, n_first=100)
    for _ in range(20):
        pace.note(pace.n_tokens, 1e6)
    assert pace.n_tokens == 1
    for _ in range(60):
        pace.note(pace.n_tokens, 0.1)
    assert pace.n_tokens == 100


def test_the_pace_begins_as_predicted_and_stays_where_fewer_tokens_help_nobody():
    pace = WavePace(max_ms=10.0, n_wave=100, n_first=60, n_least=32)
    assert pace.n_tokens == 60
    for _ in range(20):
        pace.note(pace.n_tokens, 1e6)
    assert pace.n_tokens == 32


@pytest.mark.parametrize("n_wave", [64, 256])
def test_a_long_prompt_is_cut_within_its_ubatch_beside_a_decoding_sequence(n_wave: int):
    """Ubatches of 64 tokens, 10 ms each token, a bound of 100 ms: every wave that keeps the talker waiting has 10
    tokens of the prompt at most, also where a wave has room for one ubatch only, and prompts and talker take turns."""
    now_s, gaps = 0.0, []
    sizes = SIZES | {"n_ubatch": 64, "n_wave": n_wave}
    model = HashModel(**sizes)

    def run_wave(wave: Wave) -> list[torch.Tensor]:
        nonlocal now_s
        now_s += 0.01 * wave.n_tokens
        return model.run_wave(wave)

    pace = WavePace(100.0, n_wave, n_first=10)
    engine = Engine(run_wave, **sizes, reuse=PrefixReuse.ANY_POINT, pace=pace, clock=lambda: now_s)
    talker = Request("talker", prompt(1, 4), SamplingParams(temperature=0, max_tokens=80))
    engine.submit(talker)
    engine.step()
    engine.submit(Request("long", prompt(2, 300), GREEDY))
    last_s = now_s
    for event in (event for _ in range(60) for event in engine.step()):
        if isinstance(event, TokenEvent) and event.request_id == "talker":
            gaps.append(now_s - last_s)
            last_s = now_s
    assert len(gaps) >= 25
    assert max(gaps) <= (0.111 if n_wave > 64 else 0.121)
    assert sum(w.n_tokens for w in model.waves) > 250


@pytest.mark.parametrize("reuse", [PrefixReuse.WHOLE_UBATCHES, PrefixReuse.NONE])
def test_where_bits_have_to_stay_the_same_ubatches_stay_whole(reuse: PrefixReuse):
    model = HashModel(**SIZES)
    engine = Engine(model.run_wave, **SIZES, reuse=reuse, pace=WavePace(1.0, 64, n_first=1))
    run(engine, Request("a", prompt(1, 4), SamplingParams(temperature=0, max_tokens=40)), Request("b", prompt(2, 40)))
    assert all(s.first_pos % 4 == 0 for w in model.waves for u in w.ubatches for s in u.segments if s.n_tokens > 1)


def test_prompts_beside_decoding_sequences_are_cut_short_and_text_stays_the_same():
    """The clock runs 10 ms for each token of a wave; the bound is 100 ms."""
    now_s = 0.0
    model = HashModel(**SIZES)

    def run_wave(wave: Wave) -> list[torch.Tensor]:
        nonlocal now_s
        now_s += 0.01 * wave.n_tokens
        return model.run_wave(wave)

    engine = Engine(run_wave, **SIZES, pace=WavePace(100.0, 64, n_first=64), clock=lambda: now_s)
    talker = Request("talker", prompt(1, 4), SamplingParams(temperature=0, max_tokens=60))
    long = Request("long", prompt(2, 300), GREEDY)
    events = run(engine, talker, long)
    mixed = [w.n_tokens for w in model.waves if w.ubatches[-1].n_tokens == 1 and len(w.ubatches) > 1]
    assert len(mixed) > 20
    assert max(mixed) > 40, "the first is as long as waves are"
    assert max(mixed[2:]) <= 13
    alone = Engine(HashModel(**SIZES).run_wave, **SIZES)
    want = run(alone, talker, long)
    assert {name: tokens(e) for name, e in events.items()} == {name: tokens(e) for name, e in want.items()}


# --- a wave nobody wants


@pytest.mark.parametrize("n_states", [0, 3])
def test_a_wave_ends_early_when_all_its_requests_are_cancelled(n_states: int):
    model = HashModel(**SIZES)
    asked: list[bool] = []

    def run_wave(wave: Wave) -> list[torch.Tensor]:
        if len(asked) < 3:
            for name in ("a", "b"):
                asked.append(engine.is_wave_abandoned)
                engine.cancel(name)
            asked.append(engine.is_wave_abandoned)
            raise WaveAbandoned
        return model.run_wave(wave)

    engine = Engine(run_wave, **SIZES, n_states=n_states)
    events = run(engine, Request("a", prompt(1, 10), GREEDY), Request("b", prompt(2, 10), GREEDY))
    assert asked == [False, False, True]
    assert {e[-1].reason for e in events.values()} == {"cancelled"}
    assert engine.failed is None
    assert not engine.is_wave_abandoned
    after = run(engine, Request("a", prompt(1, 10), GREEDY))["a"]
    assert after[-1].reason == "length"
    assert not any(slot.is_busy for slot in engine.slots)


def test_a_wave_that_only_decodes_is_not_abandoned():
    """It is short, and its cells are wanted: a stop string ends a request this way."""
    asked: list[bool] = []
    model = HashModel(**SIZES)

    def run_wave(wave: Wave) -> list[torch.Tensor]:
        if wave.n_tokens == 1:
            engine.cancel("a")
        asked.append(engine.is_wave_abandoned)
        return model.run_wave(wave)

    engine = Engine(run_wave, **SIZES, reuse=PrefixReuse.ANY_POINT)
    ids = prompt(1, 10)
    events = run(engine, Request("a", ids, GREEDY))["a"]
    assert asked == [False, False]
    assert n_cached(run(engine, Request("b", (*ids, *tokens(events)), GREEDY))["b"]) == 11


def test_the_status_counts_waves_and_the_sequences_in_them():
    engine = Engine(HashModel(**SIZES).run_wave, **SIZES)
    run(engine, *(Request(str(i), prompt(i, 4), GREEDY) for i in range(2)))
    status = engine.status
    assert (status.n_waves, status.n_in_waves, status.n_waiting, status.failed) == (4, 8, 0, None)
