"""Which accelerators can hand data to each other directly, found out by trying.

There are machines on which copies between two GPUs "succeed" and deliver zeros, or deliver late: behind a translating
IOMMU, with some firmware settings, and for some pairs of cards only. Nothing reports it; the text just turns to
nonsense. So every ordered pair copies patterns before it is trusted, small and large ones, idle and while uploads
keep the links busy, each followed at once by a reader on another stream, as in the pipeline.

Invariants: a pattern differs from all that its target held before, so that a copy that does nothing cannot pass; no
memory is left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind, Part
from overspill.device.lane import Lane

_MAX_PATTERN_BYTES = 1 << 20
_SMALL_BYTES = 4096
_N_LOADS = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Bench:
    """Buffers of a test. On the host: what is sent, what came back, what keeps links busy. On each accelerator: one
    to send from, one to receive in, one for the load."""

    pattern: Buffer
    result: Buffer
    load: Buffer
    sources: tuple[Buffer, ...]
    targets: tuple[Buffer, ...]
    loaded: tuple[Buffer, ...]

    @classmethod
    def reserve(cls, devices: Devices) -> _Bench:
        """Less memory on devices that are short of it."""
        n_bytes = min([_MAX_PATTERN_BYTES, *(device.free_bytes // 8 for device in devices.all)])
        pattern, result, load = (devices.host.allocate_pinned(n_bytes, name=f"hand-off {i}") for i in range(3))
        sources, targets, loaded = (
            tuple(_reserve(device, n_bytes, name) for device in devices.accelerators)
            for name in ("source", "target", "load")
        )
        return cls(pattern, result, load, sources, targets, loaded)

    @property
    def n_bytes(self) -> int:
        return self.pattern.n_bytes

    def free_host(self) -> None:
        """Wait for the loads, then give the memory back."""
        for buffer in self.loaded:
            buffer.device.stream(Lane.UPLOAD).record().wait_host()
        for buffer in (self.pattern, self.result, self.load, *self.sources, *self.targets, *self.loaded):
            buffer.device.free(buffer)


def failing_pairs(devices: Devices) -> frozenset[tuple[int, int]]:
    """Ordered pairs (source, target) of accelerators, by number, between which direct copies do not arrive intact.

    Each is told in a warning. An error that a copy raises is raised. Blocks the host.
    """
    has_bytes = devices.host.torch_device.type != "meta"  # devices that execute nothing have none
    if len(devices.accelerators) < 2 or not has_bytes:
        return frozenset()
    bench = _Bench.reserve(devices)
    try:
        failing = frozenset(pair for pair in permutations(range(len(devices.accelerators)), 2) if _fails(bench, *pair))
    finally:
        bench.free_host()
    for i, j in sorted(failing):
        _log.warning(
            "hand-off %s -> %s: direct copies do not arrive intact; they go through host memory (-hs 0 forces direct "
            "ones)",
            devices.accelerators[i],
            devices.accelerators[j],
        )
    return failing


def _reserve(device: Device, n_bytes: int, name: str) -> Buffer:
    return device.allocate((n_bytes,), torch.uint8, kind=MemoryKind.STAGING, name=f"hand-off {name}")


def _fails(bench: _Bench, i: int, j: int) -> bool:
    small = min(_SMALL_BYTES, bench.n_bytes)
    rounds = [(small, False), (bench.n_bytes, False), (bench.n_bytes, True), (small, True)]
    patterns = _patterns(bench.n_bytes, len(rounds))
    return any(
        not _arrives(bench, i, j, pattern[:n_bytes], is_loaded=is_loaded)
        for (n_bytes, is_loaded), pattern in zip(rounds, patterns, strict=True)
    )


def _patterns(n_bytes: int, n: int) -> Iterator[torch.Tensor]:
    """`n` patterns, uint8 `[n_bytes]`, that differ from each other in every byte, and from memory of zeros or ones."""
    first = torch.randint(1, 255 - n, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return (first + k for k in range(n))


def _arrives(bench: _Bench, i: int, j: int, pattern: torch.Tensor, *, is_loaded: bool) -> bool:
    """Whether a copy from accelerator i to j brings the pattern to a reader that starts when the copy has ended."""
    source, target, n_bytes = bench.sources[i], bench.targets[j], len(pattern)
    bench.pattern.host_tensor[:n_bytes] = pattern
    bench.result.host_tensor[:n_bytes].fill_(0)
    send = source.device.stream(Lane.UPLOAD)
    send.upload(source, [Part(bench.pattern, 0, 0, n_bytes)], label="hand-off test: pattern")
    sent = send.record()
    if is_loaded:
        _load(bench, i, j)
    copying, reading = target.device.stream(Lane.HAND_OFF), target.device.stream(Lane.COMPUTE)
    copying.wait(sent)
    copying.copy(target, source, n_bytes=n_bytes, label="hand-off test")
    reading.wait(copying.record())
    reading.copy(bench.result, target, n_bytes=n_bytes, label="hand-off test: result")
    reading.record().wait_host()
    return torch.equal(bench.result.host_tensor[:n_bytes], pattern)


def _load(bench: _Bench, *accelerators: int) -> None:
    """Keep the links of these accelerators busy for a while."""
    part = Part(bench.load, 0, 0, bench.n_bytes)
    for number in accelerators:
        buffer = bench.loaded[number]
        buffer.device.stream(Lane.UPLOAD).upload(buffer, [part] * _N_LOADS, label="hand-off test: load")
