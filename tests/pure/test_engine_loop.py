"""The engine in its thread: every stream ends, leaving early cancels, closing leaves nothing behind."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from overspill.engine.engine import Engine
from overspill.engine.loop import EngineLoop, EngineStopped
from overspill.engine.params import SamplingParams
from overspill.engine.request import DoneEvent, ProgressEvent, Request, TokenEvent
from overspill.errors import UserError
from tests.helpers.hash_model import HashModel

SIZES = {"n_vocab": 50, "n_ctx_slot": 64, "n_slots": 2, "n_ubatch": 4, "n_wave": 12}
GREEDY = SamplingParams(temperature=0)
WAIT_S = 20


class Gate:
    """Lets `n` waves pass, then holds the next until more are let pass."""

    def __init__(self, model: HashModel) -> None:
        self._model = model
        self._permits = threading.Semaphore(0)
        self.is_held = threading.Event()

    def let(self, n: int) -> None:
        self._permits.release(n)

    def run_wave(self, wave):
        if not self._permits.acquire(blocking=False):
            self.is_held.set()
            assert self._permits.acquire(timeout=WAIT_S)
            self.is_held.clear()
        return self._model.run_wave(wave)


@pytest.fixture
def model():
    return HashModel(**SIZES)


@pytest.fixture
def gate(model):
    return Gate(model)


@pytest.fixture
def gated(gate):
    with EngineLoop(Engine(gate.run_wave, **SIZES)) as loop:
        yield loop
        gate.let(10_000)


@pytest.fixture
def loop(model):
    with EngineLoop(Engine(model.run_wave, **SIZES)) as loop:
        yield loop


def request(name: str, n_prompt: int = 5, max_tokens: int = -1) -> Request:
    return Request(name, tuple(range(n_prompt)), SamplingParams(temperature=0, max_tokens=max_tokens))


def text(events) -> list[int]:
    return [e.token_id for e in events if isinstance(e, TokenEvent)]


def test_streams_from_many_threads_give_what_one_alone_gives(loop):
    def run(i: int) -> list[int]:
        return text(loop.stream(request(f"r{i}", n_prompt=1 + i % 7)))

    alone = [run(i) for i in range(7)]
    assert all(len(ids) == 64 - 1 - i for i, ids in enumerate(alone))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, range(7, 35))) == alone * 4


def test_a_refused_request_raises_at_once_and_harms_nobody(loop):
    stream = loop.stream(request("a"))
    with pytest.raises(UserError, match="it is empty"):
        loop.stream(Request("b", ()))
    assert len(text(stream)) == 59


def test_an_id_in_use_is_refused_and_the_first_stream_goes_on(gated, gate):
    stream = gated.stream(request("a", max_tokens=3))
    with pytest.raises(UserError, match="in use"):
        gated.stream(request("a"))
    gate.let(10)
    assert len(text(stream)) == 3


def leave_by_close(stream) -> None:
    assert isinstance(next(e for e in stream if isinstance(e, TokenEvent)), TokenEvent)
    stream.close()
    stream.close()
    assert list(stream) == []


def leave_by_with(stream) -> None:
    with stream:
        next(stream)


def leave_by_forgetting(stream) -> None:
    """The caller holds the only other reference and lets go of it."""


@pytest.mark.parametrize("leave", [leave_by_close, leave_by_with, leave_by_forgetting])
def test_leaving_a_stream_cancels_its_request(gated, gate, model, leave):
    streams = [gated.stream(request("a"))]
    gate.let(3)
    assert gate.is_held.wait(WAIT_S)
    leave(streams.pop())
    after = gated.stream(request("b", n_prompt=2, max_tokens=1))
    gate.let(10_000)
    assert list(after)[-1].reason == "length"
    assert len(model.waves) == 5, "three and the one that was held for a, one for b"


def test_cancel_by_id_ends_the_stream_after_the_wave_in_flight(gated, gate):
    stream = gated.stream(request("a"))
    gate.let(3)
    assert gate.is_held.wait(WAIT_S)
    gated.cancel("a")
    gate.let(1)
    events = list(stream)
    assert (events[-1].reason, len(text(events))) == ("cancelled", 4)
    assert stream.is_over


def test_polling_returns_none_while_nothing_comes(gated, gate):
    stream = gated.stream(request("a", max_tokens=1))
    assert stream.poll(0.01) is None
    assert not stream.is_over
    gate.let(1)
    assert [type(stream.poll(WAIT_S)) for _ in range(3)] == [ProgressEvent, TokenEvent, DoneEvent]
    assert stream.is_over
    assert stream.poll() is None


def test_close_cancels_what_is_in_flight_and_takes_nothing_more(gate):
    loop = EngineLoop(Engine(gate.run_wave, **SIZES))
    streams = [loop.stream(request(name)) for name in "abc"]
    gate.let(2)
    assert gate.is_held.wait(WAIT_S)
    closing = threading.Thread(target=loop.close)
    closing.start()
    gate.let(1)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [list(s)[-1].reason for s in streams] == ["cancelled"] * 3
    with pytest.raises(EngineStopped, match="shut down"):
        loop.stream(request("d"))
    loop.close()


def test_drain_finishes_what_is_in_flight(model):
    loop = EngineLoop(Engine(model.run_wave, **SIZES))
    streams = [loop.stream(request(name)) for name in "abc"]
    loop.drain()
    assert [list(s)[-1].reason for s in streams] == ["length"] * 3
    with pytest.raises(EngineStopped, match="shutting down"):
        loop.stream(request("d"))


def test_an_idle_loop_closes_and_its_thread_ends(model):
    n_before = threading.active_count()
    loop = EngineLoop(Engine(model.run_wave, **SIZES))
    assert threading.active_count() == n_before + 1
    loop.close()
    assert threading.active_count() == n_before


def test_a_device_error_ends_the_stream_and_the_next_request_is_served(caplog):
    def fault(history, logits_V):
        if history == [7]:
            raise RuntimeError("lost")

    model = HashModel(**SIZES, fault=fault)
    with EngineLoop(Engine(model.run_wave, **SIZES)) as loop:
        (end,) = loop.stream(Request("a", (7,), GREEDY))
        assert (end.reason, end.message) == ("error", "the device failed: RuntimeError: lost")
        assert len(text(loop.stream(request("b")))) == 59


def test_a_broken_engine_ends_every_stream_and_says_so(model, gate, caplog):
    engine = Engine(lambda wave: [t[:0] for t in gate.run_wave(wave)], **SIZES)
    loop = EngineLoop(engine)
    streams = [loop.stream(request(name, n_prompt=3)) for name in "abc"]
    gate.let(1)
    for stream in streams:
        (end,) = stream
        assert end.reason == "error"
        assert end.message.startswith("the engine broke: ValueError")
        assert "\n" not in end.message
    with pytest.raises(EngineStopped, match="the engine broke"):
        loop.stream(request("d"))
    loop.close()
