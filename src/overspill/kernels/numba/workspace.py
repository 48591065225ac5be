"""Scratch memory of the calling Python thread, kept between calls.

Kernels may be called from several Python threads at once; each has its own workspace, so none needs a lock. A
workspace grows to the largest call of its thread and is freed with the thread. Contents are undefined.
"""

from __future__ import annotations

import struct
import threading
from functools import cache

import numpy as np

_ALIGNMENT = 64


class Memory:
    """Memory aligned to 64 bytes."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        memory = np.empty(n_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        self._bytes = memory.data[start : start + n_bytes]
        self.address = memory.ctypes.data + start

    def write(self, numbers: tuple[int, ...], first: int = 0) -> None:
        """Store int64 numbers from index `first` on."""
        _packer(len(numbers)).pack_into(self._bytes, 8 * first, *numbers)

    def read(self, i_number: int) -> int:
        """The int64 number at index `i_number`."""
        return int(struct.unpack_from("q", self._bytes, 8 * i_number)[0])


class Workspace(threading.local):
    """Memory by name. A piece is good until the next call with its name."""

    def __init__(self) -> None:
        self._pieces: dict[str, Memory] = {}

    def memory(self, name: str, n_bytes: int) -> Memory:
        """At least `n_bytes` of memory."""
        piece = self._pieces.get(name)
        if piece is None or piece.n_bytes < n_bytes:
            piece = self._pieces[name] = Memory(n_bytes)
        return piece


WORKSPACE = Workspace()


@cache
def _packer(n_numbers: int) -> struct.Struct:
    return struct.Struct(f"{n_numbers}q")
