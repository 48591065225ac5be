"""`overspill info` and `overspill info --check`: what they say, on good files and on the oracle's 90 bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overspill.commands.info import check_file, info_dict, info_text
from overspill.gguf import GgufFile, open_gguf
from tests.helpers import gguf_cases as cases
from tests.helpers import gguf_files as files
from tests.helpers.cli import Ran, main, overspill
from tests.helpers.gguf_cases import CASES, Case
from tests.helpers.gguf_files import base
from tests.helpers.plain import DATA

MODEL = DATA / "models" / "qwen3moe.gguf"
# Where both answers are right, these are refused; the others load.
REFUSED = {
    *("missing-tokenizer", "unknown-tokenizer-model", "unknown-tokenizer-pre", "nested-array", "nested-array-deep"),
    *("extra-tensor", "long-tensor-name"),
}
WARNED = {"eos-out-of-range": "eos_token_id"}
MIB = 1 << 20


def mentions(message: str, case: Case) -> bool:
    return any(all(word in message for word in words) for words in case.words)


@pytest.fixture(scope="module")
def good() -> Ran:
    """The cost of a check that finds nothing."""
    return overspill("info", "--check", MODEL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_check_of_each_file(case: Case, tmp_path: Path, good: Ran) -> None:
    path, name = cases.write(tmp_path, case.file), case.file.removesuffix(".gguf")
    ran = overspill("info", "--check", path)
    if case.expect == cases.FAIL or name in REFUSED:
        assert ran.refusal.startswith(str(tmp_path))
        assert mentions(ran.refusal, case), ran.refusal
    else:
        assert ran.code == 0, ran
        assert ran.out.startswith(f"{path}: ok: qwen3moe, 2 layers, 4 experts, ")
        assert ran.out.count("\n") == 1
        assert WARNED.get(name, "") in ran.err
        assert ran.err.count("\n") == (name in WARNED)
    assert ran.cpu_s < good.cpu_s + 1
    assert ran.peak_bytes < 200 * MIB


def test_check_needs_no_torch(good: Ran) -> None:
    expected = f"{MODEL}: ok: qwen3moe, 4 layers, 8 experts, 51 tensors of 2.14 MiB in 1 file, 512 tokens\n"
    assert (good.code, good.out, good.err) == (0, expected, "")
    assert good.peak_bytes < 100 * MIB


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the file's size matter: this one has 2 TiB."""
    path = cases.write(tmp_path, "ok-base.gguf")
    with path.open("r+b") as file:
        file.truncate(1 << 41)
    monkeypatch.setattr(GgufFile, "bytes_of", lambda self, name: pytest.fail(f"{name} is read"))
    assert check_file(path).startswith(f"{path}: ok")
    assert info_dict(path)["parts"] == [{"file": str(path), "n_bytes": 1 << 41}]


def test_dict() -> None:
    info = info_dict(MODEL)
    file = open_gguf(MODEL)
    assert info == {
        "file": str(MODEL),
        "parts": [{"file": str(MODEL), "n_bytes": 2255136}],
        "gguf_version": 3,
        "name": file.keys.text("general.name"),
        "architecture": "qwen3moe",
        "is_supported": True,
        "n_bytes": sum(info.n_bytes for info in file.tensors.values()),
        "n_expert_bytes": 4 * 8 * 3 * 64 * 64 * 4,
        "n_params": info["n_bytes"] // 4,
        "n_tensors": 51,
        "n_layer": 4,
        "n_embd": 64,
        "n_head": 4,
        "n_head_kv": 2,
        "n_expert": 8,
        "n_expert_used": 2,
        "n_ctx_train": 512,
        "n_vocab": 512,
        "types": {"F32": {"n_tensors": 51, "n_params": info["n_params"], "n_bytes": info["n_bytes"]}},
        "tokenizer": {"model": "gpt2", "pre": "qwen2", "n_tokens": 512},
        "has_chat_template": True,
    }


def test_types_are_counted_and_parts_listed(tmp_path: Path) -> None:
    path = cases.write(tmp_path, "split-00001-of-00003.gguf")
    info = info_dict(path)
    assert [Path(part["file"]).name for part in info["parts"]] == [f"split-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    assert info["types"] == {
        "Q8_0": {"n_tensors": 16, "n_params": 69632, "n_bytes": 69632 // 32 * 34},
        "F32": {"n_tensors": 11, "n_params": 544, "n_bytes": 544 * 4},
    }
    text = info_text(path)
    assert "experts       4, 2 per token; 25.50 KiB, 34% of the model" in text
    assert [line.split() for line in text.splitlines() if " Q8_0 " in line] == [
        ["Q8_0", "16", "69.63", "K", "72.25", "KiB"]
    ]
    assert text.count("split-0000") == 4


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("unknown-architecture.gguf", "architecture  frobnicator9000 (not supported)"),
        ("missing-architecture.gguf", "architecture  None (not supported)"),
        ("zero-tensors.gguf", "size          0 B in 0 tensors, 0 parameters"),
        ("missing-tokenizer.gguf", "tokenizer     none"),
        ("experts-zero.gguf", "experts       none"),
        ("huge-context.gguf", "context       4,294,967,295"),
    ],
)
def test_info_describes_what_cannot_be_loaded(file: str, shown: str, tmp_path: Path) -> None:
    assert shown in info_text(cases.write(tmp_path, file))


def test_values_that_differ_by_layer(tmp_path: Path) -> None:
    document = base().with_key("qwen3moe.attention.head_count_kv", files.numbers(4, "I", [0, 1]))
    path = tmp_path / "a.gguf"
    path.write_bytes(document.to_bytes())
    assert info_dict(path)["n_head_kv"] == [0, 1]
    assert "for keys and values 0 to 1" in info_text(path)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(main(capsys, "info", MODEL, "--json").out) == info_dict(MODEL)
    assert main(capsys, "info", MODEL).out == info_text(MODEL) + "\n"
    assert main(capsys, "info", MODEL, "--check").out == check_file(MODEL) + "\n"
    assert main(capsys, "info", "nowhere.gguf").refusal.startswith("nowhere.gguf: cannot be opened")
    assert "Missing argument" in main(capsys, "info").refusal
