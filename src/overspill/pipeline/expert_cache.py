"""What lies in the slots of the devices' expert caches, as the host knows it.

Steps change it on the devices and tell nobody. A prompt that uploads experts asks once, before its first wave, and
changes nothing; so what the host has read stays true until experts are shared out again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from overspill.device.base import Buffer, Devices, Event
from overspill.device.lane import Lane
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Policy, WaveSchedule
from overspill.pipeline.split import Layout
from overspill.pipeline.staging import NOTHING_HELD, Held


class ExpertCaches:
    """The caches of all layers that have one; empty at first."""

    def __init__(self, devices: Devices, memory: Memory, layout: Layout, n_expert: int) -> None:
        self._devices = devices
        self._memory = memory
        self._n_expert = n_expert
        self._states: dict[int, dict[int, Buffer]] = {}
        for i_layer, i_device in enumerate(layout.layer_device):
            for state in memory.any_of(("cache", i_layer))[1:]:
                self._states.setdefault(i_device, {})[i_layer] = state
        self._known: Held | None = None
        self.empty_host()

    def empty_host(self) -> None:
        """Forget what lies in the caches."""
        states = [(i, state) for i, found in self._states.items() for state in found.values()]
        fill_host(self._devices, states, -1)
        self._known = None

    def held_host(self, schedule: WaveSchedule) -> Held:
        """Experts that a wave, which is about to be issued, finds in caches and need not send up.

        Waits for the devices where something may have changed since it was last asked.
        """
        if not any(schedule.n_cached) or schedule.policy is Policy.CPU:
            return NOTHING_HELD
        if schedule.policy is Policy.SPREAD:
            self._known = None
            return NOTHING_HELD
        if self._known is None:
            self._known = self._read_host(schedule.n_slices)
        return self._known

    def _read_host(self, n_slices: int) -> Held:
        """Experts of which all slices lie in slots."""
        for i_device, states in self._states.items():
            (target,), stream = self._memory["host_cached", i_device], self._devices.all[i_device].stream(Lane.COMPUTE)
            n, row_bytes = 4 * self._n_expert * n_slices, target.n_bytes // len(states)
            for row, state in enumerate(states.values()):
                stream.copy(target, state, n_bytes=n, dst_offset=row * row_bytes, label="read cache")
        wait_host(self._devices, self._states)
        return {layer: held for i, states in self._states.items() for layer, held in self._read(i, states, n_slices)}

    def _read(self, i_device: int, layers: Collection[int], n_slices: int) -> Iterator[tuple[int, frozenset[int]]]:
        known = self._memory.one(("host_cached", i_device))
        slots = known.host_tensor.view(torch.int32).view(len(layers), -1)[:, : self._n_expert * n_slices]
        is_held = (slots.reshape(-1, self._n_expert, n_slices) >= 0).all(2)
        for layer, row in zip(layers, is_held, strict=True):
            yield layer, frozenset(row.nonzero()[:, 0].tolist())


def fill_host(devices: Devices, buffers: Sequence[tuple[int, Buffer]], value: int) -> None:
    """Fill buffers of devices, by their numbers, and wait for it."""
    for i, buffer in buffers:
        devices.all[i].stream(Lane.COMPUTE).launch(_filling(buffer, value), label="empty", writes=(buffer,))
    wait_host(devices, [i for i, _ in buffers])


def wait_host(devices: Devices, numbers: Iterable[int]) -> None:
    """Wait for what some devices were given to compute."""
    events: list[Event] = [devices.all[i].stream(Lane.COMPUTE).record() for i in {*numbers}]
    for event in events:
        event.wait_host()


def _filling(buffer: Buffer, value: int) -> Callable[[], None]:
    def body() -> None:
        buffer.tensor.fill_(value)

    return body
