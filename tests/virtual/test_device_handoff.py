"""The self-test of direct copies finds each way in which they go wrong, names the pair, and blames no other."""

from __future__ import annotations

import logging
from itertools import permutations

import pytest

from overspill.device.factory import open_devices
from overspill.device.handoff import failing_pairs
from overspill.device.lane import Lane
from tests.helpers.broken import Fault, broken_devices

MIB = 1 << 20


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("pair", list(permutations(range(3), 2)))
def test_the_broken_pair_is_found(pair: tuple[int, int], fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    devices = broken_devices(3, fault, pair, total_bytes=MIB)
    with caplog.at_level(logging.WARNING):
        found = failing_pairs(devices)
    devices.close()
    assert found == {pair}
    (record,) = caplog.records
    assert f"hand-off virtual:{pair[0]} -> virtual:{pair[1]}: " in record.getMessage()
    assert "-hs 0" in record.getMessage()


@pytest.mark.parametrize("spec", ["cpu", "virtual:1", "virtual:4", "null:3"])
def test_sound_devices_pass_and_nothing_is_left(spec: str, caplog: pytest.LogCaptureFixture) -> None:
    devices = open_devices(spec, memory="1MiB")
    before = [sum(device.allocated_bytes.values()) for device in devices.all]
    assert failing_pairs(devices) == frozenset()
    assert [sum(device.allocated_bytes.values()) for device in devices.all] == before == [0] * len(devices.all)
    devices.close()
    assert caplog.records == []


def test_both_directions_are_tried_small_and_large_idle_and_under_load() -> None:
    devices = open_devices("virtual:2", memory="1MiB")
    for device in devices.all:
        device.start_trace()
    failing_pairs(devices)
    for device in devices.accelerators:
        spans = device.take_trace()
        sizes = [span.n_bytes for span in spans if span.lane is Lane.HAND_OFF]
        assert sizes == [4096, MIB // 8, MIB // 8, 4096]
        assert sum(span.label == "hand-off test: load" for span in spans) == 4  # of two rounds in each direction
    devices.close()


def test_delays_are_no_fault() -> None:
    devices = open_devices("virtual:2", memory="64KiB", chaos_seed=3)
    assert failing_pairs(devices) == frozenset()
    devices.close()
