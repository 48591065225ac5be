"""Who reads how many of the host experts that few tokens meet, so that all are done soonest. Pure.

Experts of a layer are alike, so a part takes a fixed time plus so much for each expert. Handing out one expert after
the other, each to the party that would be done with it first, gives the least possible time of the last one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from overspill.gpu_memory import FEW_TOKENS
from overspill.placement.machine import DeviceSpec, Machine
from overspill.placement.rates import PartyRates

HAND_OFF_US = 20.0
"""A copy's way from one device to another."""

LETTER_US = 8.0
"""A letter's way from one party to another, in recorded steps (`docs/performance.md`)."""

_PART_US = 40.0
"""What an accelerator's part takes beside reading: its start, the products, and passing the result on."""

_CPU_BESIDE_LINKS = 0.27
"""Of the rate at which the CPU reads memory alone, what its products of few tokens reach beside accelerators that read
host memory too, where that was not measured (once it was: about 40 of 150 GB/s with 32 threads)."""

_CPU_AT_MOST = 0.8
"""Of the rate of a link, likewise: rates of samples that caches hold mislead."""


_MOVED = 3.0
"""Bytes of device memory read and written to dequantise an expert, by its own; beyond FEW_TOKENS."""


class ExpertLoad(NamedTuple):
    """An expert of a layer: its bytes, and the FLOPs of all tokens of a wave that meet it."""

    n_bytes: float
    n_flops: float


class Party(NamedTuple):
    """A device, or the host, by number. Microseconds: of letters to it and back; of its part before the first expert;
    of each expert."""

    number: int
    letters_us: float
    fixed_us: float
    expert_us: float

    def work_us(self, n_experts: float) -> float:
        """What so many experts take it; nothing where there are none."""
        return self.fixed_us + n_experts * self.expert_us if n_experts else 0.0

    def done_us(self, n_experts: float) -> float:
        """When the owner has its answer."""
        return self.letters_us + self.work_us(n_experts) if n_experts else 0.0


def divided(parties: Sequence[Party], n_experts: int, *, n_slices: int = 1, whole: int | None = None) -> list[int]:
    """Slices of experts of each party, so that the last one is done soonest; the first of equals gets more.

    whole: number of a party that takes whole experts only.
    """
    counts, n_left = [0] * len(parties), n_experts * n_slices
    at_a_time = [n_slices if party.number == whole else 1 for party in parties]
    while n_left:
        able = [i for i, n in enumerate(at_a_time) if n <= n_left]
        soonest = min(able, key=lambda i: parties[i].done_us((counts[i] + at_a_time[i]) / n_slices))
        counts[soonest] += at_a_time[soonest]
        n_left -= at_a_time[soonest]
    return counts


def slowest_us(parties: Sequence[Party], counts: Sequence[float]) -> float:
    """When the last one is done."""
    return max(party.done_us(n) for party, n in zip(parties, counts, strict=True))


def parties_of(
    machine: Machine,
    owner: int,
    helpers: Collection[int],
    readers: Collection[int],
    n_tokens: int,
    expert: ExpertLoad,
) -> list[Party]:
    """The owner of a layer, first, and those that help it, as they fare while all of `readers` read at once.

    Whether the host is among the helpers decides which of the measured rates hold.
    """
    rates, host = rates_for(machine, readers, n_tokens), machine.host_index
    links = rates.links_beside_cpu_gbps if host in helpers else rates.links_gbps
    parties = []
    for number in (owner, *helpers):
        letters = 0.0 if number == owner else 2 * LETTER_US
        fixed = rates.cpu_call_us if number == host else _PART_US
        read_us = expert.n_bytes / (rates.cpu_gbps if number == host else links[number]) / 1e3
        expert_us = read_us
        if n_tokens > FEW_TOKENS and number == host:
            expert_us = max(read_us, expert.n_flops / machine.cpu_gflops / 1e3)
        elif n_tokens > FEW_TOKENS:  # what a device reads is dequantised and multiplied when all of it is there
            expert_us += _product_us(machine.devices[number], expert)
        parties.append(Party(number, letters, fixed, expert_us))
    return parties


def _product_us(device: DeviceSpec, expert: ExpertLoad) -> float:
    """Of an expert that many tokens meet; what a few take is in the rates, or in `_PART_US`."""
    return _MOVED * expert.n_bytes / device.weights_gbps / 1e3 + expert.n_flops / device.tflops / 1e6


def rates_for(machine: Machine, readers: Collection[int], n_tokens: int) -> PartyRates:
    """The measured rates at so many tokens or the next more; without any, what is likely for these readers."""
    if machine.party_rates:
        enough = (rates for rates in machine.party_rates if rates.n_tokens >= n_tokens)
        return next(enough, machine.party_rates[-1])
    together = machine.h2d_total_gbps / max(1, len(readers))
    links = tuple(min(device.h2d_gbps, together) for device in machine.devices)
    cpu = min(machine.cpu_gbps * _CPU_BESIDE_LINKS, _CPU_AT_MOST * min(links))
    return PartyRates(n_tokens, links, links, cpu, machine.call_us)


def n_experts_met(n_expert: int, n_used: int, n_tokens: int) -> float:
    """Experts of a layer that at least one of so many tokens picks, if they pick uniformly: the mean."""
    return n_expert * (1.0 - (1.0 - n_used / n_expert) ** n_tokens) if n_expert else 0.0


def text_of_uniform(n_tokens: int) -> float:
    """Of the experts that so many tokens would meet if they picked uniformly, those that tokens of one text do: their
    hidden states are alike. Fitted to a model of random weights (docs/performance.md)."""
    return min(0.8, 0.2 + 0.05 * math.log2(n_tokens))
