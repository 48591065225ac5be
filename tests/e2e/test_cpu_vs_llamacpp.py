"""The comparison's own arithmetic: order of the programs, pooling, ratios, what is written. No peer is needed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import cpu_vs_llamacpp as bench  # noqa: E402

OURS = [
    {"n_prompt": 512, "n_gen": 0, "samples_ts": [300.0, 310.0]},
    {"n_prompt": 0, "n_gen": 64, "samples_ts": [20.0, 22.0]},
]
PEER = {"pp_samples": [100.0, 100.0], "tg_samples": [40.0, 44.0], "version": "peer 1", "system_info": "AVX"}
SIZES = ["-p", "512", "-n", "64", "-r", "2", "-t", "2", "-o", "json"]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    seen: list[list[str]] = []

    def output(command: list[str]) -> str:
        seen.append(command)
        return json.dumps(OURS if "bench" in command else PEER)

    monkeypatch.setattr(bench, "_output", output)
    return seen


def test_rounds_alternate_and_results_are_written(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "some-model.gguf"
    model.write_bytes(b"12345")
    options = ["-m", str(model), "-t", "2", "-r", "2", "--rounds", "3", "--peer-python", "other-python"]
    assert bench.main([*options, "--out", str(tmp_path / "sub" / "out.json")]) == 0
    assert ["bench" in command for command in commands] == [True, False, False, True, True, False]
    assert commands[0][1:] == ["bench", "-m", str(model), *SIZES]
    assert commands[1][0] == "other-python"
    document = json.loads((tmp_path / "sub" / "out.json").read_text())
    result = document["results"][0]
    assert result["samples"]["overspill"] == {"pp": [300.0, 310.0] * 3, "tg": [20.0, 22.0] * 3}
    assert result["samples"]["llama.cpp"]["tg"] == [40.0, 44.0] * 3
    assert result["ratio"]["pp"][0] == pytest.approx(3.05)
    assert result["ratio"]["tg"][0] == pytest.approx(0.5)
    # Six samples, half at 20 and half at 22: standard deviation sqrt(6 / 5); twice as much at 40 and 44.
    assert result["ratio"]["tg"][1] == pytest.approx(0.5 * (2 * (6 / 5) / 21**2) ** 0.5)
    assert result["model_bytes"] == 5
    assert [len(values) for values in result["foreign_cpus"].values()] == [3, 3]
    assert document["llama.cpp"] == {"version": "peer 1", "system_info": "AVX"}
    assert str(tmp_path) not in json.dumps(document)
    assert "some-model.gguf" in document["command"]
    assert "pp512" in capsys.readouterr().out


def test_missing_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["-m", str(tmp_path / "none.gguf"), "-t", "2"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "none.gguf: no such file" in message


def test_failed_program_is_one_line_with_its_last_words() -> None:
    with pytest.raises(bench.UserError, match="exit status 3: last words"):
        bench._output([sys.executable, "-c", "import sys; print('first\\nlast words', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(bench.UserError, match="no-such-program: cannot be run"):
        bench._output(["no-such-program"])


def test_watch_counts_what_no_child_burnt() -> None:
    """The machine's other work cannot be silenced here, so the two halves of the difference are tested alone."""
    before = bench._children_seconds()
    bench._output([sys.executable, "-c", "import time\nwhile time.process_time() < 0.4: pass"])
    assert bench._children_seconds() - before > 0.35
    watch = bench.CpuWatch()
    start = time.process_time()
    while time.process_time() - start < 0.3:
        pass
    assert watch.foreign_cpus() > 0.1
