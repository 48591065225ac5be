"""Many clients at once, and many requests of all kinds: what the server holds afterwards is what it held before."""

from __future__ import annotations

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from overspill.llm import LLM
from tests.server.served import MODEL, PATIENCE_S, Served, serving, wait_until

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
USER = {"role": "user", "content": "hi"}


def open_four(_: Any = None) -> LLM:
    return LLM(MODEL, devices="cpu", n_ctx=4 * 128, n_parallel=4, n_ubatch=16, n_wave=64, threads=1, cache_ram_mib=8)


@pytest.fixture(scope="module")
def four() -> Iterator[Served]:
    """A server with four slots."""
    with serving(open_llm=open_four) as served:
        yield served


def test_200_clients_on_4_slots(four: Served) -> None:
    """Everybody is answered, with what a client alone is answered."""
    prompts = [f"client {i % 20} says" for i in range(200)]
    ask = {"temperature": 0, "n_predict": 8}
    alone = {p: four.ask("/completion", prompt=p, cache_prompt=False, **ask)["content"] for p in set(prompts)}
    limits = httpx.Limits(max_connections=200)
    with httpx.Client(base_url=four.url, timeout=PATIENCE_S, limits=limits) as client, ThreadPoolExecutor(200) as pool:

        def one(prompt: str) -> str:
            response = client.post("/completion", json={"prompt": prompt, "cache_prompt": False, **ask})
            assert response.status_code == 200, response.text
            return str(response.json()["content"])

        together = list(pool.map(one, prompts))
    assert together == [alone[prompt] for prompt in prompts]
    assert four.metric("llamacpp:requests_processing") == 0
    assert four.metric("llamacpp:n_busy_slots_per_decode") > 1


def test_prefixes_are_reused_at_any_point(four: Served) -> None:
    """All but the last token of a prompt that was there, and a former answer as part of the next prompt."""
    ids = list(range(100, 150))
    first = four.ask("/completion", prompt=ids, temperature=0, n_predict=9, return_tokens=True)
    assert four.ask("/completion", prompt=ids, n_predict=1)["timings"]["cache_n"] == 49
    four.ask("/completion", prompt=ids, temperature=0, n_predict=9, cache_prompt=False, id_slot=2)
    longer = [*ids, *first["tokens"], 7]
    assert four.ask("/completion", prompt=longer, n_predict=1, id_slot=2)["timings"]["cache_n"] == 58
    assert four.ask("/completion", prompt=longer, n_predict=1, cache_prompt=False)["timings"]["cache_n"] == 0


# --- requests of all kinds


def whole(client: httpx.Client, rng: random.Random) -> int:
    path = rng.choice(["/completion", "/v1/completions"])
    body = {"prompt": "word " * rng.randint(1, 40), "n_predict": rng.randint(0, 12), "n": rng.randint(1, 3)}
    extra: dict[str, Any] = rng.choice(
        [
            {},
            {"temperature": 0},
            {"n_probs": 3, "logprobs": 2},
            {"stop": ["a", "e"]},
            {"mirostat": 2},
            {"dry_multiplier": 1.0, "xtc_probability": 0.5, "typical_p": 0.7},
            {"grammar": 'root ::= ("yes" | "no")+'},
            {"cache_prompt": False, "id_slot": rng.randint(0, 9)},
        ]
    )
    return client.post(path, json=body | extra).status_code


def chat(client: httpx.Client, rng: random.Random) -> int:
    fields = {"json_schema": SCHEMA} if rng.random() < 0.5 else {}
    body = {"messages": [USER] * rng.randint(1, 3), "max_tokens": 10, "seed": rng.randint(0, 9), **fields}
    return client.post("/v1/chat/completions", json=body).status_code


def wrong(client: httpx.Client, rng: random.Random) -> int:
    body = rng.choice(
        [
            {"prompt": []},
            {"prompt": "a", "temperature": "hot"},
            {"prompt": "a", "grammar": "root ::= nosuch"},
            {"prompt": "long " * 200},
            {"prompt": "a", "logit_bias": [[i, False] for i in range(512)]},
        ]
    )
    response = client.post("/completion", json=body)
    assert response.status_code == 400, response.text
    return response.status_code


