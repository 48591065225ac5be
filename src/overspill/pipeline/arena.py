"""Routed experts that stay in host RAM while accelerators compute with them.

They are pinned, so that accelerators can copy from them while the host goes on, as far as the budget allows; what is
over stays pageable and goes up through pinned rings. A refused pin never changes who computes.

What has its memory is read on several threads while the next is being pinned: both take about as long. Rings are
reserved before the experts, and given back where nobody needs them: memory that runs out later leaves a way up for what
could not be pinned.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from overspill.device.base import Buffer, HostDevice, MemoryKind
from overspill.errors import OutOfMemory
from overspill.gguf.source import ModelSource
from overspill.pipeline.host_budget import RING_CHUNK_BYTES, ring_chunk_bytes
from overspill.pipeline.reading import LoadMode, TensorReader, tensor_over
from overspill.pipeline.residence import Bytes, choose_pinned
from overspill.pipeline.ring import PinnedRing

_CHUNK_BYTES = RING_CHUNK_BYTES
_MIB = 1 << 20
_log = logging.getLogger(__name__)


class Arena:
    """Buffers of the experts by tensor name, and the rings by number of their accelerator.

    mapped: views of the file that pageable experts stay in.
    """

    def __init__(self, source: ModelSource, reader: TensorReader, host: HostDevice, mode: LoadMode) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.rings: dict[int, PinnedRing] = {}
        self.mapped: list[Bytes] = []
        self._source = source
        self._reader = reader
        self._host = host
        self._mode = mode
        self._to_fill: deque[str] = deque()
        self._refusal: str | None = None

    @property
    def pinned_bytes(self) -> int:
        return sum(buffer.n_bytes for buffer in self.buffers.values() if buffer.is_pinned)

    @property
    def pageable_bytes(self) -> int:
        return sum(buffer.n_bytes for buffer in self.buffers.values() if not buffer.is_pinned)

    def fill(
        self,
        parts: Sequence[tuple[str, int]],
        budget_bytes: int,
        n_threads: int,
        progress: Callable[[int], None],
    ) -> None:
        """Bring these tensors into memory, each with the number of the accelerator that it goes up to.

        budget_bytes: the most to pin, rings included. One warning when that is not enough for all. n_threads: read.
        progress: called with the bytes of each tensor, by the calling thread.
        """
        reads: deque[Future[int]] = deque()
        with ThreadPoolExecutor(n_threads) as pool:

            def go_on() -> None:
                reads.extend(pool.submit(self._read, self._to_fill.popleft()) for _ in range(len(self._to_fill)))
                while reads and reads[0].done():
                    progress(reads.popleft().result())

            try:
                self._place(parts, budget_bytes, go_on)
                for read in reads:
                    progress(read.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        for view in self.mapped:
            progress(len(view))

    def _read(self, name: str) -> int:
        target = self.buffers[name].host_tensor
        self._reader.open(name)(0, target)
        return target.numel()

    def _place(self, parts: Sequence[tuple[str, int]], budget_bytes: int, go_on: Callable[[], None]) -> None:
        """Reserve memory. go_on: called when there is more of it."""
        if not parts:
            return
        sizes = [self._source.tensors[name].n_bytes for name, _ in parts]
        accelerators = sorted({i for _, i in parts})
        budget_bytes -= self._open_rings(accelerators, max(sizes), budget_bytes)
        for (name, _), is_pinned in zip(parts, choose_pinned(sizes, budget_bytes), strict=True):
            self.buffers[name] = (is_pinned and self._pinned(name)) or self._pageable(name)
            go_on()
        needed = {i for name, i in parts if not self.buffers[name].is_pinned}
        for i in accelerators:
            if i not in needed:
                self.rings.pop(i).free()
        if needed:
            self._tell(budget_bytes)

    def _open_rings(self, accelerators: Sequence[int], largest: int, budget_bytes: int) -> int:
        """Reserve the rings. Returns their bytes."""
        chunk_bytes = ring_chunk_bytes(largest, budget_bytes, len(accelerators), most=_CHUNK_BYTES)
        for i in accelerators:
            self.rings[i] = PinnedRing(self._host, i, chunk_bytes=chunk_bytes)
        return sum(ring.n_bytes for ring in self.rings.values())

    def _pinned(self, name: str) -> Buffer | None:
        if self._refusal is not None:
            return None
        try:
            n_bytes = self._source.tensors[name].n_bytes
            buffer = self._host.allocate_pinned(n_bytes, name=name, kind=MemoryKind.WEIGHTS)
        except OutOfMemory as error:
            self._refusal = str(error)
            return None
        self._to_fill.append(name)
        return buffer

    def _pageable(self, name: str) -> Buffer:
        """In the mapped file, or in memory of its own."""
        if self._mode.is_mapped and self._source.file_range(name) is not None:
            self.mapped.append(self._source.bytes_of(name))
            return self._host.wrap(tensor_over(self.mapped[-1]), name=name)
        self._to_fill.append(name)
        shape = (self._source.tensors[name].n_bytes,)
        return self._host.allocate(shape, torch.uint8, kind=MemoryKind.WEIGHTS, name=name)

    def _tell(self, budget_bytes: int) -> None:
        why = self._refusal or f"the host can spare {max(0, budget_bytes) / _MIB:.1f} MiB"
        _log.warning(
            "%.1f MiB of experts are pinned, %.1f MiB are not (%s): these go up more slowly, through %.1f MiB of "
            "pinned memory",
            self.pinned_bytes / _MIB,
            self.pageable_bytes / _MIB,
            why,
            sum(ring.n_bytes for ring in self.rings.values()) / _MIB,
        )
