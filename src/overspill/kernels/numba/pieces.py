"""Memory of calls that are written once and run again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from overspill.kernels.numba.crew import n_threads
from overspill.kernels.numba.native import float_bits
from overspill.kernels.numba.workspace import WORKSPACE, Memory

# What lasts no longer than the steps of one op or call: programs of a thread share it, as it is their thread's.
_PASSING = frozenset({"digits", "hidden", "hidden digits", "scores", "scratch", "worth"})


class Pieces:
    """Memory of a program: its own, except for what programs of a thread share."""

    def __init__(self) -> None:
        self.kept: list[object] = []
        self._tensors: dict[tuple[object, ...], Tensor] = {}

    def memory(self, name: str, n_bytes: int) -> Memory:
        piece = WORKSPACE.memory(name, n_bytes) if name in _PASSING else Memory(n_bytes)
        self.kept.append(piece)
        return piece

    def tensor(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same memory for the same name and shape."""
        key = name, shape, dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype)
            self.kept.append(self._tensors[key])
        return self._tensors[key]

    def block(self, address: int, factor: float, *numbers: int) -> Memory:
        """See `block_step_address`."""
        block = self.memory("block", 8 * (2 + len(numbers)))
        block.write((address, float_bits(factor), *numbers))
        return block


def circumstances_of(*tensors: Tensor) -> tuple[object, ...]:
    """What a program was written for: its thread, the number of threads, how tensors lie in memory."""
    return (threading.get_ident(), n_threads(), *((x.shape, x.stride(), x.dtype) for x in tensors))
