"""`overspill run`: what it prints, its JSON, samplers and constraints by flag, and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overspill.commands.sampling import fields_of_model
from overspill.gguf import open_gguf
from overspill.text.tokenizer import Tokenizer
from tests.helpers import gguf_files
from tests.helpers.cli import HOST_EXPERT_BYTES, MODEL, SPILLING, Capture, Ran, main, overspill


def tokenizer() -> Tokenizer:
    return Tokenizer.from_keys(open_gguf(MODEL).keys)


def run_json(capsys: Capture, *args: str | Path) -> dict[str, Any]:
    ran = main(capsys, "run", "-m", MODEL, "--temp", "0", "--json", *args)
    assert (ran.code, ran.err) == (0, "")
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


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


def test_the_file_says_how_tokens_are_chosen_and_flags_say_otherwise(capsys: Capture, tmp_path: Path) -> None:
    said = {
        "top_k": gguf_files.i32(1),
        "temp": gguf_files.f32(3.0),
        "penalty_last_n": gguf_files.i32(-1),
        "sequence": gguf_files.string("top_k;temperature"),
    }
    document = gguf_files.base()
    for key, value in said.items():
        document = document.with_key(f"general.sampling.{key}", value)
    file = tmp_path / "model.gguf"
    file.write_bytes(document.to_bytes())

    def tokens(*flags: str) -> set[tuple[int, ...]]:
        ran = [main(capsys, "run", "-m", file, "-p", "a", "-n", "8", "-s", s, "--json", *flags) for s in ("1", "2")]
        return {tuple(json.loads(r.out)["tokens"]) for r in ran}

    assert len(tokens()) == 1
    assert len(tokens("--top-k", "0")) == 2
    assert fields_of_model(open_gguf(file).keys) == {
        "top_k": 1,
        "temperature": 3.0,
        "repeat_last_n": 2**31 - 1,
        "samplers": ["top_k", "temperature"],
    }


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
