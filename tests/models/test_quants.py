"""Files in every usual type against llama.cpp on the same weights dequantised: what float activations must give."""

from __future__ import annotations

import numpy as np
import pytest

from overspill.gguf import open_gguf
from overspill.kernels import Ops, cpu, ref
from tests.helpers.plain import SHARED, plain_logits, plain_model

FILES = sorted(path.stem for path in (SHARED / "quants").glob("*.gguf")) or ["none"]


@pytest.mark.parametrize("ops", [ref.OPS, cpu.OPS], ids=["ref", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_quantised_files(name: str, ops: Ops) -> None:
    if name == "none":
        pytest.skip(f"there is no {SHARED}/quants")
    expected = np.load(SHARED / "quants" / f"{name}.npz")
    model = plain_model(open_gguf(SHARED / "quants" / f"{name}.gguf"), ops)
    logits = plain_logits(model, expected["input_ids_0"], 16).numpy()
    np.testing.assert_allclose(logits, expected["dequant_f32_logits_0"], rtol=0, atol=2e-4)
