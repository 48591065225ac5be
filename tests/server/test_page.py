"""The page's files and its data over plain HTTP, and the page itself in a browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from overspill.device.base import Span
from overspill.device.lane import Lane
from overspill.llm import LLM
from overspill.pipeline.wave import Segment, Ubatch, Wave
from overspill.server.routes_page import PAGE_FILES
from overspill.server.settings import ServerSettings
from overspill.server.status import drawn
from tests.helpers.browser import CHROMIUM, Tab, browsing
from tests.server.scripted import Says
from tests.server.served import MODEL, Served, open_model, serving, wait_until
from tests.server.test_cache_ram import FIRST, SECOND, open_one

ASK = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: Debian's package is called chromium")


# --- files


def test_the_page_and_its_files(served: Served) -> None:
    page = served.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert set(named) - {"data:,"} == {f"page/{name}" for name in PAGE_FILES}
    for name, media_type in PAGE_FILES.items():
        file = served.client.get(f"/page/{name}")
        assert (file.status_code, file.headers["content-type"]) == (200, media_type)
        assert "://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", file.text), "nothing comes from elsewhere"
    for path in ("/page/index.html", "/page/page.py", "/page/", "/page/..%2f..%2fapp.py", "/page/x"):
        assert served.client.get(path).status_code == 404


def test_the_page_is_there_before_the_model_and_without_a_key() -> None:
    may_load = threading.Event()

    def slowly(progress: Any) -> LLM:
        may_load.wait(30)
        return open_model()

    settings = ServerSettings(port=0, name="tiny", api_keys=frozenset({"k"}), api_prefix="/llm")
    with serving(settings, open_llm=slowly, is_awaited=False) as served:
        for path in ("/llm/", "/llm/page/page.js", "/llm/page/page.css"):
            assert served.client.get(path).status_code == 200
        assert served.client.get("/llm").headers["location"].endswith("/llm/")
        assert served.client.get("/llm/status").status_code == 401
        key = {"Authorization": "Bearer k"}
        assert served.client.get("/llm/status", headers=key).status_code == 503
        may_load.set()
        wait_until(lambda: served.client.get("/llm/status", headers=key).status_code == 200)


# --- data


def test_status_tells_the_plan_the_totals_and_a_watched_wave(served: Served) -> None:
    before = served.client.get("/status").json()
    answer = served.ask("/v1/chat/completions", **ASK)
    served.wait_until_idle()
    wait_until(lambda: served.client.get("/status").json()["counters_age_s"] < 0.4)
    status = served.client.get("/status").json()
    placed = served.llm.plan.placement
    assert status["model"] | {"name": "tiny", "architecture": "qwen3moe", "n_layer": 4} == status["model"]
    assert status["model"]["bytes"] == sum(info.n_bytes for info in served.llm.source.tensors.values())
    assert [d["name"] for d in status["devices"]] == [*(b.name for b in placed.budgets[:-1]), "cpu"]
    for device, budget in zip(status["devices"], placed.budgets, strict=True):
        kinds = ("weights_bytes", "kv_bytes", "compute_bytes", "staging_bytes", "cache_bytes")
        assert sum(device[kind] for kind in kinds) == budget.used_bytes
    grown = {key: status["requests"][key] - before["requests"][key] for key in before["requests"]}
    assert grown["served"] == 1
    assert grown["generated_tokens"] == answer["usage"]["completion_tokens"]
    assert grown["prompt_tokens"] + grown["cached_tokens"] == answer["usage"]["prompt_tokens"]
    wave = status["prompt_wave"]
    assert 1 < wave["n_tokens"] <= answer["usage"]["prompt_tokens"]
    (device,) = wave["devices"]
    assert 0 < device["busy"] <= 1.05
    bars = [bar for row in device["rows"] for bar in row["spans"]]
    assert all(0 <= start <= end <= wave["wall_us"] * 1.01 for _, start, end in bars)
    assert {row["lane"] for row in device["rows"]} == {"compute", "hand_off"}


def test_only_waves_that_are_asked_for_are_watched(served: Served) -> None:
    served.client.get("/status")
    served.ask("/v1/chat/completions", **ASK)
    watched = served.llm.watch.last
    assert watched is not None
    served.ask("/v1/chat/completions", **ASK)
    assert served.llm.watch.last is watched


def test_a_watched_wave_of_two_devices_has_uploads_and_changes_no_logits() -> None:
    options: dict[str, Any] = {"devices": "virtual:2", "cpu_moe": True, "n_gpu_layers": "all", "policy": "all"}
    with LLM(MODEL, n_ctx=128, n_ubatch=16, threads=1, **options) as llm:
        cuts = [Segment(0, 0, 16), Segment(0, 16, 16), Segment(0, 32, 8)]
        ubatches = [Ubatch(tuple(range(s.first_pos, s.end_pos)), (s,), (s.n_tokens - 1,)) for s in cuts]
        plain = llm.logits(range(40))
        llm.watch.ask()
        logits = llm.run_wave(Wave(tuple(ubatches)))
        assert torch.cat(logits).equal(plain[[15, 31, 39]])
        wave = llm.watch.last_prompt
        assert wave is not None
        assert (wave.n_tokens, wave.n_ubatches) == (40, 3)
        uploaded = {name: sum(s.n_bytes for s in spans if s.lane is Lane.UPLOAD) for name, spans in wave.spans.items()}
        assert uploaded["virtual:0"] + uploaded["virtual:1"] == llm.host_expert_bytes
        assert all(wave.start_us <= s.start_us <= s.end_us for spans in wave.spans.values() for s in spans)
        assert all(device.take_trace() == [] for device in llm.devices.all), "nothing is kept on"


def span(label: str, start: float, end: float) -> Span:
    return Span(Lane.COMPUTE, label, start, end, 0)


def test_bars_of_a_kind_that_stand_close_are_one() -> None:
    spans = [span("attend L0 m0", 1000, 2000), span("attend L0 m1", 2001, 3000), span("experts L0 m0", 3001, 4000)]
    later = [span("attend L1 m0", 9000, 9500), span("attend L1 m1", 9600, 9700)]
    expected = [("attend", 0, 2000), ("experts", 2001, 3000), ("attend", 8000, 8500), ("attend", 8600, 8700)]
    assert list(drawn([*later, *spans], 1000, 10_000)) == expected
    assert list(drawn([], 0, 1)) == []
    many = [span("attend", i, i + 0.5) for i in range(30_000)]
    assert len(list(drawn(many, 0, 30_000))) == 1


# --- the browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def page(tab: Tab, served: Served) -> Tab:
    """The page, freshly opened, with nothing remembered."""
    tab.prefer("light")
    tab.resize(1280, 800)
    tab.open(served.url + "/")
    tab.run("localStorage.clear()")
    tab.open(served.url + "/?again")
    tab.errors.clear()
    tab.urls.clear()
    tab.wait("document.querySelector('#health-text').textContent === 'ready'")
    return tab


def text_of(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({selector!r}).textContent"))


@needs_browser
def test_a_conversation_in_the_browser(page: Tab, served: Served, says: Says) -> None:
    says("<think>\nhm\n</think>\n\nRun <b>this</b>:\n```python\nprint(1)\n```\nDone.")
    page.type("#text", "How?")
    page.press("Enter", "\r")
    page.wait("running === null && messages.length === 2")
    assert text_of(page, ".user .said") == "How?"
    assert text_of(page, ".assistant details span") == "hm"
    assert text_of(page, ".assistant .said") == "Run <b>this</b>:\nprint(1)\n\nDone."
    assert text_of(page, ".assistant pre code") == "print(1)\n"
    assert "written at" in text_of(page, ".assistant .note")
    assert page.run("document.querySelector('#text').value") == ""
    says("Again.")
    page.type("#text", "And now?")
    page.click("#send")
    page.wait("running === null && messages.length === 4")
    assert [m["role"] for m in page.run("messages")] == ["user", "assistant"] * 2
    assert page.run("messages[1].reasoning_content") == "hm"
    page.wait("document.querySelectorAll('#gantt rect:not(.track)').length > 0")
    assert "tokens in" in text_of(page, "#wave-text")
    page.click("#new")
    assert page.run("messages.length === 0 && document.querySelector('#empty') !== null")
    assert page.errors == []
    assert all(url.startswith((served.url, "data:")) for url in page.urls), page.urls


@needs_browser
def test_settings_go_into_the_request_and_are_remembered(page: Tab, served: Served) -> None:
    page.run("document.querySelector('#settings').open = true")
    for field, value in (("system", "Be brief."), ("temperature", "0"), ("most", "3")):
        page.run(f"document.querySelector('#{field}').value = ''")
        page.type(f"#{field}", value)
        page.run(f"document.querySelector('#{field}').dispatchEvent(new Event('change'))")
    page.type("#text", "Hi")
    page.press("Enter", "\r")
    page.wait("running === null && messages.length === 2")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = served.ask("/v1/chat/completions", messages=messages, temperature=0, max_tokens=3)
    assert page.run("messages[1].content") == expected["choices"][0]["message"]["content"]
    assert "ended by a limit" in text_of(page, ".assistant .note")
    page.open(served.url + "/?later")
    assert page.run("document.querySelector('#system').value") == "Be brief."


@needs_browser
def test_stop_ends_the_answer_and_frees_the_slot(page: Tab, served: Served) -> None:
    page.run("messages = [{role: 'user', content: 'a'}, {role: 'assistant', content: 'b'}]")
    page.run("document.querySelector('#temperature').value = 5")
    page.type("#text", "Tell me everything")
    page.press("Enter", "\r")
    page.wait("document.querySelector('#stop').disabled === false")
    page.press("Escape")
    page.wait("running === null")
    served.wait_until_idle()
    assert page.run("document.querySelector('#send').disabled") is False
    assert page.errors == []


@needs_browser
def test_saved_slots_are_shown(tab: Tab, page: Tab) -> None:
    assert page.run("document.querySelector('#images').hidden") is True
    with serving(open_llm=open_one) as one:
        for ids in (FIRST, SECOND, FIRST):
            one.ask("/completion", prompt=ids, temperature=0, max_tokens=2)
        tab.open(one.url + "/")
        tab.wait("document.querySelector('#images').textContent !== ''")
        assert text_of(tab, "#images") == "2 saved slots, 2 MiB of 2 MiB host RAM; 1 time one was used again"
        assert tab.run("document.querySelector('#images').hidden") is False


@needs_browser
def test_errors_are_shown(page: Tab, served: Served) -> None:
    page.type("#text", "word " * 400)
    page.click("#send")
    page.wait("document.querySelector('.error') !== null")
    assert "tokens" in text_of(page, ".error")
    assert page.run("messages.length") == 0


@needs_browser
def test_a_key_is_asked_for_and_used(tab: Tab) -> None:
    with serving(ServerSettings(port=0, name="tiny", api_keys=frozenset({"secret"})), is_awaited=False) as served:
        tab.open(served.url + "/")
        tab.wait("document.querySelector('#health-text').textContent === 'Invalid API Key'")
        tab.type("#key", "secret")
        tab.wait("document.querySelector('#health-text').textContent === 'ready'")


CONTRAST = """(() => {
  const channel = (c) => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = (rgb) => { const [r, g, b] = rgb.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const backOf = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  return [...document.querySelectorAll('h1,h2,h3,p,span,label,dt,dd,li,button,strong,summary,text')]
    .filter((e) => e.textContent.trim() && !e.disabled && !e.closest('.hidden')).map((e) => {
      const style = getComputedStyle(e);
      const pair = [light(e.tagName === 'text' ? style.fill : style.color), light(backOf(e))].sort((a, b) => b - a);
      return [(pair[0] + 0.05) / (pair[1] + 0.05), e.tagName + ' ' + e.textContent.slice(0, 30)]; })
    .sort((a, b) => a[0] - b[0])[0]; })()"""


@needs_browser
def test_light_dark_and_narrow(page: Tab, served: Served) -> None:
    served.ask("/v1/chat/completions", **ASK)
    page.wait("document.querySelector('#gantt svg') !== null")
    backs = set()
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        backs.add(page.run("getComputedStyle(document.body).backgroundColor"))
        contrast, where = page.run(CONTRAST)
        assert contrast >= 4.5, where
    assert len(backs) == 2
    for width in (1280, 400):
        page.resize(width, 800)
        assert page.run("document.documentElement.scrollWidth <= innerWidth"), width


@needs_browser
def test_every_control_has_a_name(page: Tab) -> None:
    page.run("document.querySelector('#settings').open = true")
    roles = ("button", "textbox", "spinbutton", "checkbox", "radio", "log", "image", "region", "DisclosureTriangle")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]
    controls = [(role, name) for role, name in found if role in roles]
    assert len(controls) >= 12
    assert all(name for _, name in controls), controls
    order = []
    page.run("document.body.focus()")
    for _ in range(6):
        page.press("Tab")
        order.append(page.run("document.activeElement.id"))
    assert order[:5] == ["log", "text", "send", "new", ""], order
