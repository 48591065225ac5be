"""Bringing tensors from a model's source into memory that already exists.

What lies in a file as it is gets read with positioned reads, through the page cache or past it (`-lm dio`): a copy
never makes the mapped file resident beside it. What a source makes when it is asked (random weights, parts cut out of
other tensors) is made, then copied.

Direct reads need aligned offsets, lengths and addresses, which tensors do not have: they arrive in an aligned chunk
per thread and are copied from there.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import warnings
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.cursor import shown_path
from overspill.gguf.source import FileRange, ModelSource

ReadInto = Callable[[int, torch.Tensor], None]
"""Bytes from an offset into the tensor on, into uint8 host memory `[n]`."""

_READ_BYTES = 64 << 20
_BLOCK_BYTES = 4096
_CHUNK_BYTES = 8 << 20
_log = logging.getLogger(__name__)


class LoadMode(StrEnum):
    """How weights get into host memory (`-lm`). Experts of accelerators end up pinned in every mode.

    mmap: what the CPU computes with stays in the mapped file. auto: the same, except for what is read into huge pages
    (see `weights`). mlock, mmap+mlock: mmap, and locked in memory. none: it is read into memory of its own. dio: the
    same, past the page cache.
    """

    AUTO = "auto"
    NONE = "none"
    MMAP = "mmap"
    MLOCK = "mlock"
    MMAP_MLOCK = "mmap+mlock"
    DIO = "dio"

    @property
    def is_mapped(self) -> bool:
        return self not in (LoadMode.NONE, LoadMode.DIO)

    @property
    def is_locked(self) -> bool:
        return self in (LoadMode.MLOCK, LoadMode.MMAP_MLOCK)


class TensorReader:
    """Opens a source's tensors for reading; a context manager that closes their files. For any number of threads.

    is_direct: read past the page cache; where a file system refuses that, one warning, and reads as usual.
    """

    def __init__(self, source: ModelSource, *, is_direct: bool) -> None:
        self._source = source
        self._is_direct = is_direct
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()

    def open(self, name: str) -> ReadInto:
        """A function that reads ranges of the tensor's bytes. `UserError` from it when the file has become shorter."""
        where = self._source.file_range(name)
        if where is not None:
            return partial(self._read, where, name)
        return reader_of(tensor_over(self._source.bytes_of(name)))

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            file.close()

    def _read(self, where: FileRange, name: str, first: int, target: torch.Tensor) -> None:
        if target.is_meta:  # of a device that executes nothing
            return
        try:
            self._file(where).read(where.offset + first, target)
        except EOFError:
            raise UserError(f"{shown_path(where.path)}: ended while tensor {name} was read; fetch it again") from None
        except OSError as error:
            raise UserError(f"{shown_path(where.path)}: cannot read tensor {name}: {error.strerror}") from error

    def _file(self, where: FileRange) -> _File:
        with self._lock:
            if where.path not in self._files:
                file = (_open_direct(where.path) if self._is_direct else None) or _File(where.path)
                self._files[where.path] = file
                if file.file_id != where.file_id:
                    raise UserError(f"{shown_path(where.path)}: was replaced while it was being loaded; start again")
            return self._files[where.path]


def tensor_over(raw: NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over mapped, read-only bytes; nobody writes to weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)


def reader_of(values: torch.Tensor) -> ReadInto:
    """Reads bytes that are in memory, uint8 `[n]`."""

    def read(first: int, target: torch.Tensor) -> None:
        target.copy_(values[first : first + target.numel()])

    return read


class _File:
    """A file read through the page cache."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        self._fd = os.open(path, os.O_RDONLY | flags)

    @property
    def file_id(self) -> tuple[int, int]:
        """Device and inode."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def read(self, offset: int, target: torch.Tensor) -> None:
        """Fill `target` from `offset` on. `EOFError` when the file ends before."""
        view = target.numpy().data
        n_done = 0
        while n_done < len(view):
            n = os.preadv(self._fd, [view[n_done : n_done + _READ_BYTES]], offset + n_done)
            if n == 0:
                raise EOFError
            n_done += n

    def close(self) -> None:
        os.close(self._fd)


class _DirectFile(_File):
    """A file read past the page cache, in aligned chunks."""

    def __init__(self, path: Path, flags: int) -> None:
        super().__init__(path, flags)
        self._own = threading.local()

    def read(self, offset: int, target: torch.Tensor) -> None:
        end = offset + target.numel()
        n_done = 0
        while n_done < target.numel():
            skipped = (offset + n_done) % _BLOCK_BYTES
            start = offset + n_done - skipped
            wanted = min(_CHUNK_BYTES, -(-(end - start) // _BLOCK_BYTES) * _BLOCK_BYTES)
            chunk = self._chunk()
            n = min(os.preadv(self._fd, [chunk.numpy().data[:wanted]], start), end - start) - skipped
            if n <= 0:
                raise EOFError
            target[n_done : n_done + n].copy_(chunk[skipped : skipped + n])
            n_done += n

    def _chunk(self) -> torch.Tensor:
        """Aligned memory of the calling thread."""
        if not hasattr(self._own, "chunk"):
            self._own.chunk = torch.frombuffer(mmap.mmap(-1, _CHUNK_BYTES), dtype=torch.uint8)
        chunk: torch.Tensor = self._own.chunk
        return chunk


def _open_direct(path: Path) -> _File | None:
    """None, and a warning, where direct reads are refused, which some file systems say at the first read only."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is not None:
        try:
            file = _DirectFile(path, flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            try:
                file.read(0, torch.empty(1, dtype=torch.uint8))
                return file
            except OSError as error:
                file.close()
                if error.errno != errno.EINVAL:
                    raise
    _log.warning("%s: this file system refuses direct reads (-lm dio): read through the page cache", shown_path(path))
    return None
