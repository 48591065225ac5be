"""The server on GPUs: the texts of the library, alone and together, over one GPU and over two with experts in host RAM;
nothing stays behind; and the end of a process whose GPU refuses to go on.

In bfloat16 a sequence's bits depend on how many others are in its steps, so texts of requests that are served together
are compared in float32, where no choice of the fixture is close enough to tip over.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="the server's packages are not installed")

from overspill import LLM, SamplingParams
from overspill.pipeline.choose import Plan
from tests.gpu.test_models_gpu import in_float32
from tests.server.served import GREEDY, MODEL, Served, event_data, serving, wait_until

PLACES: list[dict[str, Any]] = [{"devices": "cuda:0"}]
if torch.cuda.device_count() > 1:
    PLACES.append({"devices": "cuda:0,cuda:1", "cpu_moe": True})
SIZES: dict[str, Any] = {"n_ctx": 4 * 256, "n_parallel": 4, "n_ubatch": 16, "n_wave": 64}
PROMPTS = [f"{subject} says that the licence" for subject in ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald")]
CALM = {"llamacpp:requests_processing": 0.0, "llamacpp:requests_deferred": 0.0}


@contextmanager
def server_on(place: dict[str, Any]) -> Iterator[Served]:
    def open_llm(_: Any) -> LLM:
        return LLM(MODEL, prefix_reuse="whole-ubatches", **SIZES, **place)

    with serving(open_llm=open_llm) as served:
        yield served
        served.wait_until_idle()
        assert {name: served.metric(name) for name in CALM} == CALM
        assert [slot["is_processing"] for slot in served.client.get("/slots").json()] == [False] * 4


def in_words(served: Served, prompt: str | Sequence[int]) -> str:
    return served.llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)).text


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], **GREEDY}


def ask_in_every_way(served: Served, prompt: str, i: int) -> str:
    """The text of one of the four: two endpoints, as a stream or whole."""
    is_chat, is_stream = i % 2 == 1, i // 2 % 2 == 1
    path, body = ("/v1/chat/completions", chat(prompt)) if is_chat else ("/completion", {"prompt": prompt, **GREEDY})
    if is_stream:
        events = [e for e in served.events(path, **body) if e != "[DONE]"]
        if is_chat:
            return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
        return "".join(e["content"] for e in events)
    answer = served.ask(path, **body)
    return str(answer["choices"][0]["message"]["content"] if is_chat else answer["content"])


def wanted(served: Served, prompt: str, i: int) -> str:
    """What the library says to the same."""
    if i % 2 == 1:
        prompt = served.ask("/apply-template", messages=chat(prompt)["messages"])["prompt"]
        return in_words(served, served.ask("/tokenize", content=prompt, add_special=False)["tokens"])
    return in_words(served, prompt)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["devices"])
def test_one_after_the_other_in_bfloat16(place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's texts; and a prompt that begins like the one before is not computed again. A rest of few tokens
    would be computed as a step, by other kernels than a prompt's last ubatch."""
    monkeypatch.setattr(Plan, "step_rows", lambda *_: 0)
    with server_on(place) as served:
        for i, prompt in enumerate(PROMPTS[:4]):
            assert ask_in_every_way(served, prompt, i) == wanted(served, prompt, i)
        ids = [(37 * i + 5) % 480 for i in range(60)]
        first, again, longer = (
            served.ask("/completion", prompt=p, return_tokens=True, **GREEDY) for p in (ids, ids, [*ids, 7, 8, 9])
        )
        assert again["tokens"] == first["tokens"]
        assert [answer["timings"]["cache_n"] for answer in (first, again, longer)] == [0, 48, 48]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["devices"])
