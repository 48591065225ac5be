"""Accelerators that are threads: every rule of a real device, on a machine that has none.

What a GPU forgives, these do not, so that a schedule's faults show on any machine:
- fresh, freed and arriving memory is 0xFF bytes (NaN in float32, float16 and bfloat16), so a reader that did not wait
  reads NaN instead of the right values by luck;
- work may touch only the buffers its launch names, and a buffer that is only read must not change meanwhile;
- memory is capped; uploads from memory that is not pinned raise;
- `chaos_seed` delays work, copies, and the arrival of a copy's bytes at random.

A link rate makes a copy last at least as long as that link would take; its bytes arrive at the end of that time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from overspill.device.backend import BackendDevice, BackendStream, WorkRecording, move_parts, new_memory, stream_name
from overspill.device.base import Buffer, Device, Part, UndeclaredAccess, running_on
from overspill.device.cpu import CpuDevice
from overspill.device.lane import Lane
from overspill.device.memory import Ledger, capped_space
from overspill.device.worker import WorkerStream

_POISON_BYTE = 0xFF
_LONGEST_DELAY_S = 0.002
# Host memory moves about this fast on the slowest machine we expect: what a throttled copy sets aside for moving.
_MEMORY_BYTES_PER_S = 4e9

Before = Callable[[Lane, str], None]


@dataclass(frozen=True, kw_only=True)
class VirtualRules:
    """How a virtual device treats its work. Rates in 1e9 bytes per second; None is as fast as memory."""

    chaos_seed: int | None = None
    poison: bool = True
    h2d_gbps: float | None = None
    peer_gbps: float | None = None

    def seconds(self, dst: Device, src: Device, n_bytes: int) -> float:
        """The least time a copy takes on its link."""
        gbps = self.h2d_gbps if dst.is_host or src.is_host else self.peer_gbps
        return 0.0 if dst is src or gbps is None else n_bytes / (gbps * 1e9)


class VirtualStream(WorkerStream):
    """A worker stream that holds its work to the rules. Delays are seeded per stream, so that a run can be repeated."""

    def __init__(
        self,
        device: VirtualBackend,
        lane: Lane,
        *,
        number: int | None = None,
        thread_init: Callable[[], None] | None,
    ) -> None:
        self._virtual = device
        self._rules = device.rules
        self._random = random.Random(f"{device.rules.chaos_seed}/{stream_name(device, lane, number)}")
        super().__init__(device, lane, number=number, thread_init=thread_init)

    def _before(self, label: str) -> None:
        if self._virtual.before is not None:
            self._virtual.before(self.lane, label)
        self._delay()

    def _delay(self) -> None:
        if self._rules.chaos_seed is not None:
            time.sleep(self._random.uniform(0.0, _LONGEST_DELAY_S))

    def _run_work(self, work: Callable[[], None], reads: tuple[Buffer, ...], writes: tuple[Buffer, ...]) -> None:
        unchanging = [(buffer, _version(buffer)) for buffer in reads if buffer not in writes]
        with running_on(self.device, only=(*reads, *writes)):
            work()
        for buffer, version in unchanging:
            if _version(buffer) != version:
                raise UndeclaredAccess(
                    f"{buffer} changed during work that names it as read only: the work wrote it, or another stream "
                    "did and no event keeps them apart"
                )

    def _move(self, dst: Buffer, parts: tuple[Part, ...]) -> None:
        start_s = time.monotonic()
        link_s = sum(self._rules.seconds(dst.device, part.src.device, part.n_bytes) for part in parts)
        moving_s = sum(part.n_bytes for part in parts) / _MEMORY_BYTES_PER_S
        if self._rules.poison:
            for part in parts:
                dst.raw_bytes()[part.dst_offset : part.dst_offset + part.n_bytes].fill_(_POISON_BYTE)
        self._delay()
        _sleep_until(start_s + link_s - moving_s)
        move_parts(dst, parts)
        _sleep_until(start_s + link_s)


def _sleep_until(end_s: float) -> None:
    rest_s = end_s - time.monotonic()
    if rest_s > 0:
        time.sleep(rest_s)


def _version(buffer: Buffer) -> int:
    """How often torch has changed the memory in place. Writes by numba are not seen, nor any to inference tensors."""
    tensor = buffer.raw()
    return 0 if tensor.is_inference() else tensor._version


class VirtualBackend(BackendDevice):
    """What the virtual accelerators and their host have in common.

    `before`, when set, is called on a stream's thread before each launch, copy and upload, with its lane and label:
    tests put latches there. An error that it raises is the stream's.
    """

    rules: VirtualRules
    before: Before | None = None
    _thread_init: Callable[[], None] | None

    def _open_stream(self, lane: Lane) -> VirtualStream:
        return VirtualStream(self, lane, thread_init=self._thread_init)

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = new_memory(shape, dtype)
        if self.rules.poison:
            tensor.reshape(-1).view(torch.uint8).fill_(_POISON_BYTE)
        return tensor

    def free(self, buffer: Buffer) -> None:
        super().free(buffer)
        if self.rules.poison:
            buffer.raw_bytes().fill_(_POISON_BYTE)


class VirtualDevice(VirtualBackend):
    """An accelerator of threads; see the module's text. `thread_init` runs on each stream's thread before its work."""

    is_host = False
    can_record = True

    def __init__(
        self,
        index: int,
        *,
        total_bytes: int,
        chaos_seed: int | None = None,
        poison: bool = True,
        h2d_gbps: float | None = None,
        peer_gbps: float | None = None,
        thread_init: Callable[[], None] | None = None,
    ) -> None:
        name = f"virtual:{index}"
        super().__init__(name, ledger=Ledger(name, capped_space(total_bytes)))
        self.rules = VirtualRules(chaos_seed=chaos_seed, poison=poison, h2d_gbps=h2d_gbps, peer_gbps=peer_gbps)
        self._thread_init = thread_init

    def record(self, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> WorkRecording:
        return WorkRecording(works, kept)

    @property
    def description(self) -> str:
        return f"virtual, link {'unlimited' if self.rules.h2d_gbps is None else f'{self.rules.h2d_gbps:g} GB/s'}"


class VirtualHost(VirtualBackend, CpuDevice):
    """The asynchronous host beside virtual accelerators, held to the same rules."""

    def __init__(
        self,
        *,
        cap_bytes: int | None = None,
        chaos_seed: int | None = None,
        poison: bool = True,
        thread_init: Callable[[], None] | None = None,
    ) -> None:
        self.rules = VirtualRules(chaos_seed=chaos_seed, poison=poison)
        super().__init__(
            is_asynchronous=True,
            cap_bytes=cap_bytes,
            thread_init=thread_init,
            pinned_memory=lambda n_bytes: self._new_tensor((n_bytes,), torch.uint8),
        )

    def _open_feeder(self, number: int) -> BackendStream:
        return VirtualStream(self, Lane.UPLOAD, number=number, thread_init=self._thread_init)
