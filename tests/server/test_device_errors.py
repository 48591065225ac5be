"""A device fails: its requests end with an error, /health says so, and the model is loaded anew or the server ends.

Faults are injected into virtual devices, whose errors are as sticky as a GPU's: no later work of that stream succeeds.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from overspill.device.virtual import VirtualBackend
from overspill.llm import LLM
from overspill.server.host import DeviceLost
from tests.server.served import GREEDY, MODEL, PATIENCE_S, Served, serving, wait_until

USER = {"role": "user", "content": "a"}


class Flaky:
    """Opens models on two virtual devices, the second of which can be told to fail."""

    def __init__(self) -> None:
        self.may_load = threading.Event()
        self.may_load.set()
        self.n_opened = 0
        self.is_broken = False
        self._opened: list[LLM] = []

    def __call__(self, _: Any = None) -> LLM:
        assert self.may_load.wait(PATIENCE_S)
        self.n_opened += 1
        llm = LLM(MODEL, devices="virtual:2", threads=1, n_ctx=512, n_parallel=2, n_ubatch=16, n_wave=32)
        self._opened.append(llm)
        if self.is_broken:
            self.break_device()
        return llm

    def break_device(self, after: int = 0) -> None:
        """From its n-th piece of work on."""
        n_left = [after]

        def fail(lane: Any, label: str) -> None:
            n_left[0] -= 1
            if n_left[0] < 0:
                raise RuntimeError("an illegal memory access was encountered")

        device = self._opened[-1].devices.accelerators[1]
        assert isinstance(device, VirtualBackend)
        device.before = fail


@contextmanager
def flaky_server() -> Iterator[tuple[Served, Flaky, str]]:
    """A server, what breaks it, and what it says to "a"."""
    flaky = Flaky()
    with serving(open_llm=flaky) as served:
        yield served, flaky, served.ask("/completion", prompt="a", **GREEDY)["content"]


def is_healthy(served: Served) -> bool:
    return served.client.get("/health").status_code == 200


def test_the_request_fails_and_the_model_is_loaded_anew() -> None:
    with flaky_server() as (served, flaky, text):
        flaky.may_load.clear()
        flaky.break_device()
        response = served.post("/completion", prompt="a", **GREEDY)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        assert "an illegal memory access" in response.json()["error"]["message"]
        for path in ("/health", "/v1/models", "/metrics"):
            told = served.client.get(path)
            assert told.status_code == 503
            assert told.json()["error"]["type"] == "unavailable_error"
            assert "Loading the model anew, because the device failed" in told.json()["error"]["message"]
        assert served.post("/completion", prompt="a", **GREEDY).status_code == 503
        flaky.may_load.set()
        wait_until(lambda: is_healthy(served))
        assert served.ask("/completion", prompt="a", **GREEDY)["content"] == text
        assert served.metric("overspill:restarts_total") == 1
        assert served.metric("overspill:requests_failed_total") == 1
        assert flaky.n_opened == 2


def test_a_stream_ends_with_the_error_and_without_done() -> None:
    with flaky_server() as (served, flaky, _):
        flaky.break_device(after=40)
        events = served.events("/v1/chat/completions", messages=[USER], temperature=0, max_tokens=200)
        assert list(events[-1]) == ["error"]
        assert len(events) > 1
        wait_until(lambda: is_healthy(served))


@pytest.mark.parametrize("after", [0, 25, 100])
def test_nobody_gets_an_answer_of_a_broken_device(after: int) -> None:
    """Many clients, two slots: each is told the truth, or an error; and later all of them the truth."""
    with flaky_server() as (served, flaky, _):
        prompts = [f"client {i} says" for i in range(12)]
        true = [served.ask("/completion", prompt=p, cache_prompt=False, **GREEDY)["content"] for p in prompts]
        flaky.break_device(after)
        with ThreadPoolExecutor(12) as pool:

            def ask(prompt: str) -> httpx.Response:
                return served.post("/completion", prompt=prompt, cache_prompt=False, **GREEDY)

            answers = list(pool.map(ask, prompts))
        assert {answer.status_code for answer in answers} <= {200, 500, 503}
        assert any(answer.status_code == 500 for answer in answers)
        for answer, text in zip(answers, true, strict=True):
            assert answer.status_code != 200 or answer.json()["content"] == text
        wait_until(lambda: is_healthy(served))
        assert [served.ask("/completion", prompt=p, cache_prompt=False, **GREEDY)["content"] for p in prompts] == true


def failing(make_broken: Callable[[Flaky], None]) -> Exception | None:
    """Why a server failed whose device breaks now, and then what happens to its next model."""
    with flaky_server() as (served, flaky, _):
        make_broken(flaky)
        flaky.break_device()
        assert served.post("/completion", prompt="a", **GREEDY).status_code == 500

        def again() -> bool:
            if served.host.failure is None:
                assert served.post("/completion", prompt="a", **GREEDY).status_code in (500, 503)
            return served.host.failure is not None

        wait_until(again)
        assert served.client.get("/health").status_code == 503
        return served.host.failure


def test_a_device_that_fails_again_at_once_is_lost() -> None:
    def stay_broken(flaky: Flaky) -> None:
        flaky.is_broken = True

    failure = failing(stay_broken)
    assert isinstance(failure, DeviceLost)
    assert "illegal memory access" in str(failure)
    assert "before anything was served" in str(failure)


def test_a_model_that_cannot_be_loaded_anew_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Flaky, _: Any = None) -> LLM:
        raise RuntimeError("no device any more")

    def cannot_load(flaky: Flaky) -> None:
        monkeypatch.setattr(Flaky, "__call__", refuse)

    failure = failing(cannot_load)
    assert isinstance(failure, DeviceLost)
    assert "cannot be loaded anew: no device any more" in str(failure)


PROGRAM = f"""
import threading, urllib.request, urllib.error, sys
from overspill.llm import LLM
from overspill.server.host import Host
from overspill.server.run import run_server
from overspill.server.settings import ServerSettings
from overspill.text.chat import ChatTemplate

def open_model(_):
    llm = LLM({str(MODEL)!r}, devices="virtual:1", threads=1, n_ctx=64)
    def fail(lane, label): raise RuntimeError("it is gone")
    llm.devices.accelerators[0].before = fail
    return llm

with LLM({str(MODEL)!r}, devices="cpu", n_ctx=64) as llm:
    template = ChatTemplate.from_keys(llm.source.keys)
run_server(Host(open_model, name="tiny", template=template), ServerSettings(port=0))
"""


def test_the_process_ends_with_1_and_one_line() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().rsplit(" ", 1)[1].strip()
            with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
                wait_until(lambda: client.get("/health").status_code == 200)
                assert client.post("/completion", json={"prompt": "a"}).status_code == 500
            assert process.wait(PATIENCE_S) == 1
            last = process.stderr.read().splitlines()[-1]
            assert last.startswith("overspill: the device failed: RuntimeError: it is gone, before anything was served")
        finally:
            process.kill()
