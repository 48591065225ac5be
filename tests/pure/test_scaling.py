"""What a device more is worth, by simulation: breadth-first where links are the bound, and the choice of ubatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from overspill.options import Options
from overspill.pipeline.choose import Plan, choose
from overspill.placement.budget import KernelNeeds
from overspill.placement.machine import GPU_ISSUE_US, Machine
from tests.pure.placement_models import MIB, make_machine, make_shape

N_LAYER, LINK_GBPS = 48, 50.0
SHAPE = replace(
    make_shape(N_LAYER, expert_bytes=600 * MIB, n_ctx_train=65536),
    flops_per_token=(6e7,) * N_LAYER,
    attention_flops=(0.0,) * N_LAYER,
)


def machine(n_devices: int, issue_us: float = 0.0) -> Machine:
    """Links that share nothing, and weights that are read in no time."""
    made = make_machine(*(100.0,) * n_devices)
    devices = tuple(replace(device, read_gbps=1e5) for device in made.devices)
    return replace(made, devices=devices, h2d_total_gbps=n_devices * LINK_GBPS, issue_us=issue_us)


def planned(on: Machine, **options: object) -> Plan:
    return choose(SHAPE, on, Options(cpu_moe=True, n_ctx=65536, **options))


def test_breadth_first_grows_with_the_links_and_never_falls() -> None:
    """A device has layers / N of them, or one more: with 48 layers, 5 devices are worth 4.8."""
    rates = []
    for n in range(1, 9):
        made = planned(machine(n), schedule="breadth-first", grain=1, n_ubatch=256)
        rates.append(1024 / made.prompt_us(1024))
    for n, rate in enumerate(rates, 1):
        n_worth = N_LAYER / -(-N_LAYER // n)
        assert 0.9 * n_worth <= rate / rates[0] <= 1.01 * n_worth, n
    assert rates == sorted(rates)


@pytest.mark.parametrize("n_devices", [2, 4, 8])
def test_the_ubatch_that_the_plan_chooses_serves_long_prompts_too(n_devices: int) -> None:
    """A prompt of one or two ubatches waits for links alone and cannot tell; with many the host is the bound."""
    on, n_long = machine(n_devices, GPU_ISSUE_US), 24576
    chosen = planned(on)
    fixed = [planned(on, n_ubatch=n) for n in (2048, 4096)]
    assert chosen.prompt_us(n_long) < 1.05 * min(plan.prompt_us(n_long) for plan in fixed)
    assert chosen.prompt_us(4096) < 2.0 * min(plan.prompt_us(4096) for plan in fixed)


def test_a_prompt_of_several_waves_starts_each_where_the_last_one_ended() -> None:
    shape = replace(SHAPE, attention_flops=(1e5,) * N_LAYER)
    made = choose(shape, machine(2), Options(cpu_moe=True, n_ctx=4096, n_ubatch=500, n_wave=900))
    pieces = [made.prompt_us(n, first) for first, n in ((0, 1000), (1000, 1000), (2000, 300))]
    assert made.prompt_us(2300) == pytest.approx(sum(pieces))
    assert pieces[0] < pieces[1]


def recording(n_bytes: int) -> Callable[[int], KernelNeeds]:
    return lambda n_ubatch: KernelNeeds(recordings=(True, False), recording_bytes=n_bytes)


def test_prompts_are_recorded_where_the_host_is_the_bound() -> None:
    on = machine(8, GPU_ISSUE_US)
    options = Options(cpu_moe=True, n_ctx=65536, n_ubatch=2048)
    issued, made = choose(SHAPE, on, options), choose(SHAPE, on, options, recording(MIB))
    assert not issued.schedule.is_recorded
    assert made.schedule.is_recorded
    assert made.prompt_us(32768) < 0.5 * issued.prompt_us(32768)


def test_prompts_are_not_recorded_where_experts_would_have_to_go_for_it() -> None:
    """On one device the host is not the bound, and a layer more that goes up costs a prompt its upload."""
    on = replace(machine(1, GPU_ISSUE_US), devices=tuple(replace(d, tflops=5.0) for d in machine(1).devices))
    for n_bytes, is_recorded in ((MIB, True), (2400 * MIB, False)):
        made = choose(SHAPE, _full(on), Options(n_ctx=4096), recording(n_bytes))
        assert made.has_host_experts
        assert made.schedule.is_recorded == is_recorded


def _full(on: Machine) -> Machine:
    """With room for about half of the experts."""
    (device,) = on.devices
    half = 24 * 600 * MIB
    return replace(on, devices=(replace(device, total_bytes=half, free_bytes=half),))
