"""`bench --server`: against a server with known delays, and against the real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from overspill.bench import bench
from overspill.bench.client import Sample, ServerUnderTest
from overspill.bench.server import Round, ServerBench, bench_server, percentile
from tests.helpers.cli import main
from tests.server.served import Served

FIRST_S, GAP_S = 0.2, 0.02


class Slow(BaseHTTPRequestHandler):
    """Answers like llama-server after known delays; tokens are words."""

    seen: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self._whole({"data": [{"id": "slow"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self._whole({"tokens": [len(word) for word in body["content"].split()]})
            return
        self.seen.append(body)
        self.keys.append(self.headers["Authorization"])
        self.send_response(200)
        self.end_headers()
        time.sleep(FIRST_S)
        for i in range(body["n_predict"]):
            time.sleep(GAP_S if i else 0)
            self._event({"content": "x", "tokens": [1], "stop": False})
        timings = {"prompt_n": len(body["prompt"]), "predicted_n": body["n_predict"], "prompt_per_second": 40.0}
        self._event({"content": "", "tokens": [], "stop": True, "timings": timings | {"cache_n": 0}})

    def _whole(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, value: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

    def log_message(self, *args: Any) -> None:
        pass


class Broken(Slow):
    """Ends a stream in the middle."""

    def _event(self, value: Any) -> None:
        if not value["stop"]:
            super()._event(value)


@pytest.fixture
def slow() -> Iterator[str]:
    yield from _listening(Slow)


@pytest.fixture
def broken() -> Iterator[str]:
    yield from _listening(Broken)


def _listening(kind: type[Slow]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        kind.seen.clear()
        kind.keys.clear()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_delays_are_measured_from_the_clients_side(slow: str) -> None:
    wanted = ServerBench.parse(n_prompt="8", n_gen="6", pairs=(), clients="1,3", repetitions=2)
    rounds = list(bench_server(ServerUnderTest(slow, "k"), wanted))
    assert [(r.n_clients, r.i_round) for r in rounds] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    samples = [sample for r in rounds for sample in r.samples]
    for sample in samples:
        assert (len(sample.gaps_s), sample.n_generated) == (5, 6)
        assert sample.ttft_s >= FIRST_S
        assert sample.end_s - sample.start_s >= FIRST_S + 5 * GAP_S
        assert sum(sample.gaps_s) <= sample.end_s - sample.first_s + 1e-6
    assert max(sum(sample.gaps_s) for sample in samples) > GAP_S, "tokens are seen as they come"
    assert rounds[0].prompt_ts == 40.0
    assert rounds[2].prompt_ts <= 3 * 8 / FIRST_S
    assert set(Slow.keys) == {"Bearer k"}
    prompts = [tuple(body["prompt"]) for body in Slow.seen]
    assert len(prompts) == 8
    assert {len(prompt) for prompt in prompts} == {8}
    assert all(
        (body["cache_prompt"], body["ignore_eos"], body["temperature"]) == (False, True, 0) for body in Slow.seen
    )


def test_rates_of_clients_at_once() -> None:
    """Two clients: the second begins later and is done last."""
    times = {"start_s": 10.0, "first_s": 10.5, "end_s": 10.9}
    one = Sample(**times, gaps_s=(0.1, 0.1, 0.2), n_prompt=8, n_cached=0, n_generated=4, prompt_per_second=99.0)
    times = {"start_s": 11.0, "first_s": 12.0, "end_s": 12.5}
    two = Sample(**times, gaps_s=(0.5,), n_prompt=8, n_cached=2, n_generated=2, prompt_per_second=98.0)
    both = Round(test=bench.Test(8, 4, 0), n_clients=2, i_round=0, samples=(one, two))
    assert (both.prompt_ts, both.generated_ts, both.n_cached) == (16 / 2.0, 4 / 2.0, 2)
    assert (both.ttft_ms(0), both.ttft_ms(50), both.ttft_ms(100)) == (500.0, 750.0, 1000.0)
    assert (both.gap_ms(0), both.gap_ms(50), both.gap_ms(100)) == pytest.approx((100.0, 150.0, 500.0))
    assert Round(test=bench.Test(8, 4, 0), n_clients=1, i_round=0, samples=(one,)).prompt_ts == 99.0


def test_percentiles_are_numpys() -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    for percent in (0, 12.5, 50, 95, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([7.0], 95) == 7.0


def test_the_real_server_as_json(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("-p", "20,40", "-n", "5", "--clients", "1,4", "-r", "2")
    ran = main(capsys, "bench", "--server", served.url, *args, "-o", "json")
    assert ran.code == 0, ran.err
    records = json.loads(ran.out)
    tests = [(r["n_clients"], r["n_prompt"], r["n_gen"], r["request"]) for r in records]
    assert tests == [(c, p, 5, i) for c in (1, 4) for p in (20, 40) for i in (1, 2)]
    for record in records:
        assert record["model"] == "tiny"
        assert len(record["samples"]) == record["n_clients"]
        for sample in record["samples"]:
            assert sample["prompt_tokens"] + sample["cached_tokens"] == record["n_prompt"]
            assert sample["generated_tokens"] == 5
            assert 0 < sample["ttft_ms"] <= sample["total_ms"]
        assert 0 < record["ttft_ms"]["p50"] <= record["ttft_ms"]["p95"]
        assert 0 < record["inter_token_ms"]["p50"] <= record["inter_token_ms"]["p95"]
        assert record["prompt_ts"] > 0 < record["generated_ts"]


def test_the_real_server_as_a_table(served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a server. " * 10)
    ran = main(
        capsys, "bench", "--server", served.url + "/", "-pg", "30,3", "-p", "8", "-n", "2", "-r", "1", "--text", text
    )
    lines = ran.out.splitlines()
    assert lines[0] == "tiny"
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["test", "--------", "pp8+tg2", "pp30+tg3"]
    assert len({line.count("|") for line in lines[2:]}) == 1


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--server", "localhost:8080"], "--server localhost:8080: give a URL such as http://127.0.0.1:8080"),
        (["--server", "http://127.0.0.1:9"], "--server http://127.0.0.1:9: cannot be reached"),
        (["--server", "http://x", "-m", "y.gguf"], "leave out -m, --shape"),
        (["--server", "http://x", "-c", "9"], "leave out -m, --shape"),
        (["--server", "http://x", "-p", "0"], "at least 1 token"),
        (["--server", "http://x", "--clients", "0"], "--clients 0: give at least 1"),
        (["--server", "http://x", "-r", "0"], "-r 0: give at least 1"),
        (["--server", "http://x", "-o", "csv"], "-o csv: with --server, choose one of md, json"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], args: list[str], told: str) -> None:
    assert told in main(capsys, "bench", *args).refusal


def test_what_the_server_refuses_is_told(served: Served, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    refusal = main(capsys, "bench", "--server", served.url, "-p", "9999", "-n", "1", "-r", "1").refusal
    assert "/completion answered 400" in refusal
    assert "9999" in refusal
    refusal = main(capsys, "bench", "--server", served.url + "/nowhere", "-r", "1").refusal
    assert "/v1/models answered 404: File Not Found" in refusal
    assert "ended in the middle" in main(capsys, "bench", "--server", broken, "-p", "2", "-n", "2", "-r", "1").refusal
