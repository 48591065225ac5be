"""The README's ten steps name things that exist, and its figures are those of the results."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
STEPS = README.split("## How a prompt flows")[1].split("More:")[0]
NAMES = sorted(set(re.findall(r"`([a-z_]+(?:\.[A-Za-z_]+)+)`", STEPS)))


def test_ten_steps() -> None:
    assert re.findall(r"^(\d+)\. ", STEPS, re.MULTILINE) == [str(i) for i in range(1, 11)]
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(import_module(f"overspill.{module}"), attribute)


def test_headline_figures_are_the_measured_ones() -> None:
    rows = map(json.loads, (ROOT / "benchmarks/results/h200-x2/vs_llamacpp.jsonl").read_text().splitlines())
    (row,) = (r for r in rows if r["setup"] == "2 GPUs, experts host" and r["test"] == "pp53248")
    ours, theirs = (sum(row[name]) / len(row[name]) for name in ("overspill", "llama.cpp"))
    assert f"{ours:.0f} tokens/s" in README
    assert f"{ours / theirs:.1f} times what llama.cpp" in README


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target
