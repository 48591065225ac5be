"""Bounded rings of pinned chunks, for bytes that are not pinned themselves.

Accelerators copy from pinned memory alone. While a model runs, experts that could not be pinned are copied, a chunk at
a time, by a feeder of the host, and go up from there; the feeder fills the next chunks meanwhile. Work, results and
counts are those of pinned memory; it only takes longer. While a model is loaded, weights of accelerators are read into
two chunks in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overspill.device.base import Buffer, Event, HostDevice, Part, Stream
from overspill.device.lane import Lane
from overspill.pipeline.host_budget import LOAD_CHUNKS, RING_CHUNKS
from overspill.pipeline.reading import ReadInto


@dataclass(frozen=True)
class _Chunkful:
    """Parts that fit in one chunk, and where each begins in it."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]


class PinnedRing:
    """The ring of one accelerator, by its number. Issued to from one thread."""

    def __init__(self, host: HostDevice, i_accelerator: int, *, chunk_bytes: int) -> None:
        names = [f"ring {i_accelerator}.{i}" for i in range(RING_CHUNKS)]
        self._chunks = [host.allocate_pinned(chunk_bytes, name=name) for name in names]
        self._busy: list[Event | None] = [None] * RING_CHUNKS
        self._feeder = host.feeder(i_accelerator)
        self._i_next = 0

    @property
    def n_bytes(self) -> int:
        """Pinned memory of the ring."""
        return sum(chunk.n_bytes for chunk in self._chunks)

    def free(self) -> None:
        """Give the memory back; nothing has gone through, or all of it has arrived."""
        for chunk in self._chunks:
            chunk.device.free(chunk)

    def upload(self, stream: Stream, dst: Buffer, parts: Sequence[Part], *, label: str) -> None:
        """`stream.upload` for parts of pageable host memory."""
        filled: deque[tuple[int, _Chunkful, Event]] = deque()
        for chunkful in _chunkfuls(parts, self._chunks[0].n_bytes):
            # All chunks are being filled before the first is waited for: some streams can wait on their host only.
            if len(filled) == RING_CHUNKS:
                self._send(stream, dst, *filled.popleft(), label=label)
            filled.append(self._fill(chunkful, label))
        while filled:
            self._send(stream, dst, *filled.popleft(), label=label)

    def _fill(self, chunkful: _Chunkful, label: str) -> tuple[int, _Chunkful, Event]:
        i, self._i_next = self._i_next, (self._i_next + 1) % RING_CHUNKS
        busy = self._busy[i]
        if busy is not None:
            self._feeder.wait(busy)
        for part, offset in zip(chunkful.parts, chunkful.offsets, strict=True):
            self._feeder.copy(
                self._chunks[i],
                part.src,
                n_bytes=part.n_bytes,
                src_offset=part.src_offset,
                dst_offset=offset,
                label=f"pin {label}",
            )
        return i, chunkful, self._feeder.record()

    def _send(self, stream: Stream, dst: Buffer, i: int, chunkful: _Chunkful, is_filled: Event, *, label: str) -> None:
        stream.wait(is_filled)
        sources = zip(chunkful.parts, chunkful.offsets, strict=True)
        stream.upload(dst, [Part(self._chunks[i], o, p.dst_offset, p.n_bytes) for p, o in sources], label=label)
        self._busy[i] = stream.record()


def _chunkfuls(parts: Sequence[Part], chunk_bytes: int) -> Iterator[_Chunkful]:
    """The parts, cut where a chunk is full."""
    pieces: list[Part] = []
    offsets: list[int] = []
    used = 0
    for src, src_offset, dst_offset, n_bytes in parts:
        done = 0
        while done < n_bytes:
            n = min(n_bytes - done, chunk_bytes - used)
            pieces.append(Part(src, src_offset + done, dst_offset + done, n))
            offsets.append(used)
            done, used = done + n, used + n
            if used == chunk_bytes:
                yield _Chunkful(tuple(pieces), tuple(offsets))
                pieces, offsets, used = [], [], 0
    if pieces:
        yield _Chunkful(tuple(pieces), tuple(offsets))


class LoadRing:
    """Pinned chunks that weights are read into, in turn, on their way to accelerators. For one thread."""

    def __init__(self, host: HostDevice, *, chunk_bytes: int) -> None:
        self._chunks = [host.allocate_pinned(chunk_bytes, name=f"load{i}") for i in range(LOAD_CHUNKS)]
        self._busy: list[Event | None] = [None] * LOAD_CHUNKS
        self._i = 0

    def send(self, target: Buffer, read: ReadInto) -> Event:
        """Fill `target` with what `read` gives. Returns at once when all is read; the event: when all has arrived."""
        stream = target.device.stream(Lane.UPLOAD)
        for first in range(0, target.n_bytes, self._chunks[0].n_bytes):
            i, self._i = self._i, (self._i + 1) % LOAD_CHUNKS
            self._wait_host(i)
            chunk, n_bytes = self._chunks[i], min(self._chunks[i].n_bytes, target.n_bytes - first)
            read(first, chunk.host_tensor[:n_bytes])
            stream.upload(target, [Part(chunk, 0, first, n_bytes)], label=f"load {target.name}")
            self._busy[i] = stream.record()
        return stream.record()

    def free_host(self) -> None:
        """Wait until everything has arrived, and give the memory back."""
        for i, chunk in enumerate(self._chunks):
            self._wait_host(i)
            chunk.device.free(chunk)

    def _wait_host(self, i: int) -> None:
        busy = self._busy[i]
        if busy is not None:
            busy.wait_host()
