"""What few tokens do with experts in host RAM: whatever the simulation finds quickest, in waves and in steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.options import Options
from overspill.pipeline.choose import Plan, choose
from overspill.pipeline.rows import MOST_READ
from overspill.pipeline.schedule import Policy
from overspill.pipeline.simulate import WaveShape, predict
from overspill.placement.budget import KernelNeeds
from overspill.placement.machine import Machine
from overspill.placement.rates import PartyRates
from tests.pure.placement_models import MIB, make_machine, make_shape

N_LAYER, N_EXPERT, N_USED = 8, 64, 4
SHAPE = replace(
    make_shape(N_LAYER, n_expert=N_EXPERT, n_expert_used=N_USED, expert_bytes=N_EXPERT * 5 * MIB),
    flops_per_token=(N_USED * 5e6,) * N_LAYER,
    attention_flops=(0.0,) * N_LAYER,
)
MACHINE = replace(make_machine(24, 24), issue_us=600.0, cpu_gflops=2000.0)


def plan(machine: Machine = MACHINE, n_spread: int = 16, **options: object) -> Plan:
    needs = KernelNeeds(n_spread_tokens=n_spread, takes_steps=True)
    return choose(SHAPE, machine, Options(cpu_moe=True, n_ctx=512, **options), lambda n: needs)


def all_policies(made: Plan, wave: WaveShape) -> dict[Policy, float]:
    schedules = [replace(made.schedule, policy=p) for p in (Policy.ALL, Policy.SELECTED, Policy.CPU)]
    n = sum(wave.n_tokens)
    if n <= made.n_spread_tokens:
        schedules.append(made.step_schedule(n))
    found: dict[Policy, float] = {}
    for s in schedules:
        us = predict(SHAPE, made.machine, made.layout, wave, s).wave_us
        found[s.policy] = min(us, found.get(s.policy, us))
    return found


@pytest.mark.parametrize("n_spread", [0, 4, 16])
@pytest.mark.parametrize("cpu_gbps", [1.0, 100.0, 2000.0])
@pytest.mark.parametrize("issue_us", [0.0, 600.0])
def test_every_small_wave_takes_the_quickest_way(n_spread: int, cpu_gbps: float, issue_us: float) -> None:
    made = plan(replace(MACHINE, cpu_gbps=cpu_gbps, issue_us=issue_us), n_spread)
    for n in (2, 4, 8, 16, 32):
        wave = WaveShape.of_prompt(n, made.placement.n_ubatch)
        us = all_policies(made, wave)
        assert us[made.schedule_for(n).policy] == min(us.values())
        as_step = step_us(made, n) if n <= (n_spread or 32) else min(us.values())
        assert made.predict(wave).wave_us == min(as_step, *us.values())
        assert (made.step_rows(n, n) > 0) == (as_step < min(us.values()))


def step_us(made: Plan, n: int) -> float:
    """Of a short prompt that is computed as a step."""
    return predict(SHAPE, made.machine, made.layout, WaveShape((n,), is_step=True), made.step_schedule(n)).wave_us


@pytest.mark.parametrize("cpu_gbps", [1.0, 100.0, 2000.0])
def test_every_step_that_is_not_shared_out_takes_the_quickest_way(cpu_gbps: float) -> None:
    made = plan(replace(MACHINE, cpu_gbps=cpu_gbps), 16)
    for n in (1, 8, 16):
        assert made.step_schedule(n).policy is Policy.SPREAD
    us = all_policies(made, WaveShape.of_step(32, sum(made.reference.n_tokens)))
    assert us[made.step_schedule(32).policy] == min(us.values())


def test_each_policy_wins_where_it_should() -> None:
    """A CPU that reads like VRAM; no CPU to speak of, and few experts met; all experts met by 32 tokens of 64 / 4."""
    slow = replace(MACHINE, cpu_gbps=0.5, cpu_gflops=1.0, issue_us=0.0)
    assert plan(replace(MACHINE, cpu_gbps=2000.0, cpu_gflops=1e5), 0).schedule_for(2).policy is Policy.CPU
    assert plan(slow, 0).schedule_for(2).policy is Policy.SELECTED
    assert plan(slow, 0).schedule_for(128).policy is Policy.ALL


def test_who_waits_for_ids_issues_nothing_meanwhile() -> None:
    """Selected experts of each layer are known only when its router has run: no upload of a layer overlaps another."""
    made = plan(replace(MACHINE, issue_us=0.0), 0)
    wave, selected = WaveShape((2,)), replace(made.schedule, policy=Policy.SELECTED)
    met = N_EXPERT * (1 - (1 - N_USED / N_EXPERT) ** 2)
    upload_us = N_LAYER * met * 5 * MIB / 50e9 * 1e6
    assert predict(SHAPE, made.machine, made.layout, wave, selected).wave_us > upload_us


def test_a_user_who_says_the_policy_gets_it() -> None:
    for policy in ("all", "selected", "cpu"):
        made = plan(MACHINE, 16, policy=policy)
        assert {made.schedule_for(n).policy for n in (1, 8, 32)} == {Policy(policy)}
        assert {made.step_schedule(n).policy for n in (1, 8, 32)} == {Policy(policy)}
    made = plan(MACHINE, 16, policy="spread")
    assert {made.schedule_for(n).policy for n in (1, 8, 16)} == {Policy.SPREAD}


# --- steps are replayed: no launches by the host


def test_a_step_takes_its_slowest_part_letters_kernels_and_start_and_no_launches() -> None:
    """Two links of 50 GB/s, no CPU: 4 experts of 5 MiB, two each, in 209.7 us; two letters, 20 us each."""
    rates = (PartyRates(1, (50.0, 50.0), (50.0, 50.0), 1e-3, 10.0),)
    made = plan(replace(MACHINE, party_rates=rates))
    assert made.step_schedule(1).shares == (((0, 2), (1, 2)), ((1, 2), (0, 2)))
    step = made.predict(WaveShape.of_step(1, 100)).wave_us
    share_us = 2 * 5 * MIB / 50e9 * 1e6
    layer = 38.0 + share_us + 2 * 20.0
    assert N_LAYER * layer + 800 < step < N_LAYER * (layer + 150) + 800
    issued = predict(SHAPE, made.machine, made.layout, WaveShape((1,), 100), made.schedule_for(1)).wave_us
    assert issued > N_LAYER * 600.0


def test_short_prompts_are_priced_as_steps_and_long_ones_as_waves() -> None:
    """Where launches cost much; up to the step's rows, unless these would read too many cells; never with states."""
    made = plan(n_spread=64)
    for n, n_rows in ((2, 2), (3, 4), (17, 24), (32, 32), (33, 0)):
        assert made.step_rows(n, n) == n_rows
    assert made.predict(WaveShape.of_prompt(32, 128)).wave_us == step_us(made, 32)
    wave = WaveShape.of_prompt(33, 128)
    assert made.predict(wave) == predict(SHAPE, made.machine, made.layout, wave, made.schedule_for(33))
    assert [made.step_rows(n, MOST_READ // n) for n in (8, 9)] == [8, 0]
    recurrent = replace(made, shape=replace(SHAPE, state_bytes=(0,) * (N_LAYER - 1) + (8,)))
    assert recurrent.step_rows(2, 2) == 0
    assert plan(n_spread=64, policy="all").step_rows(2, 2) == 0


def test_resident_steps_are_priced_as_replayed() -> None:
    machine = replace(MACHINE, devices=tuple(replace(d, tflops=1e6) for d in MACHINE.devices))
    needs = KernelNeeds(takes_steps=True)
    made = choose(SHAPE, machine, Options(n_ctx=512), lambda n: needs)
    assert not made.has_host_experts
    step = made.predict(WaveShape.of_step(1, 100)).wave_us
    assert N_LAYER * 34 + 600 < step < N_LAYER * 34 + 600 + 200
