"""What placement must know of a machine: memory and rates of its devices, links and host.

A `Machine` is measured at start, or read from a JSON file (`--machine FILE`) to plan for a machine one does not have.
Devices are numbered in pipeline order; the number after the last one means the host.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from overspill.errors import UserError
from overspill.placement.fields import checked
from overspill.placement.rates import PartyRates, party_rates_from

HOST: Final = "host"

GPU_ISSUE_US: Final = 600.0
"""Host time to launch a split on a GPU, microseconds: about a dozen kernels from Python."""

_HOST_NAMES: Final = frozenset({"cpu", HOST})


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator.

    h2d_gbps: uploads over its link alone, GB/s. tflops: matrix products. reserve_bytes: what to leave free unless the
    user says otherwise (`-fitt`): 1 GiB on a real device that others may use too, 0 on a capped or virtual one.
    read_gbps: weights that its kernels read for one token; None: what goes with its products.
    """

    name: str
    total_bytes: int
    free_bytes: int
    h2d_gbps: float
    tflops: float
    reserve_bytes: int = 0
    read_gbps: float | None = None

    @property
    def weights_gbps(self) -> float:
        """Bandwidth at which it reads its own weights; if not measured, 1 byte per 160 FLOP of its products."""
        return self.tflops * 1e3 / 160 if self.read_gbps is None else self.read_gbps


@dataclass(frozen=True)
class Machine:
    """The devices in pipeline order, and the host.

    host_bytes: memory that weights may take. h2d_total_gbps: all links at once. peer_gbps: device to device.
    cpu_gbps: weights that the CPU's kernels read for one token. cpu_gflops: their products for many. call_us: a call of
    one op, whatever it computes. issue_us: host time to launch the work of one split on a device. failing_pairs: names
    (source, target) of devices between which direct copies do not arrive. party_rates: what links and CPU read while
    they share the experts of few tokens, by number of tokens, ascending; empty: not measured.
    """

    host_bytes: int
    devices: tuple[DeviceSpec, ...]
    h2d_total_gbps: float
    peer_gbps: float
    cpu_gbps: float
    cpu_gflops: float = 100.0
    call_us: float = 0.0
    issue_us: float = 0.0
    failing_pairs: frozenset[tuple[str, str]] = frozenset()
    party_rates: tuple[PartyRates, ...] = ()

    @property
    def host_index(self) -> int:
        """The number that means the host in plans."""
        return len(self.devices)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names by number, the host last."""
        return (*(d.name for d in self.devices), HOST)

    def find(self, name: str) -> int | None:
        """Number of a device by name, None if there is no such device.

        Case and `:` do not matter; `CPU` and `host` mean the host; `CUDA1` means the second device whatever its
        name, unless a device is called that.
        """
        wanted = _plain(name)
        if wanted in _HOST_NAMES:
            return self.host_index
        by_name = {f"cuda{i}": i for i in range(len(self.devices))}
        by_name.update((_plain(d.name), i) for i, d in enumerate(self.devices))
        return by_name.get(wanted)

    def select(self, devices: str) -> Machine:
        """The machine with only the devices that `-dev` names, in that order. `UserError` for an unknown one."""
        if devices == "auto":
            return self
        if devices == "none":
            return replace(self, devices=(), party_rates=())
        chosen = [self._numbered(name.strip()) for name in devices.split(",")]
        return replace(
            self,
            devices=tuple(self.devices[i] for i in chosen),
            party_rates=tuple(rates.of_devices(chosen) for rates in self.party_rates),
        )

    def capped(self, caps: tuple[int, ...] | None) -> Machine:
        """The machine as `--device-memory` limits it: one cap for all devices or one each, in bytes."""
        if caps is None:
            return self
        each = caps * len(self.devices) if len(caps) == 1 else caps
        if len(each) != len(self.devices):
            raise UserError(f"--device-memory has {len(caps)} sizes for {len(self.devices)} devices; give one each")
        return replace(self, devices=tuple(_capped(d, cap) for d, cap in zip(self.devices, each, strict=True)))

    def _numbered(self, name: str) -> int:
        index = self.find(name)
        if index is None or index == self.host_index:
            raise UserError(f"-dev {name}: no such device; there are {', '.join(self.names[:-1]) or 'none'}")
        return index

    @classmethod
    def from_json(cls, path: str | Path) -> Machine:
        """Read a machine from a file with the fields of this class (`cpu_gflops`, `issue_us` and `party_rates`
        optional; no others that have defaults) and of `DeviceSpec` (likewise). `UserError` naming file and field."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be read as a JSON machine description ({error})") from None
        return _machine_from(record, str(path))


def _capped(device: DeviceSpec, cap: int) -> DeviceSpec:
    total, free = min(cap, device.total_bytes), min(cap, device.free_bytes)
    return replace(device, total_bytes=total, free_bytes=free, reserve_bytes=0)


def _plain(name: str) -> str:
    return name.strip().lower().replace(":", "")


_MACHINE_FIELDS: Final = {
    "host_bytes": int,
    "devices": list,
    "h2d_total_gbps": float,
    "peer_gbps": float,
    "cpu_gbps": float,
}
_OPTIONAL_FIELDS: Final = {"cpu_gflops": float, "issue_us": float, "party_rates": list}
_DEVICE_FIELDS: Final = {"name": str, "total_bytes": int, "free_bytes": int, "h2d_gbps": float, "tflops": float}


def _machine_from(record: Any, path: str) -> Machine:
    fields = checked(record, path, "", _MACHINE_FIELDS, _OPTIONAL_FIELDS)
    devices = tuple(_device_from(d, path, f"devices[{i}].") for i, d in enumerate(fields["devices"]))
    for i, device in enumerate(devices):
        if _plain(device.name) in _HOST_NAMES or device.name in (d.name for d in devices[:i]):
            raise UserError(f"{path}: devices[{i}].name {device.name!r} is taken; give each device its own name")
    return Machine(
        host_bytes=fields["host_bytes"],
        devices=devices,
        h2d_total_gbps=fields["h2d_total_gbps"],
        peer_gbps=fields["peer_gbps"],
        cpu_gbps=fields["cpu_gbps"],
        cpu_gflops=fields.get("cpu_gflops", Machine.cpu_gflops),
        issue_us=fields.get("issue_us", GPU_ISSUE_US),
        party_rates=party_rates_from(fields.get("party_rates", []), path, len(devices)),
    )


def _device_from(record: Any, path: str, where: str) -> DeviceSpec:
    fields = checked(record, path, where, _DEVICE_FIELDS, {})
    total_bytes, free_bytes = fields["total_bytes"], fields["free_bytes"]
    if free_bytes > total_bytes:
        raise UserError(f"{path}: {where}free_bytes {free_bytes} is above total_bytes {total_bytes}")
    return DeviceSpec(
        name=fields["name"],
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        h2d_gbps=fields["h2d_gbps"],
        tflops=fields["tflops"],
    )
