"""Many clients, clients that leave, servers that load, end or fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from overspill.errors import UserError
from overspill.llm import LLM
from overspill.server.run import listen
from overspill.server.settings import ServerSettings
from tests.server.served import GREEDY, MODEL, Served, event_data, open_model, serving, strict, wait_until

LONG: dict[str, Any] = {"n_predict": -1, "temperature": 0, "ignore_eos": True, "stream": True}
PROMPTS = ["import os", "The licence", "class A:", "for i in", "return", "x = 5"]


@contextmanager
def slowed(served: Served, wave_s: float) -> Iterator[None]:
    """Every wave takes wave_s longer."""
    engine = served.llm._engine
    run_wave = engine._run_wave

    def slow(wave: Any) -> Any:
        time.sleep(wave_s)
        return run_wave(wave)

    engine._run_wave = slow
    try:
        yield
    finally:
        engine._run_wave = run_wave


def test_concurrent_clients_get_what_single_ones_get(served: Served) -> None:
    def ask(prompt: str) -> str:
        return str(served.ask("/completion", prompt=prompt, **GREEDY)["content"])

    single = [ask(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, PROMPTS * 4))
    assert together == single * 4
    assert len(set(single)) == len(PROMPTS)


def test_many_answers_of_one_request(served: Served) -> None:
    """More prompts than slots; a stream interleaves them by index."""
    single = [served.ask("/completion", prompt=prompt, **GREEDY)["content"] for prompt in PROMPTS]
    whole = served.ask("/completion", prompt=PROMPTS, **GREEDY)
    assert [answer["content"] for answer in whole] == single
    events = served.events("/completion", prompt=PROMPTS, **GREEDY)
    texts = ["".join(e["content"] for e in events if e["index"] == i) for i in range(len(PROMPTS))]
    assert texts == single
    assert sum(e["stop"] for e in events) == len(PROMPTS)


# --- clients that leave


def test_a_reader_leaves(served: Served) -> None:
    n_before = served.metric("overspill:requests_cancelled_total")
    n_predicted = served.metric("llamacpp:tokens_predicted_total")
    with slowed(served, 0.02):
        with served.client.stream("POST", "/completion", json={"prompt": "a", **LONG}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert [event_data(next(lines))["stop"] for _ in range(3)] == [False] * 3
        wait_until(lambda: served.n_busy() == 0, 2.0)
    assert served.metric("overspill:requests_cancelled_total") == n_before + 1
    assert served.metric("llamacpp:tokens_predicted_total") - n_predicted < 150, "it went on for nobody"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_leaves_while_its_prompt_is_computed(served: Served, is_stream: bool) -> None:
    expected = served.ask("/completion", prompt="a", **GREEDY)["content"]
    n_before = served.metric("overspill:requests_cancelled_total")
    with slowed(served, 0.3):
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/completion", json={"prompt": [8] * 250, **LONG, "stream": is_stream}, timeout=0.15)
        assert served.n_busy() == 1
        wait_until(lambda: served.n_busy() == 0, 2.0)
    assert served.metric("overspill:requests_cancelled_total") == n_before + 1
    assert served.ask("/completion", prompt="a", **GREEDY)["content"] == expected


def test_a_client_leaves_the_queue(served: Served) -> None:
    with slowed(served, 0.05), ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(served.events, "/completion", prompt=p, **{**LONG, "n_predict": 40}) for p in ("a", "b")]
        wait_until(lambda: served.n_busy() == 2)
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/completion", json={"prompt": "c", **LONG, "stream": False}, timeout=0.2)
        wait_until(lambda: served.llm.status.n_waiting == 0, 1.0)
        assert served.n_busy() == 2, "the others go on"
        assert [len(future.result()[-1]["timings"]) > 0 for future in busy] == [True, True]


def test_headers_and_comments_come_before_the_first_token(served: Served) -> None:
    """Waves of 0.7 s, comments after 0.2 s of silence."""
    with slowed(served, 0.7):
        began_s = time.monotonic()
        with served.client.stream("POST", "/completion", json={"prompt": "a", **LONG, "n_predict": 1}) as response:
            assert response.status_code == 200
            assert time.monotonic() - began_s < 0.6
            lines = list(response.iter_lines())
    first_data = next(i for i, line in enumerate(lines) if line.startswith("data"))
    assert [line for line in lines[:first_data] if line][:2] == [":", ":"]


# --- faults


def test_logits_that_are_no_numbers_never_become_text(served: Served) -> None:
    """The request fails, alone, and /health says so until another one was served."""
    engine = served.llm._engine
    run_wave = engine._run_wave
    engine._run_wave = lambda wave: [logits * float("nan") for logits in run_wave(wave)]
    try:
        response = served.post("/completion", prompt="a", **GREEDY)
        assert response.status_code == 500
        assert "NaN" in response.json()["error"]["message"]
        assert "NaN" in served.client.get("/health").text
        events = served.events("/completion", prompt="a", **GREEDY)
        assert [list(event) for event in events] == [["error"]]
    finally:
        engine._run_wave = run_wave
    served.ask("/completion", prompt="a", **GREEDY)
    assert served.client.get("/health").status_code == 200


def test_a_client_that_leaves_in_a_long_wave_stops_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave whose splits take 0.2 s each, 2 layers: without giving up it would take longer than it may."""
    runner, issued = served.llm.runner, []
    issue = runner._issue

    def slow(action: Any, *rest: Any) -> None:
        issued.append(action.verb)
        time.sleep(0.2)
        issue(action, *rest)

    want = served.ask("/completion", prompt="word " * 60, **GREEDY)["content"]
    monkeypatch.setattr(runner, "_issue", slow)
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/completion", json={"prompt": "other " * 60, **GREEDY}, timeout=0.3)
    served.wait_until_idle(2.0)
    monkeypatch.undo()
    assert 0 < len(issued) <= 8
    assert served.ask("/completion", prompt="word " * 60, cache_prompt=False, **GREEDY)["content"] == want
    assert served.client.get("/health").status_code == 200


