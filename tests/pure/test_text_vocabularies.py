"""Token ids against llama.cpp and against the expressions that the models were published with."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from overspill.bench.shapes import SHAPES
from overspill.bench.synth import synthetic
from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.keys import Keys
from overspill.models.check import has_tokenizer, tokenizer_of
from overspill.text import Tokenizer
from overspill.text.pretokenize import PRE_TOKENIZERS
from tests.helpers.gguf_files import string
from tests.helpers.text_vocab import DATA, T, keys_of, own_ids, read_cases, shared, tiny

# name of the .out file -> pre-tokenizers that must give these ids
SAME_IDS = {
    "gpt-2": "gpt-2 olmo granite-docling mpt phi-2 exaone4",
    "llama-bpe": "llama-bpe llama3 llama-v3 lfm2 glm4 chatglm-bpe dbrx smaug-bpe",
    "qwen2": "qwen2 deepseek-r1-qwen megrez hunyuan solar-open grok-2 seed-coder bailingmoe bailingmoe2",
    "qwen35": "qwen35",
    "gpt-4o": "gpt-4o llama4 kanana2 minimax-m2",
    "tekken": "tekken",
    "kimi-k2": "kimi-k2",
    "deepseek-v3": "deepseek-v3 hy_v4 hunyuan-dense joyai-llm",
    "deepseek-llm": "deepseek-llm",
    "deepseek-coder": "deepseek-coder",
    "starcoder": "starcoder refact command-r smollm exaone codeshell",
    "default": "default",
    "exaone-moe": "exaone-moe",
    "superbpe": "superbpe",
    "afmoe": "afmoe",
    "laguna": "laguna",
}
NAMES = [(out, name) for out, names in SAME_IDS.items() for name in names.split()]
REAL = ["llama-bpe", "qwen2", "gpt-2", "deepseek-llm", "deepseek-coder", "llama-spm", "phi-3"]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False)


@pytest.mark.parametrize(("out", "name"), NAMES, ids=[name for _, name in NAMES])
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp_or_of_the_model_itself(out, name, tmp_path):
    tokenizer = Tokenizer.from_keys(keys_of(tiny().with_key(T + "pre", string(name)), tmp_path))
    cases = read_cases(DATA / "tiny.inp", DATA / f"{out}.out")
    own = {int(i): ids for i, ids in own_ids().get(out, {}).items()}
    expected = [own.get(i, ids) for i, (_, ids) in enumerate(cases)]
    assert [plain_ids(tokenizer, text) for text, _ in cases] == expected
    assert all(own[i] != cases[i][1] for i in own), "a listed difference that is none"
    assert [tokenizer.decode(ids) for ids in expected] == [text for text, _ in cases]


RULES = sorted({rule.patterns: name for name, rule in PRE_TOKENIZERS.items()}.values())
RUNS = (
    " " * 30_000 + "x",
    "1" * 30_000 + "x",
    "aÉ" * 15_000,
    "\n " * 15_000,
    "e\u0301" * 15_000,
    "a " * 15_000,
    "'" * 30_000,
)


@pytest.mark.parametrize("name", RULES)
def test_long_runs_take_no_quadratic_time(name, tmp_path):
    tokenizer = Tokenizer.from_keys(keys_of(tiny().with_key(T + "pre", string(name)), tmp_path))
    started = time.thread_time()
    for text in RUNS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.thread_time() - started < 10


def test_ignoring_merges_changes_nothing_for_a_vocabulary_its_merges_can_reach(tmp_path):
    assert PRE_TOKENIZERS["glm4"].ignores_merges
    assert not PRE_TOKENIZERS["chatglm-bpe"].ignores_merges
    assert PRE_TOKENIZERS["glm4"].patterns == PRE_TOKENIZERS["chatglm-bpe"].patterns


@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name):
    path = shared(f"vocab/ggml-vocab-{name}.gguf")
    tokenizer = Tokenizer.from_keys(open_gguf(path).keys)
    cases = read_cases(Path(f"{path}.inp"), Path(f"{path}.out"))
    assert [plain_ids(tokenizer, text) for text, _ in cases] == [ids for _, ids in cases]
    assert [tokenizer.decode(ids) for _, ids in cases] == [text for text, _ in cases]


def test_qwen35_on_the_vocabulary_of_qwen2(tmp_path):
    path = shared("vocab/ggml-vocab-qwen2.gguf")
    data = path.read_bytes()
    old, new = string("qwen2"), string("qwen35")
    at = data.index(T.encode() + b"pre" + old) + len(T) + 3
    changed = tmp_path / "qwen35.gguf"
    changed.write_bytes(data[:at] + new + data[at + len(old) :])
    tokenizer = Tokenizer.from_keys(open_gguf(changed).keys)
    cases = read_cases(*(shared(f"vocab/ggml-vocab-qwen35.gguf.{end}") for end in ("inp", "out")))
    assert [plain_ids(tokenizer, text) for text, _ in cases] == [ids for _, ids in cases]


def test_all_tiny_vocabularies_of_the_fixtures():
    folder = shared("vocab")
    own = own_ids() | dict.fromkeys(("llama4", "minimax-m2"), own_ids()["gpt-4o"])
    paths = sorted(folder.glob("tiny-*.gguf"))
    assert len(paths) == 34
    for path in paths:
        tokenizer = Tokenizer.from_keys(open_gguf(path).keys)
        cases = read_cases(Path(f"{path}.inp"), Path(f"{path}.out"))
        differing = {str(i): plain_ids(tokenizer, text) for i, (text, ids) in enumerate(cases)}
        differing = {i: ids for i, ids in differing.items() if ids != cases[int(i)][1]}
        assert differing == own.get(path.stem.removeprefix("tiny-"), {}), path.name


def test_the_fixtures_own_record_of_differences_holds():
    index = json.loads(shared("vocab/index.json").read_text())
    for name in ("gpt-4o", "llama4"):
        assert index[f"tiny-{name}"]["hf_tokenizers_ids_for_mismatches"] == own_ids()["gpt-4o"]


def test_models_of_the_fixtures_with_special_tokens():
    paths = sorted(shared("models").glob("*.gguf"))
    n_samples = 0
    for path in paths:
        tokenizer = Tokenizer.from_keys(open_gguf(path).keys)
        for case in json.loads(path.with_suffix(".json").read_text())["tokenizer"].get("llama_cpp_tokenize", ()):
            flags = {name: case[name] for name in ("add_special", "parse_special")}
            assert tokenizer.encode(case["text"], **flags) == case["ids"], (path.name, case)
            n_samples += 1
    assert n_samples > 100


@pytest.mark.parametrize("name", ["none", "no_vocab"])
def test_models_without_a_vocabulary(name: str):
    """llama.cpp's names for it: token ids can go in and out."""
    values = SHAPES["gpt-oss-20b"] | {"tokenizer.ggml.model": name}
    source = replace(synthetic("gpt-oss-20b", quant="Q8_0"), keys=Keys.of(values, "a file"))
    assert not has_tokenizer(source)
    with pytest.raises(UserError, match="only token ids can go in and out"):
        tokenizer_of(source)
