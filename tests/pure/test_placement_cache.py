"""Memory for experts that devices keep: counted, never more than asked for or left, refused where it is of no use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.errors import UserError
from overspill.options import options_from
from overspill.pipeline.choose import Plan, choose
from overspill.placement.budget import KernelNeeds
from overspill.placement.report import as_dict, report
from tests.pure.placement_models import MIB, make_machine, make_shape

N_LAYER, N_EXPERT, N_USED, EXPERT = 8, 16, 4, 5 * MIB
SHAPE = make_shape(N_LAYER, n_expert=N_EXPERT, n_expert_used=N_USED, expert_bytes=N_EXPERT * EXPERT)
NEEDS = KernelNeeds(n_spread_tokens=16)


def plan(*, free_gib: tuple[float, ...] = (4, 4), needs: KernelNeeds = NEEDS, **options: object) -> Plan:
    chosen = options_from({"cpu_moe": True, "n_ctx": 512, "n_wave": 128, "n_ubatch": 128, **options})
    return choose(SHAPE, make_machine(*free_gib), chosen, lambda n_ubatch: needs)


def test_a_number_is_shared_out_over_the_devices_that_own_the_layers() -> None:
    made = plan(moe_cache_mib="400")
    assert made.placement.n_cached == (9, 9)  # 200 MiB on each, four layers of 20 MiB for every expert kept, less state
    assert plan(moe_cache_mib="401").placement.n_cached == (10, 10)
    assert {*made.cache_bytes} == {*range(N_LAYER)}
    assert all(9 * EXPERT <= n <= 9 * EXPERT + 192 for n in made.cache_bytes.values())


@pytest.mark.parametrize("moe_cache_mib", ["200", "333", "auto"])
@pytest.mark.parametrize("free_gib", [(0.5, 0.7), (4, 4), (2,)])
def test_it_is_counted_and_fits(moe_cache_mib: str, free_gib: tuple[float, ...]) -> None:
    made = plan(free_gib=free_gib, moe_cache_mib=moe_cache_mib)
    budgets = made.placement.budgets[:-1]
    for i, budget in enumerate(budgets):
        layers = made.placement.layers_of(i)
        assert budget.cache_bytes == sum(made.cache_bytes[l] + 32 * N_EXPERT for l in layers)
        assert budget.used_bytes <= budget.free_bytes
    if moe_cache_mib != "auto":
        assert sum(b.cache_bytes for b in budgets) <= int(moe_cache_mib) * MIB
    record = as_dict(SHAPE, made.placement)["devices"]
    assert [d["cache_bytes"] for d in record] == [b.cache_bytes for b in made.placement.budgets]
    assert "experts of each layer with experts in host RAM" in "\n".join(report(SHAPE, made.placement))


def test_auto_takes_what_is_left_and_no_more_than_all() -> None:
    assert plan(moe_cache_mib="auto").placement.n_cached == (N_EXPERT, N_EXPERT)
    tight = plan(free_gib=(0.5, 0.5), moe_cache_mib="auto").placement
    assert N_USED <= tight.n_cached[0] < N_EXPERT
    left = tight.budgets[0].spare_bytes
    assert left < 4 * EXPERT + 4 * 192


def test_none_by_default_nor_where_everything_is_resident() -> None:
    assert not any(plan().placement.n_cached)
    assert not any(plan(cpu_moe=False, moe_cache_mib="300").placement.n_cached)
    assert not any(plan(cpu_moe=False, moe_cache_mib="auto").placement.n_cached)


def test_fewer_slots_than_a_token_uses_are_refused() -> None:
    with pytest.raises(UserError, match=r"--moe-cache-mib 100: .* would keep 2 experts .* uses 4; give at least (\d+)"):
        plan(moe_cache_mib="100")
    try:
        plan(moe_cache_mib="100")
    except UserError as error:
        enough = str(error).split("at least ")[1].split(",")[0]
    assert plan(moe_cache_mib=enough).placement.n_cached == (N_USED, N_USED)


def test_auto_is_silent_where_too_little_is_left() -> None:
    assert not any(plan(free_gib=(0.2, 0.2), moe_cache_mib="auto").placement.n_cached)


@pytest.mark.parametrize("options", [{"needs": KernelNeeds()}, {"policy": "cpu"}])
def test_refused_where_nothing_can_use_it(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="--moe-cache-mib 300: needs GPUs"):
        plan(moe_cache_mib="300", **options)  # type: ignore[arg-type]
    assert not any(plan(moe_cache_mib="auto", **options).placement.n_cached)  # type: ignore[arg-type]
    assert any(plan(moe_cache_mib="300", policy="spread").step_schedule(1).n_cached)


@pytest.mark.parametrize("value", ["-1", "some", "1.5"])
def test_values_that_mean_nothing(value: str) -> None:
    with pytest.raises(UserError, match="--moe-cache-mib"):
        options_from({"moe_cache_mib": value})


def test_flags_give_the_same_cache_again() -> None:
    made = plan(moe_cache_mib="auto", free_gib=(1, 1)).placement
    assert made.flags[-2] == "--moe-cache-mib"
    again = plan(moe_cache_mib=made.flags[-1], free_gib=(1, 1)).placement
    assert again.n_cached == made.n_cached


@pytest.mark.parametrize("moe_cache_mib", ["0", "400", "auto"])
def test_prompts_expect_to_find_what_slots_hold(moe_cache_mib: str) -> None:
    made = plan(moe_cache_mib=moe_cache_mib)
    missing = 1 - sum(made.placement.n_cached) / (2 * N_EXPERT)
    assert made.predicted.uploaded_bytes == pytest.approx(missing * N_LAYER * N_EXPERT * EXPERT)
    assert made.schedule_for(128).n_cached == made.placement.n_cached
    assert made.without_spread().schedule_for(128).n_cached == ()


def test_a_prompt_that_its_uploads_bound_is_as_much_faster() -> None:
    light = replace(SHAPE, flops_per_token=(1e6,) * N_LAYER, attention_flops=(0.0,) * N_LAYER)
    plans = [plan(moe_cache_mib=mib, free_gib=(4,), policy="spread") for mib in ("0", "400")]
    assert plans[1].placement.n_cached == (9,)
    took = [replace(made, shape=light).prompt_us(128) for made in plans]
    assert took[1] == pytest.approx(took[0] * 7 / N_EXPERT, rel=0.1)


def test_steps_expect_fewer_experts_from_host_memory() -> None:
    made = plan(moe_cache_mib="auto")
    assert made.step_schedule(1).n_cached == made.placement.n_cached
    assert made.uncached(1).n_cached == ()
    assert made.schedule.n_cached == made.placement.n_cached, "prompts go without what is kept"
    assert sum(n for _, n in made.uncached(1).shares[0]) == N_USED
    assert sum(n for _, n in made.step_schedule(1).shares[0]) == 1
