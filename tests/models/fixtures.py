"""The models that llama.cpp's converter made, and what transformers and llama.cpp compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from overspill.gguf import GgufFile, open_gguf
from overspill.models.base import Model
from tests.helpers.plain import DATA, SHARED, plain_model


@dataclass(frozen=True)
class Case:
    """A model and how far from the two oracles its logits may be."""

    name: str
    hf: float = 2e-4
    llamacpp: float = 2e-4

    def __str__(self) -> str:
        return self.name

    def tolerance(self, oracle: str) -> float:
        return self.hf if oracle == "hf" else self.llamacpp

    @property
    def source(self) -> GgufFile:
        return open_gguf(fixture(f"{self.name}.gguf"))

    @property
    def model(self) -> Model:
        """The model in place on the CPU, the same object each time."""
        return _model(self.name)

    def expected(self, array: str) -> NDArray[np.generic]:
        return _expected(self.name)[array]


@cache
def _model(name: str) -> Model:
    return plain_model(open_gguf(fixture(f"{name}.gguf")))


@cache
def _expected(name: str) -> dict[str, NDArray[np.generic]]:
    with np.load(fixture(f"{name}.npz")) as arrays:
        return dict(arrays)


def fixture(file: str) -> Path:
    """Where the file is; the test is skipped where it is not."""
    for folder in (DATA / "models", SHARED / "models"):
        if (folder / file).exists():
            return folder / file
    pytest.skip(f"{file} is not among tests/data/models, and there is no {SHARED}")


MODELS = [
    Case("llama"),
    Case("mixtral"),
    Case("qwen2"),
    Case("qwen3"),
    Case("qwen3-yarn"),
    Case("qwen3moe"),
    Case("gpt-oss"),
    Case("glm4_moe"),
    Case("glm4_moe-air"),
    Case("glm4_moe-mtp"),
    Case("minimax_m2"),
    Case("olmoe"),
    Case("granitemoe"),
    Case("qwen2moe"),
    Case("deepseek_v2-lite", hf=1e-3, llamacpp=1e-3),
    Case("deepseek_v2-qlora"),
    Case("deepseek_v3"),
    Case("deepseek_v4"),
    Case("llama4"),
    Case("qwen4_exp"),
    Case("gemma3", llamacpp=1e-2),
    Case("qwen3next", hf=1e-3, llamacpp=1e-3),
    Case("qwen3next-mtp", hf=1e-3, llamacpp=1e-3),
    Case("qwen35", hf=1e-3, llamacpp=1e-3),
    Case("qwen35moe", hf=1e-3, llamacpp=1e-3),
    Case("qwen35moe-mtp", hf=1e-3, llamacpp=1e-3),
    Case("kimi_linear", hf=1e-3, llamacpp=1e-3),
]
