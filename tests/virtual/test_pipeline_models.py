"""Every architecture on three devices, breadth-first, experts in host RAM: bit for bit the plain model, issued and
replayed.
"""

from __future__ import annotations

import pytest
import torch

from overspill.pipeline.schedule import Order, Policy
from tests.helpers.pipe import EXACT_POLICIES, Shape, cut_waves, pipe, run_all
from tests.helpers.reference import reference_logits
from tests.models.fixtures import MODELS, Case


@pytest.mark.parametrize(("size", "n_tokens"), [(1, 18), (3, 25), (16, 40), (40, 40)])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_three_devices(case: Case, size: int, n_tokens: int) -> None:
    hp, ids = case.model.hparams, case.expected("input_ids_0").tolist()[:n_tokens]
    prompts = ids, ids[::-1]
    sizes = [min(size, n_tokens - i) for i in range(0, n_tokens, size)]
    expected = [reference_logits(case.model, cut_waves(p, sizes, 1), n_cells=n_tokens) for p in prompts]
    moe = frozenset(i for i in range(hp.n_layer) if hp.is_moe(i))
    shape = Shape(3, grain=1, slab_experts=3, host_layers=moe)
    with pipe(case.source, shape, n_ubatch=size, n_ubatches=len(sizes), n_cells=n_tokens, chaos_seed=size) as p:
        policies = [*(EXACT_POLICIES if moe else [Policy.ALL] * 2), Policy.ALL]
        for i, policy in enumerate(policies):
            p.poison()
            logits = run_all(p, prompts[i % 2], sizes, p.schedule(Order.BREADTH_FIRST, policy), 1)
            assert torch.equal(logits, expected[i % 2]), (i, policy)
