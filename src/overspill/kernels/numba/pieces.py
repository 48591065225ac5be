"""Memory of calls that are written once and run again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from overspill.kernels.numba.crew import n_threads
from overspill.kernels.numba.native import float_bits
from overspill.kernels.numba.workspace import WORKSPACE, Memory


class Pieces:
    """Memory of a program: its own, except for the scratch, which programs of a thread share."""

    def __init__(self) -> None:
        self.kept: list[object] = []
        self.latest: dict[str, Memory] = {}

    def memory(self, name: str, n_bytes: int) -> Memory:
        piece = WORKSPACE.memory(name, n_bytes) if name == "scratch" else Memory(n_bytes)
        self.kept.append(piece)
        self.latest[name] = piece
        return piece

    def tensor(self, *shape: int) -> Tensor:
        found = torch.empty(shape)
        self.kept.append(found)
        return found

    def block(self, address: int, factor: float, *numbers: int) -> Memory:
        """See `block_step_address`."""
        block = self.memory("block", 8 * (2 + len(numbers)))
        block.write((address, float_bits(factor), *numbers))
        return block


def circumstances_of(*tensors: Tensor) -> tuple[object, ...]:
    """What a program was written for: its thread, the number of threads, how tensors lie in memory."""
    return (threading.get_ident(), n_threads(), *((x.shape, x.stride(), x.dtype) for x in tensors))
