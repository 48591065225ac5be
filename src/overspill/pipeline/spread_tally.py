"""How many experts each party read, and how many lay in a cache: counted on the devices, read when somebody asks.

The kernel that shares out a layer's experts counts them, a row for each layer; nothing is read between steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overspill.device.base import Buffer, Devices
from overspill.device.lane import Lane
from overspill.gpu_memory import MAX_SLICES
from overspill.pipeline.expert_cache import fill_host, wait_host
from overspill.pipeline.memory import Memory
from overspill.pipeline.split import Layout
from overspill.pipeline.upload import HostExperts


@dataclass(frozen=True)
class SpreadCounts:
    """Experts of steps whose experts are spread, each counted once a step and layer.

    n_hits, n_missed: those that lay in the cache of their layer's device, and the others, by name of that device.
    n_read, read_bytes: those that each party read from host memory, and bytes, by its name, the host last.
    """

    n_hits: dict[str, int]
    n_missed: dict[str, int]
    n_read: dict[str, int]
    read_bytes: dict[str, int]

    def as_dict(self, n_tokens: int) -> dict[str, Any]:
        """For reports. n_tokens: of those steps."""
        n_hits, n_read = sum(self.n_hits.values()), sum(self.n_read.values())
        return {
            "hits": n_hits,
            "misses": n_read,
            "hit_rate": _share(n_hits, n_read),
            "hit_rates": {name: _share(n, self.n_missed[name]) for name, n in self.n_hits.items()},
            "read_bytes": self.read_bytes,
            "bytes_per_token": {name: n // max(1, n_tokens) for name, n in self.read_bytes.items()},
            "cpu_share": list(self.n_read.values())[-1] / max(1, n_read),
        }


def _whole(slices: Mapping[str, int]) -> dict[str, int]:
    return {name: n // MAX_SLICES for name, n in slices.items()}


def _share(n: int, n_others: int) -> float:
    return n / max(1, n + n_others)


class SpreadTally:
    """The tallies of all devices that own layers with host experts; empty at first."""

    def __init__(
        self,
        devices: Devices,
        memory: Memory,
        layout: Layout,
        host_experts: Mapping[int, HostExperts],
    ) -> None:
        self._devices = devices
        self._memory = memory
        self._layout = layout
        self._expert_bytes = {i: experts.n_bytes // experts.n_experts for i, experts in host_experts.items()}
        self._owners = sorted({layout.layer_device[i] for i in self._expert_bytes})
        self._on_host = {i: memory["host_tally", i][0] for i in self._owners}
        self.reset_host()

    def reset_host(self) -> None:
        """Count from now on."""
        fill_host(self._devices, [(i, self._tally(i)) for i in self._owners], 0)

    def read_host(self) -> SpreadCounts:
        """What was counted; waits for the devices."""
        names = [device.name for device in self._devices.all]
        owners = [names[i] for i in self._owners]
        found = SpreadCounts(*(dict.fromkeys(each, 0) for each in (owners, owners, names, names)))
        counted = self._counted_host()
        for i_layer, expert_bytes in self._expert_bytes.items():
            owner = self._layout.layer_device[i_layer]
            hits, *of_parties = counted[owner][i_layer]
            found.n_hits[names[owner]] += hits
            found.n_missed[names[owner]] += sum(of_parties)
            for name, n in zip(names, of_parties, strict=True):
                found.n_read[name] += n
                found.read_bytes[name] += n * expert_bytes // MAX_SLICES
        n_hits, n_missed, n_read = map(_whole, (found.n_hits, found.n_missed, found.n_read))
        return SpreadCounts(n_hits, n_missed, n_read, found.read_bytes)

    def _tally(self, i_device: int) -> Buffer:
        (tally,) = self._memory["tally", i_device]
        return tally

    def _counted_host(self) -> dict[int, list[list[int]]]:
        for i, target in self._on_host.items():
            self._devices.all[i].stream(Lane.COMPUTE).copy(
                target, self._tally(i), n_bytes=target.n_bytes, label="read tally"
            )
        wait_host(self._devices, self._on_host)
        n = self._layout.n_layer
        return {i: b.host_tensor.view(torch.int64).view(n, -1).tolist() for i, b in self._on_host.items()}
