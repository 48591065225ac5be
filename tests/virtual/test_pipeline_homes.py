"""A layer's experts give the same bits wherever they live and whoever computes them.

Resident, staged whole, staged as far as the routers name them, dequantised first, half resident, computed by the CPU
in place, or with the whole layer on the CPU: two paths to one result are two chances to lose a factor or a bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from overspill.gguf import open_gguf
from overspill.gguf.source import ModelSource
from overspill.pipeline.schedule import Order, Policy
from tests.helpers.pipe import EXACT_POLICIES, Shape, cut_waves, pipe, run_all
from tests.helpers.plain import DATA, plain_model
from tests.helpers.reference import Reference
from tests.helpers.tiny_moe import N_EXPERT, N_LAYER, tiny_model, tiny_source

RESIDENT = Shape(2, host_layers="none")


def homes(i_layer: int, slab_experts: int) -> Iterator[tuple[Shape, Policy]]:
    """Every way to place one layer's experts, all other layers resident."""
    staged = replace(RESIDENT, host_layers=frozenset({i_layer}), slab_experts=slab_experts)
    yield RESIDENT, Policy.ALL
    yield from ((staged, policy) for policy in EXACT_POLICIES)
    yield replace(staged, mixed_layers="all"), Policy.ALL
    yield replace(RESIDENT, n_layers_on_cpu=i_layer + 1), Policy.ALL


def logits_of(
    source: ModelSource, shape: Shape, policy: Policy, ids: list[int], sizes: tuple[int, ...], *, order: Order
) -> torch.Tensor:
    with pipe(source, shape, n_ubatch=max(sizes), n_ubatches=len(sizes), n_cells=len(ids)) as p:
        p.poison()
        return run_all(p, ids, sizes, p.schedule(order, policy), 1)


@pytest.mark.parametrize("slab_experts", [1, 3, N_EXPERT])
@pytest.mark.parametrize("i_layer", range(N_LAYER))
def test_one_layer_moves_from_home_to_home(i_layer: int, slab_experts: int) -> None:
    """The ubatches give an expert no token, some, and all: the last one has a single token."""
    ids, sizes = [5, 9, 30, 17, 2, 8, 8, 21], (4, 3, 1)
    reference = Reference(tiny_model(), n_cells=len(ids))
    expected = torch.cat(reference.run(cut_waves(ids, sizes, 1)[0]))
    assert len(reference.chosen[2][i_layer]) < N_EXPERT
    for shape, policy in homes(i_layer, slab_experts):
        for widens in (False, True):
            logits = logits_of(
                tiny_source(), replace(shape, widens=widens), policy, ids, sizes, order=Order.BREADTH_FIRST
            )
            assert torch.equal(logits, expected), (shape, policy)


@pytest.mark.parametrize("order", [Order.DEPTH_FIRST, Order.BREADTH_FIRST])
@pytest.mark.parametrize("host_layers", ["even", "odd"])
@pytest.mark.parametrize("path", ["models/qwen3moe.gguf", "models/mixtral.gguf", "files/ok-base.gguf"])
def test_models_with_every_other_layer_on_the_host(path: str, host_layers: str, order: Order) -> None:
    """Float32 experts, and blocks of Q8_0 (`ok-base`)."""
    source = open_gguf(Path(DATA / path))
    ids, sizes = [(13 * i + 2) % 500 for i in range(13)], (6, 6, 1)
    expected = torch.cat(Reference(plain_model(source), n_cells=len(ids)).run(cut_waves(ids, sizes, 1)[0]))
    shape = Shape(2, host_layers=host_layers, slab_experts=3)
    for policy in EXACT_POLICIES:
        assert torch.equal(logits_of(source, shape, policy, ids, sizes, order=order), expected), policy
        mixed = replace(shape, mixed_layers="all")
        assert torch.equal(logits_of(source, mixed, policy, ids, sizes, order=order), expected), policy
