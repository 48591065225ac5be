"""The engine on a toy model: text does not depend on sizes or neighbours, and no request harms another."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from overspill.engine.engine import Engine
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, ProgressEvent, Request, TokenEvent
from overspill.engine.sampler import Sampler
from overspill.engine.scheduler import ContextOverflow
from overspill.engine.slots import PrefixReuse
from overspill.errors import UserError
from tests.helpers.hash_model import HashModel, hash_logits

N_VOCAB = 50
EOG = frozenset({0})
SIZES = {"n_vocab": N_VOCAB, "n_ctx_slot": 64, "n_slots": 2, "n_ubatch": 4, "n_wave": 12}
GREEDY = SamplingParams(temperature=0)


def make(reuse=PrefixReuse.WHOLE_UBATCHES, fault=None, **changes) -> tuple[Engine, HashModel]:
    sizes = SIZES | changes
    model = HashModel(**sizes, **({"fault": fault} if fault else {}))
    return Engine(model.run_wave, **sizes, reuse=reuse), model


def drain(engine: Engine) -> dict[str, list]:
    """All events by request."""
    events: dict[str, list] = {}
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def text(events: list) -> list[int]:
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def done(events: list) -> DoneEvent:
    assert [isinstance(e, DoneEvent) for e in events] == [False] * (len(events) - 1) + [True]
    return events[-1]


def prompt(seed: int, n: int) -> tuple[int, ...]:
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, N_VOCAB, n))


def plain_text(prompt_ids, params: SamplingParams, n_ctx: int = 64, stop_ids=EOG) -> list[int]:
    """What a plain loop over the model gives."""
    sampler = Sampler(params, params.seed or 0, stop_ids if params.ignore_eos else frozenset())
    ids = list(prompt_ids)
    n_most = n_ctx - len(ids) if params.max_tokens == -1 else min(params.max_tokens, n_ctx - len(ids))
    for _ in range(n_most):
        logits_V = hash_logits(ids, N_VOCAB)
        greedy = params == GREEDY
        ids.append(int(logits_V.argmax()) if greedy else sampler.sample(logits_V, ids).id)
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt_ids) :]


PROMPTS = [prompt(seed, n) for seed, n in enumerate((1, 3, 4, 5, 17, 40, 62, 63))]
PARAMS = [GREEDY, *(SamplingParams(seed=seed, repeat_penalty=1.3, max_tokens=30) for seed in range(1, 8))]
REQUESTS = [Request(f"r{i}", p, PARAMS[i % 8], EOG) for i, p in enumerate(PROMPTS * 2)]


@pytest.mark.parametrize(
    ("n_ubatch", "n_wave", "n_slots"),
    [(u, w, s) for u, w, s in itertools.product((1, 2, 5, 64), (5, 7, 64, 200), (1, 2, 5)) if w >= u],
)
def test_the_text_is_that_of_a_plain_loop_whatever_the_sizes(n_ubatch, n_wave, n_slots):
    engine, _ = make(n_ubatch=n_ubatch, n_wave=n_wave, n_slots=n_slots)
    for request in REQUESTS:
        engine.submit(request)
    events = drain(engine)
    for request in REQUESTS:
        assert text(events[request.id]) == plain_text(request.prompt_ids, request.params), request.id
        assert done(events[request.id]).reason in ("stop", "length")
    assert engine.failed is None


@pytest.mark.parametrize("reuse", PrefixReuse)
def test_a_conversation_gives_the_same_text_with_and_without_reuse(reuse):
    engine, _ = make(reuse=reuse, n_slots=1, n_ctx_slot=200)
    history, n_cached = list(prompt(1, 10)), []
    for turn in range(5):
        params = SamplingParams(temperature=0, max_tokens=9)
        engine.submit(Request(f"t{turn}", tuple(history), params))
        events = drain(engine)[f"t{turn}"]
        assert text(events) == plain_text(history, params, n_ctx=200, stop_ids=frozenset())
        n_cached.append(done(events).timings.cache_n)
        assert done(events).timings.prompt_n == len(history) - n_cached[-1]
        history += [*text(events), turn]
    expected = {
        PrefixReuse.NONE: [0, 0, 0, 0, 0],
        PrefixReuse.WHOLE_UBATCHES: [0, 8, 20, 28, 40],
        PrefixReuse.ANY_POINT: [0, 18, 28, 38, 48],
    }
    assert n_cached == expected[reuse]


def test_late_requests_do_not_change_the_text_of_early_ones():
    engine, _ = make()
    events: dict[str, list] = {}
    for i, request in enumerate(REQUESTS):
        engine.submit(request)
        for _ in range(i % 4):
            for event in engine.step():
                events.setdefault(event.request_id, []).append(event)
    for name, more in drain(engine).items():
        events.setdefault(name, []).extend(more)
    for request in REQUESTS:
        assert text(events[request.id]) == plain_text(request.prompt_ids, request.params)


# --- ends


@pytest.mark.parametrize("n_prompt", [1, 62, 63])
def test_the_context_limit_ends_with_length_after_exactly_what_fits(n_prompt):
    engine, _ = make()
    engine.submit(Request("a", prompt(5, n_prompt), GREEDY))
    end = done(drain(engine)["a"])
    assert (end.reason, end.n_prompt, end.n_generated) == ("length", n_prompt, 64 - n_prompt)


@pytest.mark.parametrize(("max_tokens", "n_generated"), [(0, 0), (1, 1), (2, 2), (-1, 54), (10**12, 54)])
def test_max_tokens(max_tokens, n_generated):
    engine, model = make()
    engine.submit(Request("a", prompt(5, 10), SamplingParams(temperature=0, max_tokens=max_tokens)))
    events = drain(engine)["a"]
    assert (done(events).reason, done(events).n_generated) == ("length", n_generated)
    assert len(text(events)) == n_generated
    assert len(model.cells[0]) == 10 + max(0, n_generated - 1)


def test_an_end_id_is_told_counted_and_marked():
    first = int(hash_logits(prompt(5, 10), N_VOCAB).argmax())
    engine, _ = make()
    engine.submit(Request("model's", prompt(5, 10), GREEDY, frozenset({first})))
    engine.submit(Request("user's", prompt(5, 10), SamplingParams(temperature=0, stop_ids=frozenset({first}))))
    for events in drain(engine).values():
        token = next(e for e in events if isinstance(e, TokenEvent))
        assert (token.token_id, token.is_stop) == (first, True)
        assert (done(events).reason, done(events).n_generated) == ("stop", 1)


def test_ignore_eos_never_samples_the_models_end_ids():
    engine, _ = make()
    eog = frozenset(range(0, N_VOCAB, 2))
    engine.submit(Request("a", prompt(5, 10), SamplingParams(seed=1, ignore_eos=True), eog))
    events = drain(engine)["a"]
    assert done(events).reason == "length"
    assert len(text(events)) == 54
    assert not eog & set(text(events))


def test_penalties_see_the_prompt_and_the_answer():
    """A penalty that outweighs every logit: no token of the window can come again."""
    engine, _ = make()
    params = SamplingParams(temperature=0, presence_penalty=100.0, repeat_last_n=49, max_tokens=40)
    engine.submit(Request("a", tuple(range(9)), params))
    ids = text(drain(engine)["a"])
    assert len(ids) == 40
    assert sorted(set(ids)) == sorted(ids)
    assert not set(ids) & set(range(9))


# --- cancelling


@pytest.mark.parametrize("n_steps", [0, 1, 2, 5, 8])
def test_cancel_frees_the_slot_in_every_phase(n_steps):
    """0: not begun, 1-2: in its prompt of 30 tokens, 12 a wave; 5, 8: decoding."""
    engine, _ = make(n_slots=1)
    engine.submit(Request("a", prompt(1, 30), GREEDY))
    engine.submit(Request("b", prompt(2, 7), GREEDY, EOG))
    events = [event for _ in range(n_steps) for event in engine.step()]
    n_tokens = len(text([e for e in events if e.request_id == "a"]))
    assert n_tokens == max(0, n_steps - 2)
    engine.cancel("a")
    rest = drain(engine)
    assert len(rest["a"]) == 1
    assert (done(rest["a"]).reason, done(rest["a"]).n_generated) == ("cancelled", n_tokens)
    assert text(rest["b"]) == plain_text(prompt(2, 7), GREEDY)
    engine.submit(Request("a", prompt(1, 30), GREEDY, EOG))
    assert text(drain(engine)["a"]) == plain_text(prompt(1, 30), GREEDY)


def test_cancelling_a_waiting_an_unknown_and_a_finished_request():
    engine, _ = make(n_slots=1)
    for name in "ab":
        engine.submit(Request(name, prompt(1, 5), SamplingParams(temperature=0, max_tokens=3)))
    engine.step()
    for name in ("b", "never seen"):
        engine.cancel(name)
    events = drain(engine)
    assert [e.reason for e in events["b"]] == ["cancelled"]
    assert done(events["a"]).reason == "length"
    engine.cancel("a")
    assert engine.has_work
    assert engine.step() == []
    assert not engine.has_work


# --- what goes wrong


def test_a_refused_request_leaves_no_trace():
    engine, _ = make()
    with pytest.raises(ContextOverflow):
        engine.submit(Request("a", (1,) * 64))
    with pytest.raises(UserError, match="it is empty"):
        engine.submit(Request("a", ()))
    assert not engine.has_work
    engine.submit(Request("a", (1,), GREEDY))
    with pytest.raises(UserError, match="request id 'a' is in use"):
        engine.submit(Request("a", (2,), GREEDY))
    assert done(drain(engine)["a"]).reason == "length"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n_before", [0, 5])
def test_bad_logits_end_their_request_alone_and_never_become_text(n_before, bad):
    poisoned = prompt(1, 9)

    def fault(history, logits_V):
        if tuple(history[:9]) == poisoned and len(history) >= 9 + n_before:
            logits_V[:] = bad

    engine, _ = make(fault=fault)
    engine.submit(Request("bad", poisoned, GREEDY))
    engine.submit(Request("good", prompt(2, 9), GREEDY, EOG))
    events = drain(engine)
    assert text(events["bad"]) == plain_text(poisoned, GREEDY)[:n_before]
    assert (done(events["bad"]).reason, done(events["bad"]).n_generated) == ("error", n_before)
    assert "50" in done(events["bad"]).message
    assert text(events["good"]) == plain_text(prompt(2, 9), GREEDY)
    assert engine.failed is None
    engine.submit(Request("again", poisoned, GREEDY))
    assert done(drain(engine)["again"]).timings.cache_n == 0, "cells of a broken run must not be reused"


def test_a_device_error_ends_the_wave_but_not_the_engine(caplog):
    def fault(history, logits_V):
        if history[-1] == 49 and len(history) == 3:
            raise RuntimeError("the cable\nfell out")

    engine, _ = make(fault=fault, n_slots=3)
    engine.submit(Request("sound", prompt(3, 5), SamplingParams(temperature=0, max_tokens=1)))
    drain(engine)
    engine.submit(Request("a", (1, 2, 49), GREEDY))
    engine.submit(Request("b", prompt(4, 6), GREEDY))
    events = drain(engine)
    for name in "ab":
        assert done(events[name]).reason == "error"
        assert done(events[name]).message == engine.failed == "the device failed: RuntimeError: the cable"
    assert "fell out" in caplog.text
    engine.submit(Request("next", prompt(3, 5), GREEDY, EOG))
    events = drain(engine)
    assert text(events["next"]) == plain_text(prompt(3, 5), GREEDY)
    assert done(events["next"]).timings.cache_n == 0, "cells from before the error must not be reused"


def test_a_device_without_memory_says_it_in_its_own_words(caplog):
    def fault(history, logits_V):
        raise UserError("cuda:1: 3 GiB needed, 2 GiB free")

    engine, _ = make(fault=fault)
    engine.submit(Request("a", (1, 2), GREEDY))
    assert done(drain(engine)["a"]).message == "cuda:1: 3 GiB needed, 2 GiB free"


def test_a_run_that_returns_too_few_rows_is_a_fault_that_shows():
    engine = Engine(lambda wave: [torch.zeros(0, N_VOCAB)], **SIZES)
    engine.submit(Request("a", (1, 2), GREEDY))
    with pytest.raises(ValueError, match="zip"):
        engine.step()


# --- what is told


def test_progress_comes_after_each_wave_of_a_prompt_and_before_the_token():
    engine, _ = make()
    engine.submit(Request("a", prompt(1, 30), SamplingParams(temperature=0, max_tokens=1)))
    events = drain(engine)["a"]
    assert events[:3] == [ProgressEvent("a", n, 30) for n in (12, 24, 30)]
    assert [type(e) for e in events[3:]] == [TokenEvent, DoneEvent]
    engine.submit(Request("b", prompt(1, 30), SamplingParams(temperature=0, max_tokens=1)))
    assert drain(engine)["b"][0] == ProgressEvent("b", 30, 30, n_cached=28)


def test_logprobs_are_those_of_the_row_the_token_came_from():
    engine, _ = make(n_slots=5, n_ubatch=3, n_wave=9)
    requests = [Request(f"{i}", prompt(i, 5 + i), SamplingParams(seed=i, n_probs=4, max_tokens=9)) for i in range(5)]
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    for request in requests:
        ids = list(request.prompt_ids)
        for token in (e for e in events[request.id] if isinstance(e, TokenEvent)):
            want = torch.log_softmax(torch.from_numpy(hash_logits(ids, N_VOCAB)).double(), 0)
            assert token.logprob == pytest.approx(float(want[token.token_id]), abs=1e-5)
            best = want.topk(4)
            assert [i for i, _ in token.top] == best.indices.tolist()
            assert [v for _, v in token.top] == pytest.approx(best.values.tolist(), abs=1e-5)
            ids.append(token.token_id)
        assert len(ids) == len(request.prompt_ids) + 9


def test_a_drawn_seed_is_told_and_repeats_the_text():
    engine, _ = make()
    engine.submit(Request("a", (1, 2), SamplingParams(max_tokens=20)))
    first = drain(engine)["a"]
    seed = done(first).seed
    engine.submit(Request("b", (1, 2), SamplingParams(max_tokens=20, seed=seed)))
    engine.submit(Request("c", (1, 2), SamplingParams(max_tokens=20, seed=seed + 1)))
    events = drain(engine)
    assert text(events["b"]) == text(first)
    assert done(events["b"]).seed == seed
    assert text(events["c"]) != text(first)


def test_timings_count_from_the_first_wave_and_from_the_first_token():
    """The clock ticks once when a wave begins and once when it has ended: a wave takes 1 s, and 1 s lies between."""
    ticks = itertools.count()
    model = HashModel(**SIZES)
    engine = Engine(model.run_wave, **SIZES, clock=lambda: float(next(ticks)))
    engine.submit(Request("a", prompt(1, 30), SamplingParams(temperature=0, max_tokens=4)))
    t = done(drain(engine)["a"]).timings
    assert (t.cache_n, t.prompt_n, t.predicted_n) == (0, 30, 4)
    assert (t.prompt_ms, t.predicted_ms) == (5000.0, 6000.0)
    assert t.predicted_per_second == 0.5


def test_slots_tell_what_they_do():
    engine, _ = make()
    for name in "abc":
        engine.submit(Request(name, prompt(1, 9), SamplingParams(temperature=0, max_tokens=3)))
    engine.step()
    a, b = engine.slots
    assert (a.slot, a.is_busy, a.request_id, a.n_prompt, a.n_done, a.n_generated) == (0, True, "a", 9, 9, 1)
    assert (b.slot, b.request_id, b.n_done, b.n_generated) == (1, "b", 0, 0)
    assert engine.n_waiting == 1
    drain(engine)
    assert [(s.is_busy, s.request_id, s.n_done, s.n_generated) for s in engine.slots] == [
        (False, "c", 9, 3),
        (False, "b", 9, 3),
    ]
