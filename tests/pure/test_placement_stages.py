"""Which devices are stages: shares, main device, unknown and tiny memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.errors import UserError
from overspill.options import Options, parse_tensor_split
from overspill.placement.plan import Placement, place
from tests.pure.placement_models import GIB, make_machine, make_shape

SIZES = {"n_ubatch": 512, "n_wave": 4096, "grain": 1}


def counts(placement: Placement) -> list[int]:
    return [len(placement.layers_of(d)) for d in range(placement.host_index)]


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [
        ("0,32,32,32", [0, 16, 16, 16]),
        ("1,1", [24, 24, 0, 0]),
        ("3,1", [36, 12, 0, 0]),
        ("3/1", [36, 12, 0, 0]),
        ("1,1,1,1", [12, 12, 12, 12]),
        ("16,16,16,0", [16, 16, 16, 0]),
        ("7,4,38", [7, 4, 37, 0]),
        ("1,0,0,1", [24, 0, 0, 24]),
    ],
)
@pytest.mark.parametrize("mode", ["on", "off", "balanced"])
@pytest.mark.parametrize("grain", [1, 5, 48])
def test_shares(shares: str, wanted: list[int], mode: str, grain: int) -> None:
    shape = make_shape(48, expert_bytes=90 << 20)
    options = Options(tensor_split=parse_tensor_split(shares), fit=mode)
    placement = place(shape, make_machine(24, 24, 24, 24), options, n_ubatch=512, n_wave=4096, grain=grain)
    assert counts(placement) == wanted
    for device, count in enumerate(wanted):
        assert (placement.budgets[device].used_bytes > 0) == (count > 0)
        assert (device in placement.used_devices) == (count > 0)
        is_noted = f"CUDA{device} is not used: no share in -ts" in placement.notes
        assert is_noted == (count == 0)


def test_shares_stay_within_one_layer_of_the_request_under_fit() -> None:
    shape = make_shape(48, expert_bytes=1 << 30)
    placement = place(shape, make_machine(24, 24), Options(tensor_split=(3, 1)), **SIZES)
    assert counts(placement) == [36, 12]
    assert placement.upload_bytes[0] > 0
    assert placement.upload_bytes[1] == 0
    assert any("host weights on one device only" in note for note in placement.notes)


def test_more_shares_than_devices() -> None:
    with pytest.raises(UserError, match=r"^-ts 0,32,32,32 has 4 shares for 3 devices \(CUDA0, CUDA1, CUDA2\)"):
        place(make_shape(8), make_machine(24, 24, 24), Options(tensor_split=(0, 32, 32, 32)), **SIZES)


def test_shares_only_for_devices_without_memory() -> None:
    with pytest.raises(UserError, match=r"^-ts gives shares only to devices without free memory"):
        place(make_shape(8), make_machine(24, 0), Options(tensor_split=(0, 1)), **SIZES)


def test_unknown_memory_means_unused() -> None:
    machine = make_machine(24, 24)
    devices = (replace(machine.devices[0], total_bytes=0, free_bytes=0), machine.devices[1])
    placement = place(make_shape(8), replace(machine, devices=devices), Options(), **SIZES)
    assert counts(placement) == [0, 8]
    assert placement.budgets[0].used_bytes == 0
    assert "CUDA0 is not used: its memory is unknown" in placement.notes
    assert "pipeline off: CUDA1 is the only stage" in placement.notes


def test_full_device_is_unused() -> None:
    machine = make_machine(24, 24)
    devices = (machine.devices[0], replace(machine.devices[1], free_bytes=0))
    placement = place(make_shape(8), replace(machine, devices=devices), Options(), **SIZES)
    assert counts(placement) == [8, 0]
    assert "CUDA1 is not used: it has no free memory" in placement.notes


@pytest.mark.parametrize(("tiny_gib", "n_tiny"), [(2, 1), (0.02, 0)])
def test_tiny_device_gets_what_fits_or_nothing(tiny_gib: float, n_tiny: int) -> None:
    shape = make_shape(48, expert_bytes=933 << 20)
    placement = place(shape, make_machine(24, 24, 24, tiny_gib), Options(), **SIZES)
    assert placement.host_expert_bytes == 0
    assert counts(placement)[3] == n_tiny
    assert sum(counts(placement)) == 48
    assert placement.budgets[3].spare_bytes >= 0
    is_noted = "CUDA3 is not used: no layer fits it or is left for it" in placement.notes
    assert is_noted == (n_tiny == 0)


def test_fewer_layers_than_devices() -> None:
    placement = place(make_shape(2), make_machine(24, 24, 24), Options(), **SIZES)
    assert counts(placement) == [1, 1, 0]
    assert "CUDA2 is not used: no layer fits it or is left for it" in placement.notes


def test_split_mode_none_uses_the_main_device() -> None:
    placement = place(make_shape(8), make_machine(24, 24), Options(split_mode="none", main_gpu=1), **SIZES)
    assert placement.layer_device == (1,) * 8
    assert placement.used_devices == (1,)
    assert "CUDA0 is not used: -sm none uses one device" in placement.notes


def test_main_device_must_exist_and_have_memory() -> None:
    machine = make_machine(24, 0)
    with pytest.raises(UserError, match=r"^-mg 2: there are 2 devices, counted from 0"):
        place(make_shape(8), machine, Options(split_mode="none", main_gpu=2), **SIZES)
    with pytest.raises(UserError, match=r"^-mg 1: CUDA1 has no free memory"):
        place(make_shape(8), machine, Options(split_mode="none", main_gpu=1), **SIZES)


@pytest.mark.parametrize("grain", [1, 2, 4, 6, 12])
def test_equal_devices_follow_the_grain(grain: int) -> None:
    placement = place(make_shape(24), make_machine(30, 30), Options(), n_ubatch=64, n_wave=64, grain=grain)
    assert placement.layer_device == tuple((l // grain) % 2 for l in range(24))
    assert placement.output_device == placement.layer_device[-1]


def test_slightly_unequal_memory_does_not_bend_the_layout() -> None:
    placement = place(make_shape(24), make_machine(30, 29.5, 30), Options(), **SIZES)
    assert placement.layer_device == tuple(l % 3 for l in range(24))
    assert placement.budgets[0].free_bytes == 30 * GIB
