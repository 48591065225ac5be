"""Serving a tiny model from a thread, and asking it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from overspill.llm import LLM
from overspill.server.app import create_app
from overspill.server.host import Host
from overspill.server.run import Server, listen
from overspill.server.settings import ServerSettings
from overspill.text.chat import ChatTemplate
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
N_CTX = 256
PATIENCE_S = 300.0  # only a failure takes so long; on a busy machine a token of the tiny model may take a second
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


@dataclass(frozen=True)
class Served:
    """A server that runs. client: of its own, with time-outs that fail a test."""

    url: str
    host: Host
    client: httpx.Client
    server: Server

    @property
    def llm(self) -> LLM:
        """The model, another one after a device failed."""
        return self.host.llm

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, content=json.dumps(body))

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a request that must succeed."""
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        return strict(response.text)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of a stream, `[DONE]` as a text."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [event_data(line) for line in response.iter_lines() if line.startswith("data: ")]

    @contextmanager
    def asking(self, path: str, **body: Any) -> Iterator[None]:
        """A request that nobody reads the answer of; at the end of the block, the client hangs up."""
        data, (host, port) = json.dumps(body).encode(), self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
            yield

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))

    def n_busy(self) -> int:
        return sum(slot["is_processing"] for slot in self.client.get("/slots").json())

    def wait_until_idle(self) -> None:
        wait_until(lambda: self.n_busy() == 0 and self.llm.status.n_waiting == 0)


MANY = 10_000


@contextmanager
def held(served: Served) -> Iterator[threading.Semaphore]:
    """Each wave waits until the test releases one; in the end all go on."""
    engine, waves = served.llm._engine, threading.Semaphore(0)
    run_wave = engine._run_wave

    def run(wave: Any) -> Any:
        assert waves.acquire(timeout=PATIENCE_S)
        return run_wave(wave)

    engine._run_wave = run
    try:
        yield waves
    finally:
        engine._run_wave = run_wave
        waves.release(MANY)


def strict(text: str) -> Any:
    """JSON without NaN and infinities."""
    return json.loads(text, parse_constant=lambda name: pytest_fail(f"{name} is no JSON"))


def pytest_fail(message: str) -> Any:
    raise AssertionError(message)


def event_data(line: str) -> Any:
    data = line.removeprefix("data: ")
    return data if data == "[DONE]" else strict(data)


def wait_until(is_so: Callable[[], bool], *, found: Callable[[], Any] = lambda: "") -> None:
    """found: what to say when it does not happen."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"it did not happen in time {found()}"
        time.sleep(0.01)


def open_model(_: Any = None) -> LLM:
    """Prompts are computed in the same pieces each time, so that equal requests get equal answers, bit for bit."""
    sizes = {"n_ctx": 2 * N_CTX, "n_parallel": 2, "n_ubatch": 16, "n_wave": 32}
    return LLM(MODEL, devices="cpu", threads=1, prefix_reuse="whole-ubatches", **sizes)


@contextmanager
def serving(
    settings: ServerSettings | None = None, *, open_llm: Callable[[Any], LLM] = open_model, is_awaited: bool = True
) -> Iterator[Served]:
    """A server of this process. is_awaited: until its model is loaded."""
    settings = settings or ServerSettings(port=0, name="tiny", ping_s=0.2)
    with LLM(MODEL, devices="cpu", n_ctx=64) as llm:
        template = ChatTemplate.from_keys(llm.source.keys)
    host = Host(open_llm, name=settings.name, template=template)
    listener = listen(settings)
    config = uvicorn.Config(
        create_app(host, settings), log_level="warning", ws="none", lifespan="off", server_header=False
    )
    server = Server(config, host)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    host.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            if is_awaited:
                wait_until(lambda: client.get("/health").status_code == 200)
            yield Served(url, host, client, server)
    finally:
        server.end()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
