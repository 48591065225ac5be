"""Machines from files, and what flags make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overspill.errors import UserError
from overspill.placement.machine import DeviceSpec, Machine
from overspill.placement.rates import PartyRates
from tests.pure.placement_models import GIB, make_machine

RECORD: dict[str, Any] = {
    "host_bytes": 256 * GIB,
    "devices": [
        {"name": "cuda:0", "total_bytes": 24 * GIB, "free_bytes": 23 * GIB, "h2d_gbps": 55.4, "tflops": 700},
        {"name": "cuda:1", "total_bytes": 12 * GIB, "free_bytes": 11 * GIB, "h2d_gbps": 25, "tflops": 100},
    ],
    "h2d_total_gbps": 105.5,
    "peer_gbps": 395,
    "cpu_gbps": 128,
}


def write(folder: Path, record: Any) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(record))
    return path


def test_from_json(tmp_path: Path) -> None:
    machine = Machine.from_json(write(tmp_path, RECORD))
    assert machine.devices[1] == DeviceSpec("cuda:1", 12 * GIB, 11 * GIB, 25, 100)
    assert (machine.host_bytes, machine.h2d_total_gbps, machine.peer_gbps) == (256 * GIB, 105.5, 395)
    assert machine.names == ("cuda:0", "cuda:1", "host")
    assert machine.host_index == 2
    assert Machine.from_json(write(tmp_path, {**RECORD, "cpu_gflops": 800})).cpu_gflops == 800
    assert Machine.from_json(write(tmp_path, {**RECORD, "devices": []})).devices == ()


PARTY_RATES = {
    "n_tokens": 4,
    "links_gbps": [48, 25],
    "links_beside_cpu_gbps": [44.5, 22],
    "cpu_gbps": 38,
    "cpu_call_us": 30,
}


def test_rates_of_parties_from_json_are_written_as_they_are_read(tmp_path: Path) -> None:
    records = [{**PARTY_RATES, "n_tokens": n} for n in (1, 4)]
    machine = Machine.from_json(write(tmp_path, {**RECORD, "party_rates": records}))
    assert machine.party_rates[1] == PartyRates(4, (48, 25), (44.5, 22), 38, 30)
    assert [rates.as_record() for rates in machine.party_rates] == records
    swapped = machine.select("cuda:1,cuda:0").party_rates[0]
    assert (swapped.links_gbps, swapped.links_beside_cpu_gbps) == ((25, 48), (22, 44.5))
    assert machine.select("cuda:1").party_rates[0].links_gbps == (25,)
    assert machine.select("none").party_rates == ()


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"party_rates": {}}, "party_rates is {}; give a list"),
        ({"party_rates": [5]}, "party_rates[0] is 5"),
        ({"party_rates": [{}]}, "party_rates[0].n_tokens is missing"),
        ({"party_rates": [{**PARTY_RATES, "n_tokens": 0}]}, "party_rates[0].n_tokens is 0"),
        ({"party_rates": [{**PARTY_RATES, "links_gbps": [1.0]}]}, "links_gbps has 1 rates for 2 devices"),
        ({"party_rates": [{**PARTY_RATES, "links_gbps": [1.0, 0]}]}, "party_rates[0].links_gbps is [1.0, 0]"),
        ({"party_rates": [{**PARTY_RATES, "links_beside_cpu_gbps": 5}]}, "links_beside_cpu_gbps is 5"),
        ({"party_rates": [{**PARTY_RATES, "cpu_gbps": "slow"}]}, "party_rates[0].cpu_gbps is 'slow'"),
        ({"party_rates": [PARTY_RATES, PARTY_RATES]}, "party_rates[1].n_tokens is 4; give ascending numbers"),
    ],
)
def test_bad_rates_of_parties(tmp_path: Path, more: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        Machine.from_json(write(tmp_path, {**RECORD, **more}))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def changed(path: str, value: Any) -> dict[str, Any]:
    """RECORD with one field changed, or removed when value is `...`."""
    record: dict[str, Any] = json.loads(json.dumps(RECORD))
    target, *keys = [record, *path.split("/")]
    for key in keys[:-1]:
        target = target[int(key) if isinstance(target, list) else key]
    if value is ...:
        del target[keys[-1]]
    else:
        target[keys[-1]] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("host_bytes", ..., "host_bytes is missing"),
        ("host_bytes", -1, "host_bytes is -1"),
        ("host_bytes", 1.5, "host_bytes is 1.5"),
        ("host_byte", 5, "unknown field host_byte"),
        ("peer_gbps", 0, "peer_gbps is 0"),
        ("peer_gbps", "fast", "peer_gbps is 'fast'"),
        ("cpu_gbps", True, "cpu_gbps is True"),
        ("devices", {}, "devices is {}"),
        ("devices", [7], "devices[0] is 7"),
        ("devices/1/tflops", ..., "devices[1].tflops is missing"),
        ("devices/1/reserve_bytes", 0, "unknown field devices[1].reserve_bytes"),
        ("devices/0/free_bytes", 25 * GIB, "devices[0].free_bytes"),
        ("devices/0/name", "", "devices[0].name is ''"),
        ("devices/1/name", "cuda:0", "devices[1].name 'cuda:0' is taken"),
        ("devices/1/name", "CPU", "devices[1].name 'CPU' is taken"),
        ("devices/0/h2d_gbps", float("inf"), "devices[0].h2d_gbps is inf"),
    ],
)
def test_bad_file_names_file_and_field(tmp_path: Path, path: str, value: Any, named: str) -> None:
    file = write(tmp_path, changed(path, value))
    with pytest.raises(UserError) as error:
        Machine.from_json(file)
    assert str(error.value).startswith(f"{file}: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_file_that_is_no_machine(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"machine\.json"):
        Machine.from_json(file)
    with pytest.raises(UserError, match=r"absent\.json"):
        Machine.from_json(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("name", "index"),
    [("cuda:1", 1), ("CUDA1", 1), ("cuda1", 1), ("CPU", 2), ("host", 2), ("cpu", 2), ("CUDA2", None), ("tpu", None)],
)
def test_find(tmp_path: Path, name: str, index: int | None) -> None:
    assert Machine.from_json(write(tmp_path, RECORD)).find(name) == index


def test_alias_by_position_yields_to_a_real_name() -> None:
    devices = tuple(DeviceSpec(name, GIB, GIB, 1.0, 1.0) for name in ("CUDA1", "virtual:0"))
    machine = Machine(GIB, devices, 1.0, 1.0, 1.0)
    assert (machine.find("CUDA1"), machine.find("CUDA0"), machine.find("virtual:0")) == (0, 0, 1)


def test_select_keeps_the_given_order() -> None:
    machine = make_machine(1, 2, 3)
    assert machine.select("auto") is machine
    assert machine.select("none").devices == ()
    assert machine.select("CUDA2,CUDA0").names == ("CUDA2", "CUDA0", "host")
    with pytest.raises(UserError, match="-dev CUDA7: no such device; there are CUDA0, CUDA1, CUDA2"):
        machine.select("CUDA7")


def test_caps_lower_memory_and_drop_the_reserve() -> None:
    device = DeviceSpec("CUDA0", 24 * GIB, 20 * GIB, 1.0, 1.0, reserve_bytes=GIB)
    machine = Machine(GIB, (device, device), 1.0, 1.0, 1.0)
    capped = machine.capped((22 * GIB, 4 * GIB)).devices
    assert [(d.total_bytes, d.free_bytes, d.reserve_bytes) for d in capped] == [
        (22 * GIB, 20 * GIB, 0),
        (4 * GIB, 4 * GIB, 0),
    ]
    assert [d.free_bytes for d in machine.capped((5 * GIB,)).devices] == [5 * GIB, 5 * GIB]
    assert machine.capped(None) is machine
    with pytest.raises(UserError, match="--device-memory has 3 sizes for 2 devices"):
        machine.capped((1, 2, 3))
