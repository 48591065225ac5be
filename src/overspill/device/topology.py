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

_REPEATS = 5
_MAX_COPY_BYTES = {True: 64 << 20, False: 8 << 20}  # by whether there are GPUs
_HOST_PRODUCT = (128, 768, torch.float32)
_GPU_PRODUCT = (4096, 4096, torch.bfloat16)


@dataclass(frozen=True)
class Rates:
    """Of each accelerator: uploads alone (GB/s), products with all of them busy (TFLOP/s). Of the host: both.

    peer_gbps: from the first accelerator to the last; where there is but one, what its link to the host does.
    """

    h2d_gbps: tuple[float, ...]
    h2d_total_gbps: float
    peer_gbps: float
    tflops: tuple[float, ...]
    cpu_gbps: float
    cpu_gflops: float


def measure(devices: Devices) -> Rates:
    """Measure the devices, with copies of some MiB, less on devices that are short of memory."""
    has_gpus = any(device.torch_device.type != "cpu" for device in devices.accelerators)
    copy_bytes = min([_MAX_COPY_BYTES[has_gpus], *(device.free_bytes // 8 for device in devices.all)])
    cpu = torch.device("cpu")
    x, w = _operands(cpu)
    cpu_gflops = _flops(cpu) / _best_seconds(partial(torch.mm, x, w)) / 1e9
    cpu_gbps = _memory_gbps(copy_bytes)
    if not devices.accelerators:
        return Rates((), cpu_gbps, cpu_gbps, (), cpu_gbps, cpu_gflops)
    source = devices.host.allocate_pinned(copy_bytes, name="rates")
    targets = [_reserve(device, copy_bytes) for device in devices.accelerators]
    try:
        alone = tuple(copy_bytes / _best_seconds(partial(_upload, [target], source)) / 1e9 for target in targets)
        together = len(targets) * copy_bytes / _best_seconds(lambda: _upload(targets, source)) / 1e9
        peer = _peer_gbps(targets, copy_bytes) if len(targets) > 1 else alone[0]
        products = [_operands(target.device.torch_device) for target in targets]
        flops = _flops(targets[0].device.torch_device)
        tflops = flops / _best_seconds(lambda: _multiply_on(targets, products)) / 1e12
    finally:
        for target in targets:
            target.device.free(target)
        devices.host.free(source)
    return Rates(alone, together, peer, (tflops,) * len(targets), cpu_gbps, cpu_gflops)


def _reserve(device: Device, n_bytes: int) -> Buffer:
    return device.allocate((n_bytes,), torch.uint8, kind=MemoryKind.STAGING, name="rates")


def _best_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return max(min(seconds), 1e-9)


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


def _product(device: torch.device) -> tuple[int, int, torch.dtype]:
    """Rows, width and type of the product that stands for a device's work."""
    return _HOST_PRODUCT if device.type == "cpu" else _GPU_PRODUCT


def _operands(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    n_rows, size, dtype = _product(device)
    return torch.rand(n_rows, size, device=device).to(dtype), torch.rand(size, size, device=device).to(dtype)


def _flops(device: torch.device) -> float:
    n_rows, size, _ = _product(device)
    return 2.0 * n_rows * size * size


def _multiply(x: torch.Tensor, w: torch.Tensor) -> None:
    torch.mm(x, w)


def _multiply_on(targets: list[Buffer], products: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    streams = [target.device.stream(Lane.COMPUTE) for target in targets]
    for stream, (x, w) in zip(streams, products, strict=True):
        stream.launch(partial(_multiply, x, w), label="measure")
    for stream in streams:
        stream.record().wait_host()


def _memory_gbps(n_bytes: int) -> float:
    memory = torch.ones(n_bytes // 4, dtype=torch.float32)
    return n_bytes / _best_seconds(lambda: memory.sum()) / 1e9
