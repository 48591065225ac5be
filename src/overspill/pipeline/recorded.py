"""Prompts by replay: what a device computes of a ubatch that was there before is recorded, and then run with one call.

What the actions of a ubatch do to a device is fixed by the action and by the ubatch's segments: hidden states, cells,
slots and inputs lie where they lay before, and token ids are read from the device. So a ubatch with the same segments
in the same place of a wave has the same work, whatever its tokens are; and all long prompts begin with the same ones.
At first sight work is only issued: it may compile, measure and allocate, and most short prompts are not seen again. At
second sight it is issued and then recorded; from then on it is replayed.

What does not belong to the action and the segments must be part of a recording's name, or keep work from being
recorded: the caller sees to that. Recordings of one device are replayed on its stream for computing alone, one after
the other, so they share the memory of their temporaries. They refer to the scratch memory of the kernels, which grows
with the largest ubatch: when it has, they are forgotten.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from overspill.cache.cells import Segment
from overspill.device.base import CannotRecord, Device, Recording
from overspill.gpu_memory import MAX_RECORDED_LAYERS
from overspill.kernels import Ops
from overspill.models.base import UbatchView
from overspill.pipeline.wave import Ubatch

_log = logging.getLogger(__name__)

_SEEN_KEPT = 4096

_LEAST_UBATCHES = 16

_Place = tuple[int, tuple[Segment, ...]]
"""Which ubatch of a wave, and its segments; -1 and none for work that belongs to no ubatch."""


@dataclass(eq=False)
class Repeated:
    """A ubatch that was there before, on one device. views: what its layers share, such as angles; see `Work`."""

    views: list[UbatchView] = field(default_factory=list)
    recordings: dict[Hashable, Recording] = field(default_factory=dict)
    n_layers: int = 0
    wave: int = 0


class OfDevice:
    """Recordings of one device. The least recently used ubatches go first, those of the present wave never.

    Where a wave alone has more than may be kept, the rest of it is issued: to drop what comes next would be to record
    for ever.
    """

    def __init__(self, device: Device, ops: Ops, n_ubatches: int) -> None:
        self._device = device
        self._ops = ops
        self._n_ubatches = max(_LEAST_UBATCHES, 2 * n_ubatches)
        self._seen: OrderedDict[_Place, None] = OrderedDict()
        self._repeated: OrderedDict[_Place, Repeated] = OrderedDict()
        self._now: dict[int, Repeated | None] = {}
        self._n_layers = 0
        self._wave = 0
        self._scratch: list[int] = []
        self._may_record = True

    def begin_wave(self, places: Sequence[_Place]) -> None:
        self._wave += 1
        self._now.clear()
        scratch = [memory.data_ptr() for memory in self._ops.scratch()]
        if scratch != self._scratch:
            self._scratch = scratch
            self._repeated.clear()
            self._n_layers = 0
        for place in places:
            if place in self._repeated:
                self._repeated.move_to_end(place)
                self._repeated[place].wave = self._wave

    def of(self, m: int, segments: tuple[Segment, ...]) -> Repeated | None:
        """What is known of a ubatch of this wave; None at first sight, and where nothing more may be kept."""
        try:
            return self._now[m]
        except KeyError:
            found = self._now[m] = self._look_up((m, segments))
            return found

    def known(self, m: int) -> Repeated | None:
        """The same, once `of` has been asked."""
        return self._now.get(m)

    def _look_up(self, place: _Place) -> Repeated | None:
        found = self._repeated.get(place)
        if found is not None or not self._may_record:
            return found
        if place not in self._seen:
            self._seen[place] = None
            if len(self._seen) > _SEEN_KEPT:
                self._seen.popitem(last=False)
            return None
        if len(self._repeated) >= self._n_ubatches and not self._drop_oldest():
            return None
        found = self._repeated[place] = Repeated(wave=self._wave)
        return found

    def _drop_oldest(self) -> bool:
        place = next(iter(self._repeated), None)
        if place is None or self._repeated[place].wave == self._wave:
            return False
        self._n_layers -= self._repeated.pop(place).n_layers
        return True

    def record(self, repeated: Repeated, name: Hashable, work: Callable[[], None], n_layers: int) -> None:
        """Record work that has just been issued, if there is room."""
        while self._may_record and self._n_layers + n_layers > MAX_RECORDED_LAYERS:
            if not self._drop_oldest():
                return
        if not self._may_record:
            return
        try:
            repeated.recordings[name] = self._device.record([work], kept=self._ops.scratch())
        except CannotRecord as error:
            _log.warning("%s: prompts are issued kernel by kernel, which costs time: %s", self._device.name, error)
            self._may_record = False
            return
        repeated.n_layers += n_layers
        self._n_layers += n_layers


class Recorded:
    """Recordings of all devices that can record, by number. n_ubatches: that a wave can hold."""

    def __init__(self, n_ubatches: int) -> None:
        self._n_ubatches = n_ubatches
        self._devices: dict[int, OfDevice] = {}

    def begin_wave(self, ubatches: Sequence[Ubatch]) -> None:
        """Tell the ubatches that are about to be computed."""
        places = [(-1, ()), *((m, ubatch.segments) for m, ubatch in enumerate(ubatches))]
        for device in self._devices.values():
            device.begin_wave(places)

    def known(self, i_device: int, m: int) -> Repeated | None:
        """What is known of a ubatch whose work has begun."""
        device = self._devices.get(i_device)
        return None if device is None else device.known(m)

    def on(self, i_device: int, device: Device, ops: Ops) -> OfDevice:
        """Recordings of a device that can record."""
        if i_device not in self._devices:
            self._devices[i_device] = OfDevice(device, ops, self._n_ubatches)
        return self._devices[i_device]