def no_json(client: httpx.Client, rng: random.Random) -> int:
    data = rng.choice([b"", b"{", b"\xff\xfe", b"[1]", json.dumps({"prompt": "a"}).encode()[:-3]])
    return client.post(rng.choice(["/completion", "/v1/chat/completions", "/v1/messages"]), content=data).status_code


def stream(client: httpx.Client, rng: random.Random) -> int:
    """Streamed, and in every second case left after a few lines."""
    n_lines = rng.choice([0, 1, 3, 10_000])
    body = {"prompt": "word " * rng.randint(1, 60), "n_predict": 30, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/completion", json=body) as response:
        for _, _ in zip(range(n_lines), response.iter_lines(), strict=False):
            pass
        return response.status_code


def impatient(client: httpx.Client, rng: random.Random) -> int:
    body = {"prompt": "word " * 60, "n_predict": 100, "ignore_eos": True}
    with suppress(httpx.TimeoutException):
        return client.post("/completion", json=body, timeout=rng.choice([0.001, 0.02, 0.1])).status_code
    return 0


def look(client: httpx.Client, rng: random.Random) -> int:
    return client.get(rng.choice(["/slots", "/metrics", "/props", "/v1/models", "/health", "/status"])).status_code


KINDS: list[Callable[[httpx.Client, random.Random], int]] = [whole, chat, wrong, no_json, stream, impatient, look]


def held(served: Served) -> dict[str, int]:
    """Whatever a request may leave behind."""
    engine = served.llm._engine
    return {
        "busy slots": served.n_busy(),
        "waiting": served.llm.status.n_waiting,
        "runs": len(engine._runs),
        "ids": len(engine._ids),
        "cancelled": len(engine._cancelled),
        "streams": len(served.llm._loop._streams),
        "answer threads": sum(t.name == "overspill-answer" for t in threading.enumerate()),
    }


def wait_until_nothing_is_held(served: Served) -> None:
    wait_until(lambda: not any(held(served).values()), found=lambda: held(served))


def n_files() -> int:
    return len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))


def soak(served: Served, n_requests: int) -> Counter[int]:
    served.ask("/completion", prompt="a", n_predict=1)
    wait_until_nothing_is_held(served)
    files_before = n_files()
    limits = httpx.Limits(max_keepalive_connections=0)

    def one(seed: int) -> int:
        """By a client of its own, which loads no certificates: that would take longer than most requests."""
        rng = random.Random(seed)
        with httpx.Client(base_url=served.url, timeout=PATIENCE_S, limits=limits, verify=False) as client:
            return rng.choice(KINDS)(client, rng)

    with ThreadPoolExecutor(12) as pool:
        codes = Counter(pool.map(one, range(n_requests)))
    wait_until_nothing_is_held(served)
    wait_until(lambda: n_files() <= files_before + 2)
    assert set(codes) <= {0, 200, 400}, codes
    images = served.llm.status.images
    assert images.n_loaded > 0
    assert images.n_saved - images.n_dropped == images.n_images <= images.n_blocks <= images.n_blocks_total == 8
    return codes


def check_soak(served: Served, n_requests: int) -> None:
    answer = served.ask("/completion", prompt="the same", temperature=0, n_predict=10, cache_prompt=False)["content"]
    codes = soak(served, n_requests)
    assert codes[200] > codes[400] > 0
    again = served.ask("/completion", prompt="the same", temperature=0, n_predict=10, cache_prompt=False)["content"]
    assert again == answer
    assert served.client.get("/health").status_code == 200


def test_random_requests_leave_nothing_behind(four: Served) -> None:
    check_soak(four, 150)


@pytest.mark.slow
def test_two_thousand_random_requests_leave_nothing_behind(four: Served) -> None:
    check_soak(four, 2000)
