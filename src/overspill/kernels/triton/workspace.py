"""Scratch memory of the ops of one device: named buffers that keep the largest size they were asked for.

Ops of one stream use them one after the other, so no two live at once by accident, and once the largest ubatch has
been seen (or `reserve` was called) nothing is allocated any more. A workspace belongs to one stream.
"""

from __future__ import annotations

from math import prod

import torch

from overspill.gpu_memory import DEFAULT_WEIGHT_BYTES, workspace_bytes

__all__ = ["DEFAULT_WEIGHT_BYTES", "Workspace", "workspace_bytes"]

_VIEWS_KEPT = 4096


class Workspace:
    """weight_bytes: room for weights that are dequantised for one product; more of them are taken in parts."""

    def __init__(self, device: torch.device, *, weight_bytes: int = DEFAULT_WEIGHT_BYTES) -> None:
        self.device = device
        self.weight_bytes = weight_bytes
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of the buffer `name`; what it held is lost."""
        key = (name, shape, dtype)
        view = self._views.get(key)
        if view is None:
            n_bytes = prod(shape) * dtype.itemsize
            view = self.reserve(name, n_bytes)[:n_bytes].view(dtype).view(shape)
            if len(self._views) >= _VIEWS_KEPT:
                self._views.clear()
            self._views[key] = view
        return view

    def reserve(self, name: str, n_bytes: int) -> torch.Tensor:
        """The buffer `name`, uint8, of at least `n_bytes`."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < n_bytes:
            self._buffers.pop(name, None)
            self._views.clear()
            buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            self._buffers[name] = buffer
        return buffer

    def buffers(self) -> list[torch.Tensor]:
        """All memory in use. Recorded work refers to it even when a buffer has been replaced by a larger one."""
        return list(self._buffers.values())

    @property
    def n_bytes(self) -> int:
        """All that has been allocated."""
        return sum(map(len, self._buffers.values()))
