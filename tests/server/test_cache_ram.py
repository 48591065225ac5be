"""`--cache-ram` behind HTTP: what clients and /metrics see, cancellation, and copies that fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from overspill.llm import LLM
from tests.server.served import GREEDY, MODEL, Served, serving, wait_until

SIZES: dict[str, Any] = {"n_ctx": 256, "n_ubatch": 16, "n_wave": 32, "prefix_reuse": "whole-ubatches"}
FIRST, SECOND = list(range(100, 180)), list(range(200, 290))


def open_one(_: Any = None) -> LLM:
    """One slot on two devices, so that every change of conversation saves or loads one."""
    return LLM(MODEL, devices="virtual:2", cpu_moe=True, threads=1, cache_ram_mib=2, **SIZES)


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    with serving(open_llm=open_one) as served:
        yield served


def ask(served: Served, ids: list[int]) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were there."""
    answer = served.ask("/completion", prompt=ids, **GREEDY)
    return answer["content"], answer["timings"]["cache_n"]


def counted(served: Served) -> list[int]:
    names = ("images_saved_total", "images_loaded_total", "image_tokens_loaded_total", "images")
    return [int(served.metric(f"overspill:{name}")) for name in names]


def test_conversations_take_turns_in_a_slot(one: Served) -> None:
    one.llm._engine._scheduler.forget_images()
    before = counted(one)
    texts = [ask(one, ids)[0] for ids in (FIRST, SECOND)]
    assert ask(one, FIRST) == (texts[0], 64)
    assert ask(one, SECOND) == (texts[1], 80)
    assert [now - then for now, then in zip(counted(one), before, strict=True)] == [2, 2, 144, 2]
    assert one.metric("overspill:image_bytes") == 2 << 20
    images = one.client.get("/status").json()["images"]
    assert (images["n"], images["bytes"], images["total_bytes"]) == (2, 2 << 20, 2 << 20)


def test_a_client_that_leaves_costs_no_image_its_bytes(one: Served) -> None:
    """A request is cancelled in the wave after its image was loaded; the image is as good as before."""
    text = ask(one, FIRST)[0]
    ask(one, SECOND)
    run_wave = one.llm._engine._run_wave

    def slow(wave: Any) -> Any:
        if wave.n_tokens > 1:
            one.llm.cancel(next(s.request_id for s in one.llm.status.slots if s.is_busy))
        return run_wave(wave)

    one.llm._engine._run_wave = slow
    try:
        with pytest.raises(httpx.HTTPStatusError):
            one.post("/completion", prompt=FIRST, **GREEDY).raise_for_status()
    finally:
        one.llm._engine._run_wave = run_wave
    one.wait_until_idle()
    assert ask(one, FIRST)[0] == text
    assert one.client.get("/health").status_code == 200


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_copy_that_fails_is_an_error_and_leaves_no_image(one: Served, what: str, monkeypatch: Any) -> None:
    """As with any failure of a device, the model is loaded anew."""
    one.llm._engine._scheduler.forget_images()
    texts = [ask(one, ids)[0] for ids in (FIRST, SECOND)]

    def broken(move: Any) -> None:
        raise MemoryError("the link is down")

    monkeypatch.setattr(one.llm.runner._images, f"{what}_host", broken)
    response = one.post("/completion", prompt=FIRST if what == "load" else [7] * 40, **GREEDY)
    assert response.status_code == 500
    assert "the link is down" in response.text
    wait_until(lambda: one.client.get("/health").status_code == 200)
    assert counted(one)[3] == 0
    assert [ask(one, ids) for ids in (FIRST, SECOND)] == [(text, 0) for text in texts]
