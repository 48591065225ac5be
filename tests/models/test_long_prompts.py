"""Prompts beyond what the fixtures hold: many windows, chunks, blocks and original contexts long.

`long.npz` has token ids, and for some rows of each model what llama.cpp v0.5.0 computes of so many of them (on the CPU,
keys and values in float32, no flash attention). `gpt-oss` is held to less: angles of thousands of turns are rounded, in
both.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.plain import DATA, plain_logits
from tests.models.fixtures import MODELS

TOLERANCES = {"gpt-oss": 5e-3, "gemma3": 1e-2}
N_UBATCH = {"gpt-oss": 100, "llama4": 512}
CASES = {case.name: case for case in MODELS}

with np.load(DATA / "models" / "long.npz") as arrays:
    LONG = dict(arrays)


@pytest.mark.parametrize("name", sorted(key.removesuffix("_rows") for key in LONG if key.endswith("_rows")))
def test_long_prompts(name: str) -> None:
    ids, rows = LONG["ids"][: LONG[f"{name}_n"]], LONG[f"{name}_rows"]
    logits = plain_logits(CASES[name].model, ids, N_UBATCH.get(name, 64)).numpy()
    np.testing.assert_allclose(logits[rows], LONG[f"{name}_logits"], rtol=0, atol=TOLERANCES.get(name, 5e-4))
