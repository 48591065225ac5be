"""Matrices that the CPU computes with: where they are, or in memory of their own, as the load mode says.

Mode `auto` copies what is larger than some pages into huge ones, where the CPU finds it with fewer looks at page
tables, as long as half of the free memory is left; small matrices share such pages. Copies of what the CPU multiplies
with become `Panels`, if its kernels rather read those.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from overspill.device.base import HostDevice, MemoryKind
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.pipeline.reading import LoadMode, ReadInto, TensorReader, tensor_over
from overspill.pipeline.residence import Bytes, read_at_random
from overspill.placement.shape import Role, role_of
from overspill.quant.panels import PANEL_ROWS, Panels, takes_panels
from overspill.quant.qtensor import QTensor

Interleave = Callable[[QTensor, Panels], None]

_PART_BYTES = 64 << 20
# In mode `auto` smaller ones stay where they are, and all of smaller files.
_LEAST_BYTES, _LEAST_FILE_BYTES = 1 << 16, 32 << 20
# What a thread interleaves at once: it is read into memory of its own.
_PANELS_BYTES = 4 << 20


class HostMatrices:
    """Brings them there. mapped: views of the file that stay in use, by name.

    huge_bytes: may be copied in mode `auto`. interleave, panel_types: of the host's kernels.
    """

    def __init__(
        self,
        source: ModelSource,
        reader: TensorReader,
        host: HostDevice,
        mode: LoadMode,
        *,
        n_threads: int,
        huge_bytes: int,
        interleave: Interleave | None,
        panel_types: frozenset[TensorType],
    ) -> None:
        self.mapped: dict[str, Bytes] = {}
        self.n_copied_bytes = 0
        self._source = source
        self._reader = reader
        self._host = host
        self._mode = mode
        self._n_threads = n_threads
        is_small = sum(info.n_bytes for info in source.tensors.values()) < _LEAST_FILE_BYTES
        self._huge_bytes = huge_bytes if mode is LoadMode.AUTO and not is_small else 0
        self._interleave = interleave
        self._panel_types = panel_types

    def table(self, info: TensorInfo, shape: tuple[int, ...]) -> QTensor:
        """What rows are looked up in."""
        if role_of(info.name)[0] is Role.LOOKUP:
            return QTensor.from_bytes(tensor_over(read_at_random(self._source.bytes_of(info.name))), info.type, shape)
        is_copied = self._is_in_file(info) and self._wants_copy(info)
        return self._copied(info, shape) if is_copied else self._in_place(info, shape)

    def matrix(self, info: TensorInfo, shape: tuple[int, ...]) -> QTensor:
        """What is multiplied with."""
        is_product = len(shape) == 2 or role_of(info.name)[0] is Role.EXPERT
        is_panels = is_product and info.type in self._panel_types and takes_panels(info.type, shape)
        interleave = self._interleave if is_panels else None
        if not (self._wants_copy(info) if self._is_in_file(info) else interleave):
            return self._in_place(info, shape)
        return self._copied(info, shape) if interleave is None else self._interleaved(info, shape, interleave)

    def _wants_copy(self, info: TensorInfo) -> bool:
        return not self._mode.is_mapped or self._takes_huge_pages(info.n_bytes)

    def _is_in_file(self, info: TensorInfo) -> bool:
        return self._source.file_range(info.name) is not None

    def _takes_huge_pages(self, n_bytes: int) -> bool:
        """In mode `auto`: whether a tensor moves there; if so, it is counted."""
        if not _LEAST_BYTES <= n_bytes <= self._huge_bytes:
            return False
        self._huge_bytes -= n_bytes
        return True

    def _in_place(self, info: TensorInfo, shape: tuple[int, ...]) -> QTensor:
        view = self._source.bytes_of(info.name)
        if self._is_in_file(info):
            self.mapped[info.name] = view
        else:
            self.n_copied_bytes += info.n_bytes
        return QTensor.from_bytes(tensor_over(view), info.type, shape)

    def _copied(self, info: TensorInfo, shape: tuple[int, ...]) -> QTensor:
        target, read = self._new(info), self._reader.open(info.name)
        self._in_parts(info.n_bytes, _PART_BYTES, lambda first, last: read(first, target[first:last]))
        return QTensor.from_bytes(target, info.type, shape)

    def _interleaved(self, info: TensorInfo, shape: tuple[int, ...], interleave: Interleave) -> QTensor:
        target, read = self._new(info), self._reader.open(info.name)
        row_bytes = info.type.row_bytes(shape[-1])
        panel_bytes = PANEL_ROWS * row_bytes

        def fill(first: int, last: int) -> None:
            part_shape = (last - first) // row_bytes, shape[-1]
            rows = QTensor.from_bytes(_read(read, first, last), info.type, part_shape)
            interleave(rows, Panels.from_bytes(target[first:last], info.type, part_shape))

        self._in_parts(info.n_bytes, max(1, _PANELS_BYTES // panel_bytes) * panel_bytes, fill)
        return Panels.from_bytes(target, info.type, shape)

    def _new(self, info: TensorInfo) -> torch.Tensor:
        self.n_copied_bytes += info.n_bytes
        shape = (info.n_bytes,)
        return self._host.allocate(shape, torch.uint8, kind=MemoryKind.WEIGHTS, name=info.name).host_tensor

    def _in_parts(self, n_bytes: int, part_bytes: int, fill: Callable[[int, int], None]) -> None:
        firsts = range(0, n_bytes, part_bytes)
        with ThreadPoolExecutor(self._n_threads) as pool:
            list(pool.map(lambda first: fill(first, min(first + part_bytes, n_bytes)), firsts))


def _read(read: ReadInto, first: int, last: int) -> torch.Tensor:
    part = torch.empty(last - first, dtype=torch.uint8)
    read(first, part)
    return part
