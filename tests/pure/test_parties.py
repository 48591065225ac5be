"""Shares of experts: every one has a party, no other division is sooner, a slow party gets none."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.pipeline.parties import (
    ExpertLoad,
    Party,
    divided,
    n_experts_met,
    parties_of,
    rates_for,
    slowest_us,
    text_of_uniform,
)
from overspill.pipeline.schedule import Order, Policy, WaveSchedule
from overspill.pipeline.slabs import cut_slabs
from overspill.pipeline.split import Layout
from overspill.pipeline.spread import spread
from overspill.placement.machine import Machine
from overspill.placement.rates import PartyRates
from tests.pure.placement_models import MIB, make_machine, make_shape

US = st.floats(0.0, 1e4)
PARTIES = st.lists(st.builds(Party, st.integers(0, 9), US, US, st.floats(1e-3, 1e4)), min_size=1, max_size=4)


@given(PARTIES, st.integers(0, 9))
def test_no_other_division_is_sooner(parties: list[Party], n_experts: int) -> None:
    counts = divided(parties, n_experts)
    assert sum(counts) == n_experts
    others = [c for c in product(range(n_experts + 1), repeat=len(parties)) if sum(c) == n_experts]
    assert slowest_us(parties, counts) == min(slowest_us(parties, c) for c in others)


def test_by_hand() -> None:
    """Owner 10 us an expert, CPU 5 us, 8 before the first, 4 for letters: of 9, 4 take 40 us there, 5 take 37 here."""
    owner, cpu = Party(0, 0.0, 0.0, 10.0), Party(1, 4.0, 8.0, 5.0)
    assert divided([owner, cpu], 1) == [1, 0]
    assert divided([owner, cpu], 2) == [1, 1]
    assert divided([owner, cpu], 9) == [4, 5]
    assert slowest_us([owner, cpu], [3, 5]) == 4 + 8 + 25
    assert slowest_us([owner, cpu], [4, 5]) == 4 * 10
    assert slowest_us([owner, cpu], [0, 0]) == 0


def test_experts_that_tokens_meet() -> None:
    assert n_experts_met(128, 8, 1) == pytest.approx(8)
    assert n_experts_met(128, 8, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert n_experts_met(0, 0, 3) == 0


# --- of a whole machine

N_LAYER, N_EXPERT, N_USED = 6, 16, 4
SHAPE = make_shape(N_LAYER, n_expert=N_EXPERT, n_expert_used=N_USED, expert_bytes=N_EXPERT * 5 * MIB)
SCHEDULE = WaveSchedule(Order.BREADTH_FIRST)
RATES = st.floats(0.5, 500.0)


def layout(n_devices: int) -> Layout:
    slabs = cut_slabs(N_EXPERT, [5 * MIB], N_EXPERT * 5 * MIB, at_most=N_EXPERT)
    return Layout(n_devices, tuple(i % n_devices for i in range(N_LAYER)), 0, (slabs,) * N_LAYER)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    n = draw(st.integers(1, 4))
    measured = [
        PartyRates(
            n_tokens,
            draw(st.tuples(*[RATES] * n)),
            draw(st.tuples(*[RATES] * n)),
            draw(RATES),
            draw(st.floats(0.1, 3000.0)),
        )
        for n_tokens in draw(st.sampled_from([(), (1,), (1, 4, 16)]))
    ]
    return replace(make_machine(*[24.0] * n), party_rates=tuple(measured))


@given(machines(), st.integers(1, 512), st.booleans(), st.booleans())
def test_all_experts_are_shared_out_and_never_later_than_by_links(
    machine: Machine, n: int, alone: bool, is_step: bool
) -> None:
    n_devices, host = len(machine.devices), machine.host_index
    found = spread(SHAPE, machine, layout(n_devices), SCHEDULE, n, spreads_alone=alone, is_step=is_step)
    assert found.policy is Policy.SPREAD
    for owner, shares in enumerate(found.shares[:N_LAYER]):
        (first, _), *helpers = shares
        assert first == owner
        assert all(count > 0 for _, count in helpers)
        n_met = round(n_experts_met(N_EXPERT, N_USED, n))
        n_flops = SHAPE.expert_flops(0) * n / n_experts_met(N_EXPERT, N_USED, n)
        expert = ExpertLoad(5 * MIB, n_flops)
        assert sum(count for _, count in shares) == n_met
        others = () if alone else tuple(i for i in range(n_devices) if i != owner)
        assert {p for p, _ in helpers} <= {*others, host}

        def needed(helpers: tuple[int, ...], counts: dict[int, int], owner: int = owner) -> float:
            parties = parties_of(machine, owner, helpers, (owner, *others), n, expert)  # noqa: B023
            return slowest_us(parties, [counts.get(p.number, 0) for p in parties])

        by_links = divided(parties_of(machine, owner, others, (owner, *others), n, expert), n_met)
        with_host = (*others, host) if host in dict(shares) else others
        links_us = needed(others, dict(zip((owner, *others), by_links, strict=True)))
        assert needed(with_host, dict(shares)) <= links_us


def test_gpus_dequantise_what_many_tokens_meet() -> None:
    """5 MB read at 50 GB/s, 15 MB moved at 1000 GB/s, and a GFLOP at 100 TFLOP/s."""
    device = replace(make_machine(24).devices[0], tflops=100.0, read_gbps=1000.0)
    machine = replace(make_machine(24), devices=(device,), party_rates=(PartyRates(16, (50.0,), (50.0,), 50.0, 10.0),))
    few, many = (parties_of(machine, 0, (), (0,), n, ExpertLoad(5e6, 1e9)) for n in (16, 17))
    assert [p.expert_us for p in (*few, *many)] == pytest.approx([100.0, 125.0])


def test_the_cpu_reads_or_multiplies_whichever_takes_longer() -> None:
    """5 MB at 50 GB/s; a GFLOP at 5 TFLOP/s, or at 1."""
    rates = (PartyRates(16, (50.0,), (50.0,), 50.0, 10.0),)
    machine = replace(make_machine(24), party_rates=rates, cpu_gflops=5000.0)
    found = [
        parties_of(m, 0, (1,), (0,), 17, ExpertLoad(5e6, 1e9)) for m in (machine, replace(machine, cpu_gflops=1e3))
    ]
    assert [parties[-1].expert_us for parties in found] == pytest.approx([200.0, 1000.0])


def test_the_cpu_takes_part_for_few_tokens_and_in_steps() -> None:
    machine = replace(make_machine(24, 24), party_rates=(PartyRates(16, (50.0,) * 2, (50.0,) * 2, 500.0, 10.0),))
    few, many = (spread(SHAPE, machine, layout(2), SCHEDULE, n, spreads_alone=False).shares for n in (16, 17))
    assert all(2 in dict(shares) for shares in few[:N_LAYER] if shares)
    assert all(2 not in dict(shares) for shares in many)
    machine = replace(machine, cpu_gflops=1e5)
    step = spread(SHAPE, machine, layout(2), SCHEDULE, 32, spreads_alone=False, is_step=True)
    assert all(2 in dict(shares) for shares in step.shares[:N_LAYER] if shares)


def test_a_cpu_too_slow_for_one_expert_gets_none_and_leaves_the_links_at_their_own_rates() -> None:
    slow = PartyRates(1, (50.0, 50.0), (50.0, 50.0), 0.5, 10.0)
    machine = replace(make_machine(24, 24), party_rates=(slow,))
    assert spread(SHAPE, machine, layout(2), SCHEDULE, 1, spreads_alone=False).shares == (
        ((0, 2), (1, 2)),
        ((1, 2), (0, 2)),
    )
    disturbing = replace(slow, cpu_gbps=50.0, links_beside_cpu_gbps=(5.0, 5.0))
    shared = spread(SHAPE, replace(machine, party_rates=(disturbing,)), layout(2), SCHEDULE, 1, spreads_alone=False)
    assert all(2 not in dict(shares) for shares in shared.shares)
    quick = replace(slow, cpu_gbps=100.0)
    shared = spread(SHAPE, replace(machine, party_rates=(quick,)), layout(2), SCHEDULE, 1, spreads_alone=False)
    assert shared.shares[0] == ((0, 1), (1, 1), (2, 2))


def test_rates_of_the_least_number_of_tokens_that_is_enough() -> None:
    measured = tuple(PartyRates(n, (50.0,), (40.0,), float(n), 10.0) for n in (1, 4, 16))
    machine = replace(make_machine(24), party_rates=measured)
    found = [rates_for(machine, (0,), n).n_tokens for n in (1, 2, 4, 5, 16, 17)]
    assert found == [1, 4, 4, 16, 16, 16]


def test_without_measured_rates_links_share_what_all_reach_together() -> None:
    """Two links of 50 GB/s reach 60 together; the CPU, 100 alone, gets 27."""
    machine = replace(make_machine(24, 24), h2d_total_gbps=60.0)
    rates = rates_for(machine, (0, 1), 1)
    assert rates.links_gbps == rates.links_beside_cpu_gbps == (30.0, 30.0)
    assert rates.cpu_gbps == pytest.approx(24.0)
    assert rates_for(machine, (0,), 1).links_gbps == (50.0, 50.0)
    assert rates_for(machine, (0,), 1).cpu_gbps == pytest.approx(27.0)


@pytest.mark.parametrize(
    ("n_tokens", "met"), [(17, 0.276), (32, 0.353), (64, 0.439), (128, 0.519), (512, 0.67), (2048, 0.79)]
)
def test_texts_meet_about_as_many_experts_as_was_counted(n_tokens: int, met: float) -> None:
    """Of 128, 8 a token, in 48 layers of random weights; otherwise the CPU is given what it is slower at than links."""
    uniform = n_experts_met(128, 8, n_tokens) / 128
    assert text_of_uniform(n_tokens) * uniform == pytest.approx(met, rel=0.15)
