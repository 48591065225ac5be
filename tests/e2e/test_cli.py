"""The command line's one line for each kind of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.options import FLAGS
from tests.helpers.cli import MACHINE, MODEL, Capture, main, overspill
from tests.helpers.plain import DATA

RUN = ["run", "-m", str(MODEL), "-p", "x"]
BENCH = ["bench", "-m", str(MODEL)]
PLAN = ["plan", "--shape", "qwen3-30b-a3b", "--machine", str(MACHINE)]
BAD_VALUES = {
    "devices": "tpu:1",
    "device_memory": "12Q",
    "n_gpu_layers": "some",
    "tensor_split": "1;2",
    "split_mode": "row",
    "main_gpu": "-1",
    "override_tensor": "exps",
    "n_cpu_moe": "-1",
    "fit": "maybe",
    "fit_target_mib": "1024,x",
    "fit_ctx": "0",
    "moe_cache_mib": "some",
    "n_ctx": "-1",
    "n_ubatch": "0",
    "n_wave": "0",
    "n_parallel": "0",
    "ctx_checkpoints": "-1",
    "cache_type_k": "q4_0",
    "cache_type_v": "q4_0",
    "prefix_reuse": "some",
    "cache_ram_mib": "-1",
    "max_wave_ms": "0",
    "schedule": "fast",
    "grain": "0",
    "policy": "some",
    "slab_mib": "0",
    "n_staging_slots": "1",
    "max_in_flight": "0",
    "threads": "0",
    "chaos_seed": "-1",
    "trace": "/nowhere/trace.json",
    "host_stage": "2",
    "host_stage_tile_mib": "0",
    "load_mode": "dream",
    "load_threads": "0",
    "routing": "zipf",
    "async_load": "sometimes",
    "record_prompts": "perhaps",
    "h2d_gbps": "0",
}


def test_each_flag_has_a_bad_value() -> None:
    assert BAD_VALUES.keys() == FLAGS.keys() - {"cpu_moe", "force_xdev_sync", "swa_full"}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_value_of_each_flag(capsys: Capture, name: str) -> None:
    for flag in FLAGS[name]:
        refusal = main(capsys, *RUN, flag, BAD_VALUES[name]).refusal
        assert any(f"{spelling} " in refusal for spelling in FLAGS[name]), refusal
        assert BAD_VALUES[name].split(",")[-1] in refusal


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["frobnicate"], ["No such command 'frobnicate'"]),
        (["run"], ["Missing option '--model'"]),
        ([*RUN, "--frobnicate"], ["No such option", "--frobnicate"]),
        ([*RUN, "-n"], ["'-n' requires an argument"]),
        ([*RUN, "-n", "many"], ["'--n-predict'", "integer"]),
        ([*RUN, "-n", "-2"], ["max_tokens: -2"]),
        ([*RUN, "--samplers", "top_k;nosuch"], ["samplers", "nosuch"]),
        ([*RUN, "--grammar", "root ::= nosuch"], ["grammar: line 1", "nosuch"]),
        ([*RUN, "--grammar-file", "/no/such.gbnf"], ["--grammar-file /no/such.gbnf"]),
        ([*RUN, "--json-schema", "{"], ["json_schema"]),
        ([*RUN, "-j", "{}", "--grammar", 'root ::= "a"'], ["--grammar", "exclude"]),
        ([*RUN, "-j", "{}", "--ignore-eos"], ["--ignore-eos"]),
        ([*RUN, "--mirostat", "3"], ["mirostat: 3"]),
        ([*RUN, "--temp", "-1"], ["temperature: -1"]),
        ([*RUN, "--temp", "nan"], ["temperature: nan"]),
        ([*RUN, "--top-k", "-1"], ["top_k: -1"]),
        ([*RUN, "--top-p", "1.5"], ["top_p: 1.5"]),
        ([*RUN, "--min-p", "-0.1"], ["min_p: -0.1"]),
        ([*RUN, "--repeat-penalty", "0"], ["repeat_penalty"]),
        ([*RUN, "--repeat-last-n", "-3"], ["repeat_last_n: -3"]),
        ([*RUN, "--seed", "-2"], ["seed: -2"]),
        ([*RUN, "--stop", "", "-dev", "cpu", "-c", "64"], ["empty string"]),
        ([*RUN, "-c", "64", "-dev", "virtual:2", "-ts", "1,2,3"], ["-ts 1,2,3", "3 shares for 2 devices"]),
        ([*RUN, "-c", "1"], ["context per slot 1"]),
        (["run", "-m", str(MODEL), "--json"], ["--json", "-p or -f"]),
        (["run", "-m", str(MODEL), "--trace", "x.json"], ["--trace", "-p or -f"]),
        ([*RUN, "--system", "x"], ["--system", "leave out -p and -f"]),
        (["run", "-m", str(MODEL), "-p", "", "-dev", "cpu"], ["prompt", "empty"]),
        (["run", "-m", str(MODEL), "-p", "Hello" * 99, "-c", "64", "-dev", "cpu"], ["context of 64", "tokens found"]),
        (["run", "-m", str(MODEL), "-f", "nowhere.txt"], ["nowhere.txt", "cannot be read"]),
        (["run", "-m", str(MODEL), "-f", str(MODEL)], ["qwen3moe.gguf", "UTF-8"]),
        (["run", "-m", "nowhere.gguf", "-p", "x"], ["nowhere.gguf", "cannot be opened"]),
        ([*RUN, "--trace", str(DATA)], ["--trace", "is a directory"]),
        (["bench"], ["either -m FILE or --shape NAME"]),
        ([*BENCH, "--shape", "qwen3-8b"], ["either -m FILE or --shape NAME"]),
        ([*BENCH, "-o", "xml"], ["-o xml", "jsonl"]),
        ([*BENCH, "-p", "1,x"], ["-p 1,x"]),
        ([*BENCH, "-n", "-1"], ["-n -1"]),
        ([*BENCH, "-pg", "5"], ["-pg 5"]),
        ([*BENCH, "-pg", "0,0"], ["-pg 0,0"]),
        ([*BENCH, "-d", "-1"], ["-d -1"]),
        ([*BENCH, "-p", "0", "-n", "0"], ["nothing to measure"]),
        ([*BENCH, "-r", "0"], ["-r 0"]),
        ([*BENCH, "--schedule", "serial,fast"], ["--schedule fast"]),
        ([*BENCH, "--text", "nowhere.txt"], ["nowhere.txt"]),
        ([*BENCH, "-p", "100", "-n", "0", "-c", "64", "-dev", "cpu"], ["pp100 needs 100 cells", "64"]),
        (["bench", "--shape", "gpt-9"], ["--shape gpt-9", "qwen3-30b-a3b"]),
        (["bench", "--shape", "qwen3-8b", "--quant", "Q9"], ["--quant Q9", "Q4_K"]),
        (["bench", "--shape", "qwen3-8b", "--layers", "0"], ["--layers 0"]),
        (["plan"], ["either -m FILE or --shape NAME"]),
        ([*PLAN[:-1], "nowhere.json"], ["nowhere.json", "machine description"]),
        ([*PLAN[:-1], str(MODEL)], ["qwen3moe.gguf", "machine description"]),
        ([*PLAN, "-dev", "CUDA7"], ["CUDA7", "no such device"]),
        ([*PLAN, "--device-memory", "1GiB", "-fit", "off", "-ngl", "99"], ["does not fit", "CUDA0"]),
        (["info"], ["Missing argument"]),
        (["info", "nowhere.gguf"], ["nowhere.gguf", "cannot be opened"]),
        (["perplexity", "-m", str(MODEL)], ["Missing option '--file'"]),
        (["perplexity", "-m", str(MODEL), "-f", "nowhere.txt"], ["nowhere.txt"]),
        (["trace", "nowhere.json", "-o", "a.png"], ["nowhere.json", "not a trace"]),
        (["trace", str(MACHINE), "-o", "a.png"], ["two-24gb.json", "not a trace"]),
        (["trace", "nowhere.json", "-o", "a.bmp"], ["-o a.bmp", ".png"]),
        (["trace", "nowhere.json", "-o", "/nowhere/a.png"], ["/nowhere"]),
    ],
    ids=lambda value: " ".join(Path(str(arg)).name for arg in value),
)
def test_bad_input(capsys: Capture, args: list[str], words: list[str]) -> None:
    refusal = main(capsys, *args).refusal
    assert all(word in refusal for word in words), refusal


def test_bad_flag_as_a_process() -> None:
    ran = overspill("run", "-m", MODEL, "-n", "many")
    assert "'--n-predict'" in ran.refusal
    assert ran.peak_bytes < 200 << 20  # nothing heavy was imported to find that out


def test_help(capsys: Capture) -> None:
    ran = main(capsys)
    assert ran.code == 0
    assert ran.err == ""
    for command in ("run", "bench", "plan", "info", "perplexity", "trace"):
        assert command in ran.out
        assert "Usage: overspill " + command in main(capsys, command, "--help").out
    assert "--staging-slots" in main(capsys, "run", "--help").out
