"""Virtual accelerators whose direct copies from one of their peers go wrong, as some real ones do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import StrEnum

import torch

from overspill.device.backend import BackendStream
from overspill.device.base import Buffer, Devices, Part
from overspill.device.lane import Lane
from overspill.device.virtual import VirtualDevice, VirtualHost, VirtualStream

_LATE_S = 0.4  # later than any reader on a busy machine
_SLOW_GBPS = 0.2
_BYTES = 1 << 30


def _one_thread() -> None:
    torch.set_num_threads(1)


class Fault(StrEnum):
    """What becomes of the bytes of a copy that reports success."""

    DROPPED = "dropped"
    ZEROS = "zeros"
    LATE = "late"
    ZEROS_UNDER_LOAD = "zeros while an upload is on its way"


class BrokenStream(VirtualStream):
    """Copies from the device named `source` to this one suffer the fault."""

    def __init__(self, device: BrokenDevice, lane: Lane, *, thread_init: Callable[[], None] | None) -> None:
        self._broken = device
        super().__init__(device, lane, thread_init=thread_init)

    def _move(self, dst: Buffer, parts: tuple[Part, ...]) -> None:
        broken = self._broken
        is_hit = dst.device is broken and parts[0].src.device.name == broken.source and self._is_on()
        if is_hit:
            self._go_wrong(dst, parts)
        else:
            super()._move(dst, parts)

    def _is_on(self) -> bool:
        if self._broken.fault is not Fault.ZEROS_UNDER_LOAD:
            return True
        return not self._broken.stream(Lane.UPLOAD).record().is_done()

    def _go_wrong(self, dst: Buffer, parts: tuple[Part, ...]) -> None:
        if self._broken.fault is Fault.LATE:
            copies = [(_range(dst, p.dst_offset, p), _range(p.src, p.src_offset, p).clone()) for p in parts]
            timer = threading.Timer(_LATE_S, lambda: [target.copy_(source) for target, source in copies])
            self._broken.timers.append(timer)
            timer.start()
        elif self._broken.fault is not Fault.DROPPED:
            for part in parts:
                _range(dst, part.dst_offset, part).zero_()


def _range(buffer: Buffer, offset: int, part: Part) -> torch.Tensor:
    return buffer.raw_bytes()[offset : offset + part.n_bytes]


class BrokenDevice(VirtualDevice):
    """An accelerator with a fault on the way from another one; `source` is that one's name.

    Its link is slow, so that an upload of some bytes is still on its way when a copy starts.
    """

    def __init__(self, index: int, *, fault: Fault, source: str, total_bytes: int) -> None:
        h2d_gbps = _SLOW_GBPS if fault is Fault.ZEROS_UNDER_LOAD else None
        super().__init__(index, total_bytes=total_bytes, h2d_gbps=h2d_gbps, thread_init=_one_thread)
        self.fault = fault
        self.source = source
        self.timers: list[threading.Timer] = []

    def _open_stream(self, lane: Lane) -> BackendStream:
        return BrokenStream(self, lane, thread_init=self._thread_init)

    def close(self) -> None:
        super().close()
        for timer in self.timers:
            timer.join()


def broken_devices(n: int, fault: Fault, pair: tuple[int, int], *, total_bytes: int = _BYTES) -> Devices:
    """Virtual accelerators, and their host, of which one ordered pair (source, target) is broken."""
    source, target = pair
    accelerators = tuple(
        BrokenDevice(i, fault=fault, source=f"virtual:{source}", total_bytes=total_bytes)
        if i == target
        else VirtualDevice(i, total_bytes=total_bytes, thread_init=_one_thread)
        for i in range(n)
    )
    return Devices(accelerators, VirtualHost(thread_init=_one_thread))
