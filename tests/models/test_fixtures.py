"""Every architecture against two oracles: transformers and llama.cpp, on models made by llama.cpp's converter."""

from __future__ import annotations

import numpy as np
import pytest

from overspill.gguf import open_gguf
from tests.helpers.plain import DATA, plain_logits, plain_model

MODELS = ["llama", "mixtral", "qwen2", "qwen3", "qwen3-yarn", "qwen3moe"]
TOLERANCE = 2e-4


@pytest.mark.parametrize("n_ubatch", [1000, 16])
@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, prompt: int, n_ubatch: int) -> None:
    expected = np.load(DATA / "models" / f"{name}.npz")
    model = plain_model(open_gguf(DATA / "models" / f"{name}.gguf"))
    logits = plain_logits(model, expected[f"input_ids_{prompt}"], n_ubatch).numpy()
    for oracle in ("hf", "llamacpp"):
        np.testing.assert_allclose(logits, expected[f"{oracle}_logits_{prompt}"], rtol=0, atol=TOLERANCE)
