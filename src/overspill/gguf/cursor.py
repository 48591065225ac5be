"""Bounds-checked reading of a mapped file, and how names from files appear in messages.

Every length is compared with the bytes that are left before anything is sliced or allocated, in Python integers,
so no declared size can overflow or ask for memory. Little-endian throughout.
"""

from __future__ import annotations

import struct
from pathlib import Path

from overspill.errors import UserError

MAX_NAME_BYTES = 65535  # the specification's limit for keys; tensor names get the same
MAX_STRING_BYTES = 1 << 26  # real ones end near 100 KB (chat templates); sparse files could declare terabytes
_SHOWN_CHARS = 120
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")


def shown(text: str) -> str:
    """`text` fit for a one-line message: escaped if it holds control characters, shortened if it is long."""
    if len(text) > _SHOWN_CHARS:
        text = text[:_SHOWN_CHARS] + "..."
    return text if text and text.isprintable() else repr(text)


def shown_path(path: Path | str) -> str:
    """A path or file name fit for a one-line message; never shortened."""
    text = str(path)
    return text if text.isprintable() else repr(text)


class Cursor:
    """A position in the bytes of a file; every method raises `UserError` instead of reading past the end."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.position = 0

    @property
    def n_left(self) -> int:
        return len(self.data) - self.position

    def fail(self, message: str) -> UserError:
        return UserError(f"{shown_path(self.path)}: {message}")

    def skip(self, n_bytes: int, what: str) -> int:
        """Move over `n_bytes` and return where they begin; `what` names them if they are not there."""
        start = self.position
        if n_bytes > self.n_left:
            raise self.fail(
                f"truncated: {what} needs {n_bytes} bytes at byte {start}, the file ends at byte {len(self.data)}; "
                "fetch it again"
            )
        self.position += n_bytes
        return start

    def u32(self, what: str) -> int:
        return self._number(_U32, what)

    def u64(self, what: str) -> int:
        return self._number(_U64, what)

    def i64(self, what: str) -> int:
        return self._number(_I64, what)

    def scalar(self, format: struct.Struct, what: str) -> int | float:
        value = format.unpack_from(self.data, self.skip(format.size, what))[0]
        return float(value) if isinstance(value, float) else int(value)

    def string(self, kind: str, what: str, max_bytes: int = MAX_STRING_BYTES) -> bytes:
        """A length and that many bytes. `kind` ("key", "string") and `what` ("of key x") word the errors."""
        length = self.u64(f"{kind} length {what}")
        if length > self.n_left:
            raise self.fail(
                f"{kind} length {length} {what} is more than the {self.n_left} bytes left: truncated or damaged file; "
                "fetch it again"
            )
        if length > max_bytes:
            raise self.fail(f"{kind} length {length} {what} is more than the {max_bytes} bytes allowed: damaged file")
        start = self.skip(length, kind)
        return bytes(self.data[start : start + length])

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """`count` items of at least `min_bytes` each must fit into what is left."""
        if not 0 <= count * min_bytes <= self.n_left:
            raise self.fail(
                f"{what} {count} does not fit into the {self.n_left} bytes left: truncated or damaged file; "
                "fetch it again"
            )

    def _number(self, format: struct.Struct, what: str) -> int:
        return int(format.unpack_from(self.data, self.skip(format.size, what))[0])


def decode_name(raw: bytes) -> str:
    """A key or tensor name. Both are UTF-8; other bytes stay visible as `\\xNN` and harm nobody who does not ask."""
    return raw.decode("utf-8", "backslashreplace")
