"""The command line: what it prints, its JSON, and its one line for each kind of bad input."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overspill.bench import shapes
from overspill.bench.report import OUTPUTS
from overspill.gguf import open_gguf
from overspill.options import FLAGS
from overspill.text.tokenizer import Tokenizer
from tests.helpers.cli import Ran, main, overspill
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
MACHINE = DATA / "machines" / "two-24gb.json"
SPILLING = ["-dev", "virtual:2", "-ngl", "all", "-cmoe", "-ub", "16", "-c", "96"]
HOST_EXPERT_BYTES = 4 * 8 * 3 * 64 * 64 * 4
Capture = pytest.CaptureFixture[str]

_TINY_KEYS: dict[str, int | float] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
    "vocab_size": 200,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 96,
}
TINY = {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in _TINY_KEYS.items()}


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


def tokenizer() -> Tokenizer:
    return Tokenizer.from_keys(open_gguf(MODEL).keys)


def run_json(capsys: Capture, *args: str | Path) -> dict[str, Any]:
    ran = main(capsys, "run", "-m", MODEL, "--temp", "0", "--json", *args)
    assert (ran.code, ran.err) == (0, "")
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


# --- run


def test_run_as_a_process() -> None:
    """All of the JSON contract, over two devices, experts in host RAM."""
    ran = overspill("run", "-m", MODEL, *SPILLING, "-p", "Hello, world", "-n", "6", "--temp", "0", "--json", "-b", "32")
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert answer.keys() == {"text", "tokens", "prompt_tokens", "finish_reason", "timings", "plan", "counters"}
    assert answer["text"] == tokenizer().decode(answer["tokens"])
    assert len(answer["tokens"]) == 6
    assert answer["prompt_tokens"] == len(tokenizer().encode("Hello, world"))
    assert answer["finish_reason"] == "length"
    timings = answer["timings"]
    assert (timings["prompt_n"], timings["predicted_n"]) == (answer["prompt_tokens"], 6)
    assert timings["prompt_per_second"] == pytest.approx(1e3 * timings["prompt_n"] / timings["prompt_ms"])
    assert timings["predicted_per_second"] == pytest.approx(1e3 * 5 / timings["predicted_ms"])
    counters = answer["counters"]
    assert (counters["waves"], counters["ubatches"]) == (6, 6)
    assert counters["host_expert_bytes"] == answer["plan"]["host_expert_bytes"] == HOST_EXPERT_BYTES
    assert counters["device_allocations_after_warmup"] == counters["device_syncs_after_warmup"] == 0
    assert counters["busy"].keys() == {"virtual:0", "virtual:1"}
    assert all(0 <= share <= 1 for share in counters["busy"].values())
    assert set(answer["plan"]["layer_device"]) == {"virtual:0", "virtual:1"}


@pytest.mark.parametrize(("schedule", "n_uploads"), [("breadth-first", 2), ("depth-first", 3)])
def test_uploads_of_a_prompt(capsys: Capture, schedule: str, n_uploads: int) -> None:
    """48 tokens: three ubatches, in waves of two and of one."""
    prompt = tokenizer().decode([70] * 48)
    assert len(tokenizer().encode(prompt)) == 48
    options = [*SPILLING, "-b", "32", "--schedule", schedule, "--policy", "all"]
    counters = run_json(capsys, "-p", prompt, "-n", "0", *options)["counters"]
    assert (counters["waves"], counters["ubatches"]) == (2, 3)
    assert counters["uploaded_bytes"] == n_uploads * HOST_EXPERT_BYTES


def test_text_goes_to_stdout_and_the_summary_to_stderr(capsys: Capture) -> None:
    answer = run_json(capsys, "-p", "Hello", "-n", "5", "-dev", "cpu", "-c", "64")
    ran = main(capsys, "run", "-m", MODEL, "--temp", "0", "-p", "Hello", "-n", "5", "-dev", "cpu", "-c", "64")
    assert ran.code == 0
    assert ran.out == answer["text"] + "\n"
    assert "answer  5 tokens" in ran.err
    assert "context 64 cells" in ran.err


def test_prompt_from_file_and_flag(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon\n a time", encoding="utf-8")
    n_expected = len(tokenizer().encode("Once upon\n a time\n\nand then"))
    answer = run_json(capsys, "-f", file, "-p", "and then", "-n", "1", "-dev", "cpu", "-c", "64")
    assert answer["prompt_tokens"] == n_expected


def test_chat_wraps_the_prompt(capsys: Capture) -> None:
    wrapped = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    answer = run_json(capsys, "-p", "Hi", "--chat", "-n", "0", "-dev", "cpu", "-c", "96")
    assert answer["prompt_tokens"] == len(tokenizer().encode(wrapped))
    assert answer["tokens"] == []


def test_stop_string_and_seed(capsys: Capture) -> None:
    options = ["-p", "Hello", "-n", "20", "-dev", "cpu", "-c", "64"]
    whole = run_json(capsys, *options)
    stop = whole["text"][5:7]
    cut = run_json(capsys, *options, "--stop", stop, "-r", "never said")
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop"
    assert cut["timings"]["predicted_per_second"] > 0
    hot = [run_json(capsys, *options, "--temp", "2", "-s", seed)["tokens"] for seed in ("1", "1", "2")]
    assert hot[0] == hot[1] != hot[2]


def test_constrained_answers(capsys: Capture, tmp_path: Path) -> None:
    options = ["-p", "Hello", "-n", "60", "-dev", "cpu", "-c", "128"]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for flags in (["-j", json.dumps(schema)], ["--json-schema-file", file]):
        assert json.loads(run_json(capsys, *options, *flags)["text"])["n"] <= 9
    grammar = tmp_path / "answer.gbnf"
    grammar.write_text('root ::= "yes" | "no"  # one of them\n')
    for flags in (["--grammar", grammar.read_text()], ["--grammar-file", grammar]):
        assert run_json(capsys, *options, *flags)["text"] in ("yes", "no")
    ran = main(capsys, "run", "-m", MODEL, *options, "--json-schema", '{"type": "nosuch"}')
    assert (ran.code, ran.err) == (2, "overspill: error: json_schema: Invalid type: nosuch\n")


def test_samplers_by_flag(capsys: Capture) -> None:
    """top_k 1 alone is greedy at any temperature; without top_k in the list it is not."""
    options = ["-p", "Hello", "-n", "12", "-dev", "cpu", "-c", "64"]
    greedy = run_json(capsys, *options)["tokens"]
    hot = ["--temp", "3", "--top-k", "1", "-s", "5"]
    assert run_json(capsys, *options, *hot)["tokens"] == greedy
    assert run_json(capsys, *options, *hot, "--sampling-seq", "kt")["tokens"] == greedy
    assert run_json(capsys, *options, *hot, "--samplers", "temperature")["tokens"] != greedy
    dry = ["--dry-multiplier", "50", "--dry-allowed-length", "0", "--dry-sequence-breaker", "none"]
    assert run_json(capsys, *options, *dry)["tokens"] != greedy or len(set(greedy)) == len(greedy)


def test_trace_is_drawn(capsys: Capture, tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "trace.png"
    run_json(capsys, "-p", "Hello", "-n", "2", "--trace", trace, *SPILLING, "--policy", "all")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"virtual:0", "virtual:1", "cpu"} <= {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and e["cat"] == "upload") >= HOST_EXPERT_BYTES
    assert main(capsys, "trace", trace, "-o", picture) == Ran(0, "", "")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


# --- plan


def plan_args(*more: str) -> list[str]:
    return ["plan", "--shape", "qwen3-30b-a3b", "--quant", "Q8_0", "--machine", str(MACHINE), "-c", "8192", *more]


def test_plan_for_a_machine_that_is_not_here(capsys: Capture) -> None:
    ran = main(capsys, *plan_args("--device-memory", "12GiB", "--json"))
    assert (ran.code, ran.err) == (0, "")
    plan = json.loads(ran.out)
    assert (plan["arch"], plan["n_ctx"], len(plan["layer_device"])) == ("qwen3moe", 8192, 48)
    gib = 1 << 30
    used = [device["used_bytes"] for device in plan["devices"] if device["name"] != "host"]
    assert all(6 * gib < n <= 12 * gib for n in used)
    # 48 layers of 128 experts of three matrices of 768 x 2048, 34 bytes for 32 values
    expert_bytes = 48 * 128 * 3 * 768 * 2048 // 32 * 34
    assert expert_bytes - 2 * 12 * gib < plan["host_expert_bytes"] < expert_bytes
    predicted = plan["predicted"]
    assert predicted["prompt_tokens"] == 4096
    assert predicted["prompt_per_second"] > predicted["decode_per_second"] > 1
    assert predicted["uploaded_bytes"] >= plan["host_expert_bytes"]
    assert all(0 < share <= 1 for name, share in predicted["busy"].items() if name.startswith("CUDA"))


@pytest.mark.parametrize(("schedule", "n_uploads"), [("breadth-first", 1), ("depth-first", 3)])
def test_plan_prints_the_schedule(capsys: Capture, schedule: str, n_uploads: int) -> None:
    """Three ubatches over two layers: their experts go up once, or once for each."""
    args = plan_args("--layers", "2", "--grain", "1", "-cmoe", "--policy", "all", "--schedule", schedule)
    plain, ran = main(capsys, *args), main(capsys, *args, "--schedule-grid")
    assert f"schedule  {schedule}, grain 1, " in plain.out
    assert "predicted pp4096 " in plain.out
    assert ran.out.startswith(plain.out)
    grid = [row.split() for row in ran.out.removeprefix(plain.out).splitlines()]
    rows = {(row[1], row[2]): row[3:] for row in grid if row}
    for device in ("0", "1"):
        uploads = [cell for cell in rows[device, "upload"] if cell != "."]
        assert uploads == [f"U{device}/0"] * n_uploads
        assert [cell for cell in rows[device, "compute"] if cell[0] == "A"] == [f"A{device}.{m}" for m in range(3)]


def test_plan_of_a_file_on_devices_that_are_here(capsys: Capture) -> None:
    plan = json.loads(main(capsys, "plan", "-m", MODEL, *SPILLING, "--json").out)
    assert plan["host_expert_bytes"] == HOST_EXPERT_BYTES
    assert plan["home"]["blk.0.ffn_up_exps.weight"] == "host"
    assert plan["n_ubatch"] == 16


# --- bench


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


@pytest.mark.usefixtures("tiny_shape")
def test_plan_of_a_shape(capsys: Capture) -> None:
    plan = json.loads(main(capsys, "plan", "--shape", "tiny", "-dev", "virtual:1", "--json").out)
    assert plan["layer_device"] == ["virtual:0"] * 3


# --- perplexity


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


# --- bad input

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
    "h2d_gbps": "0",
}


def test_each_flag_has_a_bad_value() -> None:
    assert BAD_VALUES.keys() == FLAGS.keys() - {"cpu_moe", "force_xdev_sync"}


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