# --- beginning and end


def test_loading() -> None:
    """503 everywhere until the model is there; then all is well."""
    may_load = threading.Event()

    def slow(progress: Any) -> LLM:
        assert may_load.wait(30)
        return open_model()

    with serving(open_llm=slow, is_awaited=False) as served:
        for path in ("/health", "/v1/models", "/slots"):
            response = served.client.get(path)
            assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
            assert response.json()["error"]["message"] == "Loading model"
        assert served.post("/completion", prompt="a").status_code == 503
        may_load.set()
        wait_until(lambda: served.client.get("/health").status_code == 200)
        assert served.ask("/completion", prompt="a", **GREEDY)["tokens_predicted"] == 24


def test_keys_prefix_and_origins() -> None:
    settings = ServerSettings(port=0, name="tiny", api_keys=frozenset({"k1", "k2"}), api_prefix="/llm")
    with serving(settings, open_llm=lambda _: open_model(), is_awaited=False) as served:
        wait_until(lambda: served.client.get("/llm/health").status_code == 200)
        for headers in ({}, {"Authorization": "Bearer k"}, {"X-Api-Key": "K1"}, {"Authorization": "Bearer \xe9"}):
            response = served.client.get("/llm/v1/models", headers={k: v.encode("latin-1") for k, v in headers.items()})
            assert response.status_code == 401
            assert response.json()["error"] == {
                "code": 401,
                "message": "Invalid API Key",
                "type": "authentication_error",
            }
        for headers in ({"Authorization": "Bearer k1"}, {"X-Api-Key": "k2"}):
            assert served.client.get("/llm/v1/models", headers=headers).status_code == 200
        origin = {"Origin": "http://page.example"}
        preflight = served.client.options("/llm/completion", headers=origin)
        assert (preflight.status_code, preflight.content) == (200, b"")
        assert preflight.headers["access-control-allow-origin"] == "http://page.example"
        refused = served.client.get("/llm/slots", headers=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://page.example")
        assert "access-control-allow-origin" not in served.client.get("/llm/health").headers


def test_small_answers_are_sent_at_once(served: Served) -> None:
    """With Nagle's algorithm on, each one waits for a delayed acknowledgement: 40 ms, whatever the machine."""
    took_s = []
    for _ in range(30):
        start_s = time.perf_counter()
        served.ask("/tokenize", content="Hello")
        took_s.append(time.perf_counter() - start_s)
    assert sorted(took_s)[10] < 0.03


def test_an_address_in_use_is_bad_input() -> None:
    with listen(ServerSettings(port=0)) as taken, pytest.raises(UserError, match=r"--port .*in use"):
        listen(ServerSettings(port=taken.getsockname()[1]))


@pytest.mark.slow
def test_sigterm_in_mid_generation() -> None:
    """The command: it listens, streams, is told to end, tells its client, and exits with 0."""
    command = [
        sys.executable,
        "-m",
        "overspill.cli",
        "serve",
        "-m",
        str(MODEL),
        "--port",
        "0",
        "-dev",
        "cpu",
        "-t",
        "1",
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().rsplit(" ", 1)[1].strip()
            with httpx.Client(base_url=url, timeout=60) as client:
                wait_until(lambda: client.get("/health").status_code == 200, 60)
                with client.stream("POST", "/completion", json={"prompt": "a", **LONG}) as response:
                    lines = (line for line in response.iter_lines() if line.startswith("data: "))
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    rest = [strict(line.removeprefix("data: ")) for line in lines]
            assert rest[-1]["error"]["type"] == "unavailable_error"
            assert process.wait(20) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
