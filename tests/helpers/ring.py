"""A small pipeline over any devices: uploads into a ring of slots, compute, hand-offs; and the faults one can make.

Layer l computes x = 1.5 x + w[l] on accelerator l mod N for every ubatch, breadth first; its weights w[l] come from
pinned memory through `n_slots` slots per device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

import torch

from overspill.device.base import Buffer, Device, Devices, Event, MemoryKind, Part, Stream
from overspill.device.lane import Lane

N_VALUES = 256
SLOT_BYTES = 4 * N_VALUES


class Fault(Enum):
    NO_READY_WAIT = auto()
    NO_FREE_WAIT = auto()
    FREE_TOO_EARLY = auto()
    NO_HAND_OFF_WAIT = auto()
    NO_COMPUTED_WAIT = auto()
    NO_DOWNLOAD_WAIT = auto()
    READY_OF_THE_LAYER_BEFORE = auto()


@dataclass
class Place:
    """One accelerator's part of the ring."""

    device: Device
    slots: list[Buffer]
    states: list[Buffer]
    free: dict[int, Event] = field(default_factory=dict)
    ready: Event | None = None

    def stream(self, lane: Lane) -> Stream:
        return self.device.stream(lane)


class Ring:
    def __init__(self, devices: Devices, *, n_ubatches: int = 2, n_slots: int = 2, fault: Fault | None = None) -> None:
        self.n_ubatches, self.n_slots, self.fault = n_ubatches, n_slots, fault
        self.places = [self._place(device) for device in devices.accelerators]
        host = devices.host
        self.inputs = [host.allocate_pinned(SLOT_BYTES, name=f"in{m}") for m in range(n_ubatches)]
        self.outputs = [host.allocate_pinned(SLOT_BYTES, name=f"out{m}") for m in range(n_ubatches)]
        self.arrived: list[Event] = []

    def _place(self, device: Device) -> Place:
        slots = [
            device.allocate((SLOT_BYTES,), torch.uint8, kind=MemoryKind.STAGING, name=f"slot{i}")
            for i in range(self.n_slots)
        ]
        states = [
            device.allocate((N_VALUES,), torch.float32, kind=MemoryKind.COMPUTE, name=f"x{m}")
            for m in range(self.n_ubatches)
        ]
        return Place(device, slots, states)

    def run(self, arena: Buffer, n_layers: int) -> list[Event]:
        """Issue everything; the events say when each ubatch's output has arrived."""
        hand_off = self.places[0].stream(Lane.HAND_OFF)
        self.arrived = []
        for source, state in zip(self.inputs, self.places[0].states, strict=True):
            hand_off.copy(state, source, n_bytes=SLOT_BYTES, label="input")
            self.arrived.append(hand_off.record())
        for i_layer in range(n_layers):
            self._layer(arena, i_layer, is_last=i_layer == n_layers - 1)
        return self.arrived

    def _layer(self, arena: Buffer, i_layer: int, *, is_last: bool) -> None:
        place = self.places[i_layer % len(self.places)]
        following = None if is_last else self.places[(i_layer + 1) % len(self.places)]
        i_slot = i_layer // len(self.places) % self.n_slots
        ready = self._upload(place, arena, i_layer, i_slot)
        compute = place.stream(Lane.COMPUTE)
        early = compute.record()
        if self.fault is not Fault.NO_READY_WAIT:
            compute.wait(ready)
        for m in range(self.n_ubatches):
            self._step(place, i_slot, m)
            self._send(place, following, m)
        place.free[i_slot] = early if self.fault is Fault.FREE_TOO_EARLY else compute.record()

    def _upload(self, place: Place, arena: Buffer, i_layer: int, i_slot: int) -> Event:
        upload = place.stream(Lane.UPLOAD)
        before = place.ready
        if i_slot in place.free and self.fault is not Fault.NO_FREE_WAIT:
            upload.wait(place.free[i_slot])
        upload.upload(place.slots[i_slot], [Part(arena, i_layer * SLOT_BYTES, 0, SLOT_BYTES)], label=f"w{i_layer}")
        place.ready = upload.record()
        if self.fault is Fault.READY_OF_THE_LAYER_BEFORE and before is not None:
            return before
        return place.ready

    def _step(self, place: Place, i_slot: int, m: int) -> None:
        compute = place.stream(Lane.COMPUTE)
        if self.fault is not Fault.NO_HAND_OFF_WAIT:
            compute.wait(self.arrived[m])
        slot, state = place.slots[i_slot], place.states[m]
        compute.launch(partial(_update, slot, state), label=f"step{m}", reads=(slot, state), writes=(state,))

    def _send(self, place: Place, following: Place | None, m: int) -> None:
        if following is place:
            self.arrived[m] = place.stream(Lane.COMPUTE).record()
            return
        hand_off = place.stream(Lane.HAND_OFF)
        if self.fault is not Fault.NO_COMPUTED_WAIT:
            hand_off.wait(place.stream(Lane.COMPUTE).record())
        target = self.outputs[m] if following is None else following.states[m]
        hand_off.copy(target, place.states[m], n_bytes=SLOT_BYTES, label=f"send{m}")
        self.arrived[m] = hand_off.record()

    def read(self, arrived: list[Event]) -> list[torch.Tensor]:
        """float32 [N_VALUES] of each ubatch, after waiting for it."""
        values = []
        for output, event in zip(self.outputs, arrived, strict=True):
            if self.fault is not Fault.NO_DOWNLOAD_WAIT:
                event.wait_host()
            values.append(output.host_tensor.view(torch.float32).clone())
        return values


def _update(slot: Buffer, state: Buffer) -> None:
    state.tensor.mul_(1.5).add_(slot.tensor.view(torch.float32))


def expected(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the ring computes from float32 x [N_VALUES] and weights [layers, N_VALUES]."""
    for w in weights:
        x = x * 1.5 + w
    return x
