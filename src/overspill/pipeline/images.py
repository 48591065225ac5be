"""Copies of what slots hold, between their devices and the blocks of `cache.images` in pinned host memory.

An image has, layer after layer, the cells of each tensor head by head, then the rows of states. Its first cells alone
can be loaded: all offsets follow from what the image has. Rings of cells are copied as they are: of a sequence that has
not filled one, the first cells are all there is. Copies are given to the streams that compute, which are the only ones
that touch keys, values and states, so order needs nothing else; the host waits until they are made, because the next
thing may be a recorded step, or the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from overspill.cache.cells import KvShape
from overspill.cache.images import BLOCK_BYTES, Image, Load, Save
from overspill.device.base import Buffer, Devices, Part, Stream
from overspill.device.lane import Lane
from overspill.models.base import HParams
from overspill.pipeline.memory import Memory
from overspill.pipeline.split import Layout


class _Run(NamedTuple):
    """Bytes that follow each other both in a buffer and in an image. n_wanted: of them, from the first on."""

    buffer: Buffer
    offset: int
    n_bytes: int
    n_wanted: int


class SlotImages:
    """Carries out what an `ImageStore` decided. Not for several threads."""

    def __init__(self, devices: Devices, layout: Layout, memory: Memory, hp: HParams) -> None:
        self._devices = devices
        self._layout = layout
        self._memory = memory
        self._shapes = [hp.kv_shape(i) for i in range(hp.n_layer)]

    def n_bytes(self, n_cells: int, n_states: int) -> int:
        """Bytes of an image."""
        image = Image(tuple(range(n_cells)), tuple(range(n_states)), ())
        return sum(run.n_bytes for i in range(len(self._shapes)) for run in self._runs(i, 0, image, 0, {}))

    def save_host(self, save: Save) -> None:
        """Copy a slot into its image's blocks."""
        (area,) = self._memory["images",]
        at = 0
        for i_layer, stream in enumerate(self._streams()):
            for run in self._runs(i_layer, save.slot, save.image, len(save.image.ids), save.rows):
                for offset, in_area, n in _in_blocks(save.image, run, at):
                    stream.copy(area, run.buffer, n_bytes=n, label="save", dst_offset=in_area, src_offset=offset)
                at += run.n_bytes
        self._wait_host()

    def load_host(self, load: Load) -> None:
        """Copy an image's first cells, and states, into a slot."""
        (area,) = self._memory["images",]
        at = 0
        for i_layer, stream in enumerate(self._streams()):
            for run in self._runs(i_layer, load.slot, load.image, load.n_cells, load.rows):
                parts = [Part(area, in_area, offset, n) for offset, in_area, n in _in_blocks(load.image, run, at)]
                if parts:
                    stream.upload(run.buffer, parts, label="load")
                at += run.n_bytes
        self._wait_host()

    def _streams(self) -> Iterator[Stream]:
        """What computes each layer."""
        for i_device in self._layout.layer_device:
            yield self._devices.all[i_device].stream(Lane.COMPUTE)

    def _wait_host(self) -> None:
        for i_device in sorted(set(self._layout.layer_device)):
            self._devices.all[i_device].stream(Lane.COMPUTE).record().wait_host()

    def _runs(self, i_layer: int, slot: int, image: Image, n_cells: int, rows: Mapping[int, int]) -> Iterator[_Run]:
        """What a layer holds of a slot, in the order of an image. Of no cells, and of states without rows, nothing is
        wanted."""
        shape, buffers = self._shapes[i_layer], self._memory["kv", i_layer]
        n_state = len(buffers) - len(shape.state)
        for buffer, (ratio, cells) in zip(buffers[:n_state], self._cells_of(shape), strict=True):
            n_slots, n_heads, n_rows, _ = cells
            row_bytes = buffer.n_bytes // prod((n_slots, n_heads, n_rows))
            for i_head in range(n_heads):
                first = (slot * n_heads + i_head) * n_rows * row_bytes
                n_held, n_wanted = (min(n // ratio, n_rows) for n in (len(image.ids), n_cells))
                yield _Run(buffer, first, n_held * row_bytes, n_wanted * row_bytes)
        for buffer in buffers[n_state:]:
            state_bytes = buffer.n_bytes // self._memory.n_state_rows
            for pos in image.positions:
                yield _Run(buffer, rows.get(pos, 0) * state_bytes, state_bytes, state_bytes * (pos in rows))

    def _cells_of(self, shape: KvShape) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        """Positions to a row, and dimensions, of each tensor of cells and blocks."""
        sizes = self._memory.sizes
        tensors = shape.tensor_shapes(sizes.n_slots, sizes.n_cells, sizes.n_spare)
        ratios = [1] * (len(tensors) - len(shape.blocks)) + [block.ratio for block in shape.blocks]
        yield from zip(ratios, tensors, strict=True)


def _in_blocks(image: Image, run: _Run, at: int) -> Iterator[tuple[int, int, int]]:
    """The wanted bytes of a run that stands at `at` in an image: (offset in the buffer, in the area, bytes)."""
    done = 0
    while done < run.n_wanted:
        i_block, in_block = divmod(at + done, BLOCK_BYTES)
        n = min(run.n_wanted - done, BLOCK_BYTES - in_block)
        yield run.offset + done, image.blocks[i_block] * BLOCK_BYTES + in_block, n
        done += n
