"""The search against every possible split of the layers, and its use of overrides."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product

import pytest

from overspill.errors import UserError
from overspill.options import Options
from overspill.placement.plan import Placement, place
from overspill.placement.shape import ModelShape
from tests.pure.placement_models import GIB, MIB, make_machine, make_shape

EXPERTS = 900 * MIB
SIZES = {"n_ubatch": 512, "n_wave": 4096}


def every_split(shape: ModelShape, free_gib: list[float], grain: int) -> int:
    """The least possible bytes of the busiest link, over all counts of layers with the full-size ring."""
    n, machine = shape.n_layer, make_machine(*free_gib)
    best = shape.total_bytes
    for counts in product(range(n + 1), repeat=len(free_gib)):
        if sum(counts) != n:
            continue
        options = Options(tensor_split=tuple(map(float, counts)), n_gpu_layers="all", slab_mib=900)
        with suppress(UserError):
            placement = place(shape, machine, options, grain=grain, **SIZES)
            best = min(best, max(placement.upload_bytes))
    return best


@pytest.mark.parametrize("seed", range(12))
def test_busiest_link_is_within_a_layer_of_the_best_split(seed: int) -> None:
    rng = random.Random(seed)
    n_device = rng.choice([2, 3])
    shape = make_shape(rng.randint(6, 10), expert_bytes=EXPERTS, dense_bytes=100 * MIB, n_lead=rng.choice([0, 2]))
    free_gib = [rng.choice([2.5, 4.0, 5.5]) for _ in range(n_device)]
    grain = rng.choice([1, 2, 10])
    found = place(shape, make_machine(*free_gib), Options(slab_mib=900), grain=grain, **SIZES)
    best = every_split(shape, free_gib, grain)
    assert best <= max(found.upload_bytes) <= best + EXPERTS


@pytest.mark.parametrize(
    ("free_gib", "n_ctx", "most"),
    [
        ((24,) * 8, 262144, 10),
        ((28,) * 8, 262144, 8),
        ((24, 16) * 4, 262144, 12),
        ((24, 16) * 4, 32768, 6),
        ((48, 24, 24, 24, 16, 16, 12, 12), 32768, 6),
        ((48, 24, 24, 24, 16, 16, 12, 12), 262144, 12),
    ],
)
@pytest.mark.parametrize("grain", [1, 4, 12])
def test_busiest_link_of_large_machines(free_gib: tuple[float, ...], n_ctx: int, most: int, grain: int) -> None:
    """94 layers of 2 GiB of experts; `most` layers is what the search reaches, more would be a step back."""
    shape = make_shape(
        94, n_lead=3, expert_bytes=2 * GIB, dense_bytes=200 * MIB, n_expert=128, kv_per_cell=4096, n_ctx_train=262144
    )
    placement = place(shape, make_machine(*free_gib), Options(n_ctx=n_ctx), grain=grain, **SIZES)
    assert max(placement.upload_bytes) <= most * 2 * GIB
    assert all(budget.spare_bytes >= 0 for budget in placement.budgets)


def placed(options: Options) -> Placement:
    return place(make_shape(12, expert_bytes=EXPERTS), make_machine(24, 24), options, grain=1, **SIZES)


def test_output_follows_a_last_layer_that_was_moved() -> None:
    assert placed(Options()).output_device == 1
    assert placed(Options(override_tensor=(r"blk\.11\.=CUDA0",))).output_device == 0
    assert placed(Options(override_tensor=(r"blk\.11\.=CPU",))).output_device == 1


def test_n_cpu_moe_fills_up_beside_experts_that_are_pinned_to_the_host() -> None:
    options = Options(override_tensor=(r"blk\.([02468])\..*exps=CPU",), n_cpu_moe=9, tensor_split=(1, 1))
    placement = placed(options)
    assert placement.upload_bytes == (5 * EXPERTS, 4 * EXPERTS)


def test_flags_of_a_literal_plan_keep_n_cpu_moe() -> None:
    flags = placed(Options(fit="off", n_cpu_moe=3)).flags
    assert flags[:6] == ("-fit", "off", "-ngl", "13", "-c", "4096")
    assert flags[-2:] == ("-ncmoe", "3")
    assert "-ncmoe" not in placed(Options(n_cpu_moe=3)).flags
