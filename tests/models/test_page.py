"""docs/models.md says which check runs on which fixture: the table is made here, from the tests themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

from overspill.bench.shapes import SHAPES
from overspill.models.registry import _SPECS
from tests.gpu import test_models_gpu
from tests.models import test_fixtures
from tests.models.fixtures import MODELS, Case
from tests.virtual import test_pipeline_models, test_pipeline_recurrent, test_pipeline_steps_models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text()

FIXTURES = {
    "deepseek2": ["deepseek_v2-lite", "deepseek_v2-qlora", "deepseek_v3"],
    "deepseek4": ["deepseek_v4"],
    "gemma3": ["gemma3"],
    "glm4moe": ["glm4_moe", "glm4_moe-air", "glm4_moe-mtp"],
    "gpt-oss": ["gpt-oss"],
    "granitemoe": ["granitemoe"],
    "kimi-linear": ["kimi_linear"],
    "llama": ["llama", "mixtral"],
    "llama4": ["llama4"],
    "minimax-m2": ["minimax_m2"],
    "olmoe": ["olmoe"],
    "qwen2": ["qwen2"],
    "qwen2moe": ["qwen2moe"],
    "qwen3": ["qwen3", "qwen3-yarn"],
    "qwen35": ["qwen35"],
    "qwen35moe": ["qwen35moe", "qwen35moe-mtp"],
    "qwen3moe": ["qwen3moe"],
    "qwen3next": ["qwen3next", "qwen3next-mtp"],
    "qwen3vlmoe": [],
    "qwen4exp": ["qwen4_exp"],
}
HAVE_STATES = {"deepseek4", "kimi-linear", "qwen35", "qwen35moe", "qwen3next", "qwen4exp"}
Tests = list[Callable[..., None]]
CHECKS: dict[str, list[Tests]] = {
    "logits, greedy ids, ubatch sizes": [
        [test_fixtures.test_logits],
        [test_fixtures.test_any_ubatch_size],
        [test_fixtures.test_greedy_tokens],
    ],
    "three devices": [[test_pipeline_models.test_three_devices]],
    "recorded steps": [
        [
            test_pipeline_steps_models.test_steps_of_every_architecture,
            test_pipeline_steps_models.test_steps_that_look_at_all_there_could_be,
        ]
    ],
    "kept states": [[test_pipeline_recurrent.test_a_sequence_goes_on_from_a_kept_state_and_from_no_other]],
    "on GPUs": [[test_models_gpu.test_float32], [test_models_gpu.test_bfloat16]],
}
"""For each check the tests that it takes: one of every list."""

SIZES = {1, 3, 16, 64, 133}


def values_of(test: Callable[..., None], *names: str) -> list[object]:
    """What a test is parametrised with under one of these names."""
    marks: Iterable[pytest.Mark] = getattr(test, "pytestmark", [])
    return [value for mark in marks if mark.name == "parametrize" and mark.args[0] in names for value in mark.args[1]]


def fixtures_of(tests: Tests) -> set[str]:
    """Those that one of the tests runs on."""
    return {v.name if isinstance(v, Case) else str(v) for test in tests for v in values_of(test, "case", "name")}


def cell(fixtures: list[str], check: str, arch: str) -> str:
    if check == "kept states" and arch not in HAVE_STATES:
        return "no states"
    done = [name for name in fixtures if all(name in fixtures_of(tests) for tests in CHECKS[check])]
    return "all" if done == fixtures and fixtures else ", ".join(done) or "none"


def presets(arch: str) -> str:
    return ", ".join(name for name, keys in SHAPES.items() if keys["general.architecture"] == arch)


def table() -> str:
    rows = [["architecture", "fixtures", *CHECKS, "presets"]]
    rows.append(["---"] * len(rows[0]))
    for arch, fixtures in sorted(FIXTURES.items()):
        checks = [cell(fixtures, check, arch) for check in CHECKS]
        rows.append([f"`{arch}`", ", ".join(fixtures) or "none", *checks, presets(arch)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_table_is_what_the_tests_do() -> None:
    assert table() in PAGE, f"put this into docs/models.md:\n{table()}"


def test_every_architecture_and_every_fixture_has_a_row() -> None:
    assert FIXTURES.keys() == _SPECS.keys()
    assert sorted(chain(*FIXTURES.values())) == sorted(case.name for case in MODELS)


@pytest.mark.parametrize("arch", FIXTURES)
def test_every_architecture_passes_every_check(arch: str) -> None:
    """A fixture of each; qwen3vlmoe's text is qwen3moe's. And a preset."""
    assert presets(arch)
    assert arch == "qwen3vlmoe" or all(cell(FIXTURES[arch], check, arch) != "none" for check in CHECKS)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_rows_say_the_architecture_of_the_file(case: Case) -> None:
    (arch,) = (arch for arch, fixtures in FIXTURES.items() if case.name in fixtures)
    assert case.source.keys.arch == arch
    assert case.model.hparams.has_states == (arch in HAVE_STATES)


def test_ubatch_sizes() -> None:
    sizes = {
        *values_of(test_fixtures.test_logits, "n_ubatch"),
        *values_of(test_fixtures.test_any_ubatch_size, "n_ubatch"),
    }
    assert sizes >= SIZES
    assert set(values_of(test_pipeline_recurrent.test_any_ubatch_size_on_three_devices, "n_ubatch")) >= SIZES


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`tests/([\w/]+)\.py::(\w+)`", PAGE))))
def test_tests_that_are_named_exist(named: tuple[str, str]) -> None:
    module, test = named
    assert callable(getattr(import_module("tests." + module.replace("/", ".")), test))
