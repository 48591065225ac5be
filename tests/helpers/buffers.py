"""Buffers for tests of devices."""

from __future__ import annotations

import torch

from overspill.device.base import Buffer, Device, Devices, MemoryKind


def floats(device: Device, n: int = 4, *, name: str = "b", kind: MemoryKind = MemoryKind.COMPUTE) -> Buffer:
    return device.allocate((n,), torch.float32, kind=kind, name=name)


def pinned(devices: Devices, values: torch.Tensor, name: str = "pinned") -> Buffer:
    source = values.contiguous().view(torch.uint8).reshape(-1)
    buffer = devices.host.allocate_pinned(source.numel(), name=name)
    buffer.host_tensor.copy_(source)
    return buffer
