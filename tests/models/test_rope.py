"""Angles of extended contexts, against what transformers 5.24 computes from the models' configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.rope import frequencies
from overspill.models.specs.rope import RopeParams

YARN = RopeParams(n_rot=64, base=1e4, scaling="yarn", factor=40.0, n_ctx_orig=4096, attn_factor=1.0)
DEEPSEEK_V3 = YARN, [1.0, 0.1, 0.02687936, 0.0055, 0.0007905694, 2.5e-05, 3.333804e-06]
KIMI_K2 = (
    replace(YARN, base=5e4, factor=32.0, beta_fast=1.0, beta_slow=1.0),
    [1.0, 0.06687403, 0.01729363, 0.004472136, 3.614047e-05, 9.34593e-06, 8.764413e-07],
)
QWEN3 = (
    replace(YARN, n_rot=128, base=1e6, factor=4.0, n_ctx_orig=32768),
    [1.0, 0.03162278, 0.005375321, 0.0006029411, 4.445699e-05, 7.905694e-06, 3.102344e-07],
)
GPT_OSS = (
    replace(YARN, base=150000.0, factor=32.0),
    [1.0, 0.05081327, 0.007015714, 0.0005809475, 1.818834e-05, 4.099978e-06, 3.023511e-07],
)


@pytest.mark.parametrize(("rope", "expected"), [DEEPSEEK_V3, KIMI_K2, QWEN3, GPT_OSS])
def test_yarn(rope: RopeParams, expected: list[float]) -> None:
    turns, n = frequencies(rope), rope.n_rot // 2
    found = [float(turns[i]) for i in (0, n // 4, 3 * n // 8, n // 2, 5 * n // 8, 3 * n // 4, n - 1)]
    assert found == pytest.approx(expected, rel=2e-6)


def keys(more: Mapping[str, float | int | str]) -> Keys:
    given = {"general.architecture": "x", "x.context_length": 4096, "x.rope.scaling.type": "yarn"}
    return Keys.of({**given, **{f"x.rope.{name}": value for name, value in more.items()}}, "made up").scoped("x")


def test_the_file_says_which_channels_are_stretched() -> None:
    rope = RopeParams.from_keys(keys({"scaling.yarn_beta_fast": 1.0}), 64)
    assert (rope.beta_fast, rope.beta_slow) == (1.0, 1.0)
    rope = RopeParams.from_keys(keys({"scaling.yarn_beta_slow": 0.5}), 64)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 0.5)


def test_a_factor_without_scaling_does_nothing() -> None:
    rope = RopeParams.from_keys(keys({"scaling.type": "none", "scaling.factor": 4.0}), 64)
    assert torch.equal(frequencies(rope), frequencies(replace(rope, scaling="linear", factor=1.0)))
    assert rope.magnitude == 1.0


@pytest.mark.parametrize("name", ["scaling.factor", "scale_linear"])
def test_linear_scaling_divides_all_angles(name: str) -> None:
    rope = RopeParams.from_keys(keys({"scaling.type": "linear", name: 4.0}), 64)
    torch.testing.assert_close(frequencies(rope) * 4, frequencies(replace(rope, factor=1.0)))
    assert rope.magnitude == 1.0


DEFECTS: list[tuple[str, float | int | str, str]] = [
    ("scaling.type", "longrope", "is longrope: only none, linear and yarn are supported"),
    ("scaling.factor", -2.0, "is -2: must not be below 0"),
    ("scaling.original_context_length", 0, "is 0: yarn needs at least 1"),
    ("scaling.yarn_beta_fast", 0.0, "is 0: must be above 0"),
    ("scaling.yarn_beta_slow", -1.0, "is -1: must be above 0"),
    ("dimension_count", 33, "is 33: must be even, above 0 and at most the head size, 64"),
    ("dimension_count", 66, "is 66: must be even, above 0 and at most the head size, 64"),
    ("freq_base", 1.0, "is 1: must be above 1"),
]


@pytest.mark.parametrize(("name", "value", "message"), DEFECTS)
def test_defects_are_named(name: str, value: float | int | str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"x.rope.{name} {message}")) as error:
        RopeParams.from_keys(keys({name: value}), 64)
    assert "\n" not in str(error.value)
