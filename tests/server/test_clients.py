"""Many clients, clients that leave, servers that load, end or fail."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from overspill.errors import UserError
from overspill.llm import LLM
from overspill.server.run import listen
from overspill.server.settings import ServerSettings
from tests.server.served import (
    GREEDY,
    MANY,
    MODEL,
    PATIENCE_S,
    Served,
    event_data,
    held,
    open_model,
    serving,
    strict,
    wait_until,
)

LONG: dict[str, Any] = {"n_predict": -1, "temperature": 0, "ignore_eos": True, "stream": True}
PROMPTS = ["import os", "The licence", "class A:", "for i in", "return", "x = 5"]


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


def n_cancelled(served: Served) -> float:
    return served.metric("overspill:requests_cancelled_total")


def test_a_reader_leaves(served: Served) -> None:
    n_before, n_predicted = n_cancelled(served), served.metric("llamacpp:tokens_predicted_total")
    with held(served) as waves:
        with served.client.stream("POST", "/completion", json={"prompt": "a", **LONG}) as response:
            waves.release(5)
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            assert [event_data(next(lines))["stop"] for _ in range(3)] == [False] * 3
        wait_until(lambda: len(served.llm._engine._cancelled) == 1 or served.n_busy() == 0)
        waves.release(MANY)
        wait_until(lambda: n_cancelled(served) == n_before + 1)
    assert served.n_busy() == 0
    assert served.metric("llamacpp:tokens_predicted_total") - n_predicted < 10, "it went on for nobody"


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_leaves_while_its_prompt_is_computed(served: Served, is_stream: bool) -> None:
    expected = served.ask("/completion", prompt="a", **GREEDY)["content"]
    n_before, n_computed = n_cancelled(served), served.metric("llamacpp:prompt_tokens_total")
    with held(served) as waves:
        with served.asking("/completion", prompt=[8] * 250, **{**LONG, "stream": is_stream}):
            wait_until(lambda: served.n_busy() == 1)
        wait_until(lambda: served.llm._engine.is_wave_abandoned)
        waves.release(MANY)
        wait_until(lambda: n_cancelled(served) == n_before + 1)
    assert served.n_busy() == 0
    assert served.metric("llamacpp:prompt_tokens_total") == n_computed, "it went on for nobody"
    assert served.ask("/completion", prompt="a", **GREEDY)["content"] == expected


def test_a_client_leaves_the_queue(served: Served) -> None:
    n_before, ask = n_cancelled(served), {**LONG, "n_predict": 40}
    with held(served) as waves, ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(served.events, "/completion", prompt=p, **ask) for p in ("a", "b")]
        wait_until(lambda: served.n_busy() + served.llm._engine._inbox.qsize() == 2)
        waves.release()
        wait_until(lambda: served.n_busy() == 2)
        with served.asking("/completion", prompt="c", **{**LONG, "stream": False}):
            wait_until(lambda: served.llm._engine._inbox.qsize() == 1)
            waves.release()
            wait_until(lambda: served.llm.status.n_waiting == 1)
        wait_until(lambda: len(served.llm._engine._cancelled) == 1)
        waves.release()
        wait_until(lambda: n_cancelled(served) == n_before + 1)
        assert (served.n_busy(), served.llm.status.n_waiting) == (2, 0), "the others go on"
        waves.release(MANY)
        assert [future.result()[-1]["tokens_predicted"] for future in busy] == [40, 40]


def test_headers_and_comments_come_before_the_first_token(served: Served) -> None:
    ask = {"prompt": "a", **LONG, "n_predict": 1}
    with held(served) as waves, served.client.stream("POST", "/completion", json=ask) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        assert [next(lines), next(lines)] == [":", ":"]
        waves.release(MANY)
        assert any(line.startswith("data: ") for line in lines)


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
    """It is seen at the next split."""
    runner, issued, may_go = served.llm.runner, [], threading.Event()
    issue = runner._issue

    def slow(action: Any, *rest: Any) -> None:
        issued.append(action.verb)
        assert may_go.wait(60)
        issue(action, *rest)

    want = served.ask("/completion", prompt="word " * 60, **GREEDY)["content"]
    monkeypatch.setattr(runner, "_issue", slow)
    with served.asking("/completion", prompt="other " * 60, **GREEDY):
        wait_until(lambda: len(issued) == 1)
    wait_until(lambda: served.llm._engine.is_wave_abandoned)
    may_go.set()
    served.wait_until_idle()
    monkeypatch.undo()
    assert 0 < len(issued) <= 4
    assert served.ask("/completion", prompt="word " * 60, cache_prompt=False, **GREEDY)["content"] == want
    assert served.client.get("/health").status_code == 200


# --- beginning and end


def test_loading() -> None:
    """503 everywhere until the model is there; then all is well."""
    may_load = threading.Event()

    def slow(progress: Any) -> LLM:
        assert may_load.wait(PATIENCE_S)
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
    served.ask("/tokenize", content="Hello")
    sockets = [c.transport.get_extra_info("socket") for c in served.server.server_state.connections]
    assert sockets
    assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in sockets)


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
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                wait_until(lambda: client.get("/health").status_code == 200)
                with client.stream("POST", "/completion", json={"prompt": "a", **LONG}) as response:
                    lines = (line for line in response.iter_lines() if line.startswith("data: "))
                    next(lines)
                    process.send_signal(signal.SIGTERM)
                    rest = [strict(line.removeprefix("data: ")) for line in lines]
            assert rest[-1]["error"]["type"] == "unavailable_error"
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()
