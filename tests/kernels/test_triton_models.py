"""Whole models on the GPU's op table, in Triton's interpreter: what each architecture asks of it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE, HAS_CUDA, few_programs  # isort: skip (before Triton)

from overspill.cache.cells import CellType
from overspill.kernels.triton import make_ops
from tests.helpers.plain import Plain, plain_model
from tests.models.fixtures import MODELS, Case

N = 6


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="models in host memory: tests/gpu has the same on a GPU")
@pytest.mark.parametrize("case", [case for case in MODELS if case.name != "deepseek_v2-lite"], ids=str)
def test_models(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of four tokens and two single ones, in float32."""
    few_programs(monkeypatch)
    model = plain_model(case.source, make_ops(DEVICE, dtype=torch.float32))
    plain, ids = Plain(model, N), case.expected("input_ids_2").tolist()
    rows = [plain(ids[first:last]) for first, last in ((0, 4), (4, 5), (5, 6))]
    np.testing.assert_allclose(torch.cat(rows).numpy(), case.expected("hf_logits_2")[:N], rtol=0, atol=case.hf)


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="models in host memory: tests/gpu has the same on a GPU")
@pytest.mark.parametrize("cells", [CellType.F16, CellType.Q8_0])
@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "deepseek_v3"])
def test_cells(name: str, cells: CellType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with smaller cells: near the reference's, with cells of that kind."""
    few_programs(monkeypatch)
    case = Case(name)
    ids, logits = case.expected("input_ids_2").tolist(), []
    for model in (plain_model(case.source, make_ops(DEVICE, dtype=torch.float32)), case.model):
        plain = Plain(model, N, cells)
        logits.append(torch.cat([plain(ids[first:last]) for first, last in ((0, 4), (4, 5), (5, 6))]))
    found, wanted = logits
    assert (found - wanted).norm() <= (2e-3 if cells is CellType.Q8_0 else 1e-3) * wanted.norm()
