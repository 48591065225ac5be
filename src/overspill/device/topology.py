"""What the devices at hand can do: link and compute rates, measured with all of them at work at once.

Rates taken alone mislead where links or cores are shared, so every figure that a plan relies on for pipelined work is
taken while all devices do the same. It takes some tens of milliseconds and leaves no memory behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind, Part
from overspill.device.lane import Lane

_LEAST_REPEATS, _LEAST_SECONDS = 5, 0.03
_FIRST_SECONDS = 0.1  # threads that have just begun may share a core until the kernel moves one
_MAX_COPY_BYTES = {True: 64 << 20, False: 8 << 20}  # by whether there are GPUs
_GPU_PRODUCT = (4096, 4096, torch.bfloat16)


@dataclass(frozen=True)
class Sample:
    """A device's kernels at the work that a model gives them.

    many: a product for many tokens at once, of `flops`. one: for one token, which reads `n_bytes` of weights.
    call: one that is so small that its call is all it takes.
    """

    many: Callable[[], object]
    flops: float
    one: Callable[[], object]
    n_bytes: int
    call: Callable[[], object]


@dataclass(frozen=True)
class Rates:
    """Of each accelerator: uploads alone (GB/s), products and reading of weights with all of them busy (TFLOP/s, GB/s).

    Of the host: products, reading, and microseconds of a call of one op.
    peer_gbps: from the first accelerator to the last; where there is but one, what its link to the host does.
    read_gbps: None of GPUs, where it follows from their products well enough.
    """

    h2d_gbps: tuple[float, ...]
    h2d_total_gbps: float
    peer_gbps: float
    tflops: tuple[float, ...]
    read_gbps: tuple[float | None, ...]
    cpu_gbps: float
    cpu_gflops: float
    call_us: float


def measure(devices: Devices, sample: Sample) -> Rates:
    """Measure the devices, with copies of some MiB, less on devices that are short of memory.

    sample: of the CPU's kernels, which compute on devices that are made of threads too.
    """
    has_gpus = any(device.torch_device.type != "cpu" for device in devices.accelerators)
    copy_bytes = min([_MAX_COPY_BYTES[has_gpus], *(device.free_bytes // 8 for device in devices.all)])
    cpu_gflops = sample.flops / _best_seconds(sample.many, least_s=_FIRST_SECONDS) / 1e9
    cpu_gbps = sample.n_bytes / _best_seconds(sample.one) / 1e9
    call_us = _best_seconds(sample.call) * 1e6
    if not devices.accelerators:
        return Rates((), cpu_gbps, cpu_gbps, (), (), cpu_gbps, cpu_gflops, call_us)
    source = devices.host.allocate_pinned(copy_bytes, name="rates")
    targets = [_reserve(device, copy_bytes) for device in devices.accelerators]
    n = len(targets)
    try:
        alone = tuple(copy_bytes / _best_seconds(partial(_upload, [target], source)) / 1e9 for target in targets)
        together = n * copy_bytes / _best_seconds(lambda: _upload(targets, source)) / 1e9
        peer = _peer_gbps(targets, copy_bytes) if n > 1 else alone[0]
        read: float | None = None
        if has_gpus:
            products = [_gpu_product(target.device.torch_device) for target in targets]
            tflops = _gpu_flops() / _together(targets, products) / 1e12
        else:
            tflops = sample.flops / _together(targets, [sample.many] * n) / 1e12
            read = sample.n_bytes / _together(targets, [sample.one] * n) / 1e9
    finally:
        for target in targets:
            target.device.free(target)
        devices.host.free(source)
    return Rates(alone, together, peer, (tflops,) * n, (read,) * n, cpu_gbps, cpu_gflops, call_us)


def _reserve(device: Device, n_bytes: int) -> Buffer:
    return device.allocate((n_bytes,), torch.uint8, kind=MemoryKind.STAGING, name="rates")


def _best_seconds(run: Callable[[], object], *, least_s: float = _LEAST_SECONDS) -> float:
    """Of some runs, which take long enough together that other programs do not disturb them all."""
    best_s, n_runs, total_s = float("inf"), 0, 0.0
    while n_runs < _LEAST_REPEATS or total_s < least_s:
        started = time.perf_counter()
        run()
        seconds = max(time.perf_counter() - started, 1e-9)
        best_s, n_runs, total_s = min(best_s, seconds), n_runs + 1, total_s + seconds
    return best_s


def _upload(targets: list[Buffer], source: Buffer) -> None:
    streams = [target.device.stream(Lane.UPLOAD) for target in targets]
    for stream, target in zip(streams, targets, strict=True):
        stream.upload(target, [Part(source, 0, 0, target.n_bytes)], label="measure")
    for stream in streams:
        stream.record().wait_host()


def _peer_gbps(targets: list[Buffer], n_bytes: int) -> float:
    source, target = targets[0], targets[-1]

    def copy() -> None:
        stream = target.device.stream(Lane.HAND_OFF)
        stream.copy(target, source, n_bytes=n_bytes, label="measure")
        stream.record().wait_host()

    return n_bytes / _best_seconds(copy) / 1e9


def _gpu_product(device: torch.device) -> Callable[[], object]:
    n_rows, size, dtype = _GPU_PRODUCT
    x, w = torch.rand(n_rows, size, device=device).to(dtype), torch.rand(size, size, device=device).to(dtype)
    return partial(torch.mm, x, w)


def _gpu_flops() -> float:
    n_rows, size, _ = _GPU_PRODUCT
    return 2.0 * n_rows * size * size


def _together(targets: list[Buffer], runs: list[Callable[[], object]]) -> float:
    """Seconds until all devices have done their own of `runs`, all at once."""
    streams = [target.device.stream(Lane.COMPUTE) for target in targets]

    def launch() -> None:
        for stream, run in zip(streams, runs, strict=True):
            stream.launch(partial(_discard, run), label="measure")
        for stream in streams:
            stream.record().wait_host()

    return _best_seconds(launch)


def _discard(run: Callable[[], object]) -> None:
    run()
