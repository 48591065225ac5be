"""`overspill bench`, its records in every form and models that are shapes alone; and `overspill perplexity`."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overspill.bench.report import OUTPUTS
from tests.helpers.cli import HOST_EXPERT_BYTES, MODEL, SPILLING, Capture, main


def bench(capsys: Capture, *args: str, output: str = "json") -> str:
    ran = main(capsys, "bench", "-m", MODEL, *SPILLING[:-2], "-r", "2", "-o", output, *args)
    assert (ran.code, ran.err) == (0, "")
    return ran.out


def test_bench_of_three_schedules(capsys: Capture) -> None:
    out = bench(capsys, "-p", "32", "-n", "3", "--schedule", "serial,depth-first,breadth-first", "--policy", "all")
    records = json.loads(out)
    assert [r["schedule"] for r in records] == [s for s in ("serial", "depth-first", "breadth-first") for _ in "ab"]
    for record in records:
        n = record["n_prompt"] + record["n_gen"]
        assert (record["n_prompt"], record["n_gen"]) in [(32, 0), (0, 3)]
        assert record["samples_ts"] == pytest.approx([1e9 * n / ns for ns in record["samples_ns"]])
        assert record["avg_ts"] == pytest.approx(np.mean(record["samples_ts"]))
        assert record["stddev_ts"] == pytest.approx(np.std(record["samples_ts"], ddof=1))
        assert record["device_allocations"] == record["device_syncs"] == 0
        is_prompt, is_shared = record["n_gen"] == 0, record["schedule"] == "breadth-first"
        assert record["uploaded_bytes"] == HOST_EXPERT_BYTES * ((1 if is_shared else 2) if is_prompt else 3)
        assert sum(record["upload_gbps"].values()) * record["samples_ns"][-1] >= record["uploaded_bytes"]
        assert (record["model_n_params"], record["n_gpu_layers"], record["n_cpu_moe"]) == (559936, 4, 4)


def test_bench_of_pairs_and_depths(capsys: Capture) -> None:
    records = json.loads(bench(capsys, "-p", "0", "-n", "0", "-pg", "8,2", "-pg", "4,1", "-d", "0,5"))
    assert [(r["n_prompt"], r["n_gen"], r["n_depth"]) for r in records] == [(8, 2, 0), (4, 1, 0), (8, 2, 5), (4, 1, 5)]


def test_bench_outputs(capsys: Capture) -> None:
    """The same numbers in every form; speeds differ between runs, so only what must be equal is compared."""
    fixed = ("n_prompt", "n_gen", "schedule", "n_ubatch", "model_size")
    seen = {}
    for output in OUTPUTS:
        out = bench(capsys, "-p", "16", "-n", "2", output=output)
        if output == "md":
            head, rule, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()]
            assert set("".join(rule)) == {"-"}
            assert [row[head.index("test")] for row in rows] == ["pp16", "tg2"]
            assert all(len(row) == len(head) for row in rows)
            assert all("±" in row[head.index("t/s")] for row in rows)
            continue
        records = _records(output, out)
        seen[output] = [[str(record[name]) for name in fixed] for record in records]
    assert len(seen) == 3
    assert seen["json"] == seen["jsonl"] == seen["csv"]
    assert [record[:2] for record in seen["json"]] == [["16", "0"], ["0", "2"]]


def _records(output: str, out: str) -> list[dict[str, Any]]:
    if output == "csv":
        return list(csv.DictReader(io.StringIO(out)))
    return [json.loads(line) for line in out.splitlines()] if output == "jsonl" else json.loads(out)


def test_bench_with_prompts_of_a_text(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Once upon a time there was a model.", encoding="utf-8")
    assert json.loads(bench(capsys, "-p", "8", "-n", "0", "--text", str(text)))[0]["n_prompt"] == 8


@pytest.mark.parametrize("quant", ["Q4_K", "MXFP4"])
@pytest.mark.usefixtures("tiny_shape")
def test_bench_of_a_shape(capsys: Capture, quant: str) -> None:
    args = ["--shape", "tiny", "--layers", "2", "--quant", quant, "-p", "6", "-n", "2", "-r", "1", "-o", "json"]
    ran = main(capsys, "bench", *args, "-dev", "virtual:2", "-cmoe")
    assert (ran.code, ran.err) == (0, "")
    records = json.loads(ran.out)
    assert records[0]["model_filename"] == f"tiny {quant} (random)"
    assert records[0]["avg_ts"] > 0
    n_params = 2 * (2 * 64 + 2 * 32 + 64 * 128 * 2 + 64 * 64 * 2 + 4 * 64 + 3 * 4 * 64 * 96) + 2 * 200 * 64 + 64
    assert records[0]["model_n_params"] == n_params


def test_perplexity(capsys: Capture, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Once upon a time there was a model that knew nothing at all. " * 3, encoding="utf-8")
    args = ["perplexity", "-m", str(MODEL), "-f", str(text), "-dev", "cpu", "-c", "16"]
    result = json.loads(main(capsys, *args, "--tokens", "50", "--json").out)
    assert result["n_tokens"] == 50
    assert len(result["nll"]) == 3 * 15 + 1  # windows of 16, 16, 16 and 2 tokens
    assert result["perplexity"] == pytest.approx(np.exp(np.mean(result["nll"])))
    ran = main(capsys, *args, "--tokens", "50")
    assert ran.out == f"perplexity {result['perplexity']:.4f} over 46 predicted tokens of 50\n"
    assert "at least two" in main(capsys, *args, "--tokens", "1").refusal
