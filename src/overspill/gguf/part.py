"""One file: mapped read-only, recognised, its header read and checked.

Nothing is allocated in proportion to a declared size; a file that `read_part` returns is sound by itself.
"""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.cursor import MAX_NAME_BYTES, Cursor, decode_name, shown, shown_path
from overspill.gguf.keys import Keys
from overspill.gguf.sniff import MAGIC, describe
from overspill.gguf.tensors import TensorTable, padded, read_tensors
from overspill.gguf.values import Entry, ValueType, read_entry

DEFAULT_ALIGNMENT = 32
VERSIONS = (2, 3)
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, value type, value


@dataclass(frozen=True, eq=False)
class Part:
    """A GGUF file. `data` is the whole file, uint8, read-only; `number` counts from 0 within a split of `n_parts`.

    file_id: device and inode, by which the same file is known again when the path is opened once more.
    """

    path: Path
    data: NDArray[np.uint8]
    file_id: tuple[int, int]
    version: int
    keys: Keys
    table: TensorTable
    number: int
    n_parts: int

    @property
    def is_followed_by_gguf(self) -> bool:
        """Whether another GGUF file begins right behind the data: parts joined with `cat`."""
        ends = {self.table.end, padded(self.table.end, self.table.alignment)}
        return any(self.data[end : end + len(MAGIC)].tobytes() == MAGIC for end in ends)


def read_part(path: Path) -> Part:
    """Map a file and read its header; `UserError` for anything but a sound GGUF file of version 2 or 3."""
    data, file_id = _mapped(path)
    cursor = Cursor(data.data, path)
    version = _read_version(cursor)
    n_tensors = cursor.i64("tensor count")
    entries = _read_entries(cursor, cursor.i64("metadata count"))
    keys = Keys(entries, path)
    n_parts = keys.u32("split.count", default=0) or 1
    number = keys.u32("split.no") if n_parts > 1 else 0
    if number >= n_parts:
        raise cursor.fail(f"split.no is {number}, split.count is {n_parts}: damaged file; fetch it again")
    table = read_tensors(cursor, n_tensors, _alignment(cursor, entries), number)
    return Part(path, data, file_id, version, keys, table, number, n_parts)


def _mapped(path: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UserError(_directory_message(path))
        if not stat.S_ISREG(mode):
            raise UserError(f"{shown_path(path)}: is not a regular file; name a .gguf file")
        with path.open("rb") as file:
            if file.seek(0, 2) < len(MAGIC):
                raise UserError(f"{shown_path(path)}: {describe(path.read_bytes())}")
            status = os.fstat(file.fileno())
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            return data, (status.st_dev, status.st_ino)
    except OSError as error:
        raise UserError(f"{shown_path(path)}: cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{shown_path(path)}: cannot be opened: {error}") from error


def _directory_message(path: Path) -> str:
    names = sorted(shown(child.name) for child in path.iterdir() if child.suffix == ".gguf")
    advice = f"name a file in it, for example {names[0]}" if names else "and has no .gguf file in it"
    return f"{shown_path(path)}: is a directory; {advice}"


def _read_version(cursor: Cursor) -> int:
    """Check magic, byte order and version; leaves the cursor behind them."""
    head = bytes(cursor.data[:64])
    if not head.startswith(MAGIC):
        raise cursor.fail(describe(head))
    cursor.skip(len(MAGIC), "magic")
    version = cursor.u32("version")
    if version and version & 0xFFFF == 0:
        raise cursor.fail("is a big-endian file; only little-endian byte order is supported: fetch or convert that one")
    if version == 1:
        raise cursor.fail("has GGUF version 1, which is no longer supported; convert the model again")
    if version not in VERSIONS:
        raise cursor.fail(f"has GGUF version {version}, supported are 2 and 3; a damaged file or a newer format")
    return version


def _read_entries(cursor: Cursor, count: int) -> dict[str, Entry]:
    cursor.check_count(count, _MIN_KEY_BYTES, "metadata count")
    entries: dict[str, Entry] = {}
    for i in range(count):
        key = decode_name(cursor.string("key", f"of metadata entry {i}", MAX_NAME_BYTES))
        if not key:
            raise cursor.fail(f"metadata entry {i} has an empty key: damaged file; fetch it again")
        if key in entries:
            raise cursor.fail(f"duplicate key {shown(key)}: convert the model again")
        entries[key] = read_entry(cursor, key)
    return entries


def _alignment(cursor: Cursor, entries: dict[str, Entry]) -> int:
    entry = entries.get("general.alignment")
    if entry is None:
        return DEFAULT_ALIGNMENT
    value = entry.value
    if entry.type is not ValueType.U32 or not isinstance(value, int) or value.bit_count() != 1:
        raise cursor.fail(f"key general.alignment is {entry.described}, expected a u32 that is a power of two")
    return value