def test_together_in_float32(place: dict[str, Any]) -> None:
    """Twelve clients, four slots: texts as if each were alone; one who leaves frees its slot."""
    with in_float32(), server_on(place) as served:
        jobs = [(prompt, i) for i, prompt in enumerate(PROMPTS * 2)]
        texts = [wanted(served, *job) for job in jobs]
        with ThreadPoolExecutor(len(jobs) + 1) as pool:
            running = [pool.submit(ask_in_every_way, served, *job) for job in jobs]
            body = {"prompt": "a", "stream": True, "n_predict": 200, "ignore_eos": True}
            with served.client.stream("POST", "/completion", json=body) as response:
                next(line for line in response.iter_lines() if line.startswith("data: "))
            assert [future.result() for future in running] == texts
        wait_until(lambda: served.metric("overspill:requests_cancelled_total") == 1)


# --- processes

PLAIN = "from overspill.cli import main; main()"


@contextmanager
def running(program: str, place: dict[str, Any]) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`overspill serve` in a process of its own, by a program that does what the command does, and its client."""
    sizes = ("-c", "1024", "-np", "4", "--ubatch-size", "16", "-b", "64", "--port", "0")
    where = ("--devices", place["devices"], *(["--cpu-moe"] if "cpu_moe" in place else []))
    command = [sys.executable, "-c", program, "serve", "-m", str(MODEL), *sizes, *where]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            assert process.stderr is not None
            lines = iter(process.stderr.readline, "")
            url = next(line for line in lines if "listening on" in line).rsplit(" ", 1)[1].strip()
            with httpx.Client(base_url=url, timeout=120) as client:
                wait_until(lambda: client.get("/health").status_code == 200)
                yield process, client
        finally:
            process.kill()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["devices"])
def test_sigterm_in_mid_generation_ends_with_0(place: dict[str, Any]) -> None:
    with running(PLAIN, place) as (process, client):
        answer = client.post("/completion", json={"prompt": PROMPTS[0], **GREEDY}).json()
        assert answer["timings"]["predicted_n"] == 24
        body = {"prompt": "a", "stream": True, "n_predict": 200, "ignore_eos": True}
        with client.stream("POST", "/completion", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            process.send_signal(signal.SIGTERM)
            list(lines)
        assert process.wait(60) == 0


BREAKABLE = """
import sys, threading
import torch
from overspill.cli import main
from overspill.device.cuda import CudaStream

armed, replay, n_left = threading.Event(), CudaStream.replay, [5]

def arm():
    sys.stdin.readline()
    armed.set()

def failing(self, recording, *, label):
    if armed.is_set():
        n_left[0] -= 1
        if n_left[0] == 0:
            torch.cuda.set_stream(self.cuda)
            torch._assert_async(torch.zeros(1, dtype=torch.bool, device=self.device.torch_device))
    replay(self, recording, label=label)

CudaStream.replay = failing
threading.Thread(target=arm, daemon=True).start()
main()
"""


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place["devices"])
def test_a_gpu_that_refuses_to_go_on_ends_the_process(place: dict[str, Any]) -> None:
    """An assertion fails on the GPU in mid-generation, after which CUDA refuses all that the process asks of it: the
    stream ends with the error and without `[DONE]`, nobody is served any more, and the process ends with code 1."""
    with running(BREAKABLE, place) as (process, client):
        text = client.post("/completion", json={"prompt": "a", **GREEDY}).json()["content"]
        assert text
        assert process.stdin is not None
        body = {"prompt": "a", "stream": True, "temperature": 0, "n_predict": 200, "ignore_eos": True}
        with client.stream("POST", "/completion", json=body) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            events = [event_data(next(lines)) for _ in range(3)]
            process.stdin.write("break\n")
            process.stdin.flush()
            events += [event_data(line) for line in lines]
        assert list(events[-1]) == ["error"]
        assert "the device failed" in events[-1]["error"]["message"]
        assert text.startswith("".join(event["content"] for event in events[:3]))
        try:
            told = client.get("/health")
        except httpx.TransportError:
            pass  # it is gone already
        else:
            assert told.status_code == 503
            assert "the device failed" in told.json()["error"]["message"]
        assert process.wait(60) == 1
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("overspill: the device failed: ")
        assert "the model cannot be loaded anew: " in last
