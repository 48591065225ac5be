"""Whole models on the GPU's op table, in Triton's interpreter: what each architecture asks of it is there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.triton_device import DEVICE, HAS_CUDA  # isort: skip (before Triton)

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.kernels.triton import make_ops
from overspill.models.base import UbatchView, forward
from tests.helpers.plain import plain_model
from tests.models.fixtures import MODELS, Case

N = 6


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="models in host memory: tests/gpu has the same on a GPU")
@pytest.mark.parametrize("case", [case for case in MODELS if case.name != "deepseek_v2-lite"], ids=str)
def test_models(case: Case) -> None:
    """A prompt of four tokens and two single ones, in float32."""
    model = plain_model(case.source, make_ops(DEVICE, dtype=torch.float32))
    shapes = [model.hparams.kv_shape(i) for i in range(model.hparams.n_layer)]
    caches = [KvCache.over(s, [torch.full(dims, torch.nan) for dims in s.tensor_shapes(1, N)]) for s in shapes]
    ids = torch.tensor(case.expected("input_ids_2")[:N])
    rows = []
    for first, last in ((0, 4), (4, 5), (5, 6)):
        positions = torch.arange(first, last, dtype=torch.int32)
        view = UbatchView((Segment(0, first, last - first),), positions)
        rows.append(forward(model, ids[first:last], caches, view))
    np.testing.assert_allclose(torch.cat(rows).numpy(), case.expected("hf_logits_2")[:N], rtol=0, atol=case.hf)
