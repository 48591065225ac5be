"""When the CPU computes a part of the experts of a short prompt: where it makes the wave shorter, and never else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.bench.synth import synthetic
from overspill.errors import UserError
from overspill.models.check import understand
from overspill.needs import needs_on, shape_for
from overspill.options import options_from
from overspill.pipeline.choose import Plan, choose
from overspill.pipeline.schedule import Policy
from overspill.pipeline.simulate import WaveShape, predict
from overspill.placement.budget import MAX_HYBRID_TOKENS
from overspill.placement.machine import DeviceSpec, Machine

GIB = 1 << 30
N_EXPERT = 128


def machine(cpu_gbps: float, n_devices: int = 2) -> Machine:
    specs = tuple(DeviceSpec(f"cuda:{i}", 139 * GIB, 138 * GIB, 53.6, 650.0, GIB, 3000.0) for i in range(n_devices))
    return Machine(110 * GIB, specs, 53.0 * n_devices, 300.0, cpu_gbps, 2000.0, 20.0, 600.0)


def plan_on(machine: Machine, **options: object) -> Plan:
    _, hp, specs, source = understand(synthetic("qwen3-30b-a3b", quant="Q8_0"))
    chosen = options_from({"cpu_moe": True, "n_ctx": 4096, **options})
    shape = shape_for(machine, chosen, source, hp, specs)
    return choose(shape, machine, chosen, needs_on(machine, chosen, hp, specs))


def rate(plan: Plan, n_tokens: int, **changes: object) -> float:
    wave = WaveShape.of_prompt(n_tokens, plan.placement.n_ubatch)
    schedule = replace(plan.schedule, **changes)
    return n_tokens / predict(plan.shape, plan.machine, plan.layout, wave, schedule).wave_us * 1e6


def test_a_part_for_the_cpu_beats_the_floor_of_the_links() -> None:
    """30.8 GB over 106 GB/s are 0.29 s, 440 tokens/s: a CPU that reads 27 GB/s beside them takes a fifth of it."""
    plan = plan_on(machine(cpu_gbps=100.0))
    chosen = plan.schedule_for(128)
    assert chosen.policy is Policy.HYBRID
    assert N_EXPERT // 8 <= chosen.n_on_cpu <= N_EXPERT // 4
    assert rate(plan, 128) < 445 < 500 < rate(plan, 128, policy=Policy.HYBRID, n_on_cpu=chosen.n_on_cpu)
    wave = WaveShape.of_prompt(128, plan.placement.n_ubatch)
    full = predict(plan.shape, plan.machine, plan.layout, wave, plan.schedule).uploaded_bytes
    share = 1 - chosen.n_on_cpu / N_EXPERT
    assert plan.predict(wave).uploaded_bytes == pytest.approx(share * full)


@pytest.mark.parametrize("n_tokens", [33, 128, 300, 512])
@pytest.mark.parametrize("cpu_gbps", [1.0, 30.0, 150.0])
def test_what_is_chosen_is_no_slower_than_sending_all_up(cpu_gbps: float, n_tokens: int) -> None:
    plan = plan_on(machine(cpu_gbps))
    chosen, n = plan.schedule_for(n_tokens), 1 << (n_tokens - 1).bit_length()
    assert rate(plan, n, policy=chosen.policy, n_on_cpu=chosen.n_on_cpu) >= rate(plan, n)


def test_a_slow_cpu_and_long_prompts_get_no_part() -> None:
    assert plan_on(machine(cpu_gbps=1.0)).schedule_for(128).policy is Policy.ALL
    plan = plan_on(machine(cpu_gbps=100.0))
    assert plan.schedule_for(MAX_HYBRID_TOKENS + 1).policy is Policy.ALL
    assert plan.step_schedule(8).policy is Policy.SPREAD
    assert plan.without_spread().schedule_for(128).policy is not Policy.HYBRID


def test_a_users_word_counts() -> None:
    fast, slow = machine(cpu_gbps=100.0), machine(cpu_gbps=1.0)
    assert plan_on(fast, policy="all").schedule_for(128).policy is Policy.ALL
    assert plan_on(fast, schedule="breadth-first").schedule_for(128).policy is Policy.ALL
    forced = plan_on(slow, policy="hybrid")
    assert forced.schedule_for(128).policy is Policy.HYBRID
    assert forced.schedule_for(128).n_on_cpu >= 1
    assert forced.schedule_for(2048).policy is Policy.ALL


def test_slabs_that_hold_no_layer_are_refused() -> None:
    with pytest.raises(UserError, match="--policy hybrid"):
        plan_on(machine(cpu_gbps=100.0), policy="hybrid", slab_mib=100)
