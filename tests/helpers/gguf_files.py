"""GGUF files as editable documents: take `ok-base.gguf` apart, change one thing, put it together again.

Byte-exact: a document that nobody edited gives the bytes it was read from. Sizes and offsets follow from the data
unless a raw patch says otherwise, so that the malformed files of `gguf_cases` differ from a good one in one thing.
Independent of the reader under test.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

FILES = Path(__file__).parent.parent / "data" / "files"
BASE = FILES / "ok-base.gguf"
SHARED_FILES = Path(__file__).parents[3] / "shared" / "fixtures" / "files"

F32, Q8_0, I32 = 0, 8, 26


def u8(value: int) -> bytes:
    return struct.pack("<IB", 0, value)


def i8(value: int) -> bytes:
    return struct.pack("<Ib", 1, value)


def u16(value: int) -> bytes:
    return struct.pack("<IH", 2, value)


def i16(value: int) -> bytes:
    return struct.pack("<Ih", 3, value)


def u32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def i32(value: int) -> bytes:
    return struct.pack("<Ii", 5, value)


def f32(value: float) -> bytes:
    return struct.pack("<If", 6, value)


def flag(value: bool | int) -> bytes:
    return struct.pack("<IB", 7, value)


def u64(value: int) -> bytes:
    return struct.pack("<IQ", 10, value)


def i64(value: int) -> bytes:
    return struct.pack("<Iq", 11, value)


def f64(value: float) -> bytes:
    return struct.pack("<Id", 12, value)


def string(value: str | bytes) -> bytes:
    return struct.pack("<I", 8) + raw_string(value)


def raw_string(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def array_of(item_type: int, count: int, payload: bytes) -> bytes:
    return struct.pack("<IIQ", 9, item_type, count) + payload


def numbers(item_type: int, format: str, values: Sequence[float]) -> bytes:
    return array_of(item_type, len(values), struct.pack(f"<{len(values)}{format}", *values))


def strings(values: Sequence[str | bytes]) -> bytes:
    return array_of(8, len(values), b"".join(map(raw_string, values)))


@dataclass(frozen=True)
class Tensor:
    """`dims` in file order, `type` a ggml type id, `data` without padding."""

    name: str
    dims: tuple[int, ...]
    type: int
    data: bytes

    def info(self, offset: int) -> bytes:
        dims = struct.pack(f"<I{len(self.dims)}q", len(self.dims), *self.dims)
        return raw_string(self.name) + dims + struct.pack("<IQ", self.type, offset)


@dataclass(frozen=True)
class Document:
    """Keys are (name, type and value as stored); a name may come twice. `extra_infos` are infos without data."""

    keys: tuple[tuple[str, bytes], ...] = ()
    tensors: tuple[Tensor, ...] = ()
    alignment: int = 32
    version: int = 3
    infos_reversed: bool = False
    extra_infos: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<Iqq", self.version, len(self.tensors) + len(self.extra_infos), len(self.keys))
        head += b"".join(raw_string(key) + value for key, value in self.keys)
        infos, data = [], b""
        for tensor in self.tensors:
            infos.append(tensor.info(len(data)))
            data += self._padded(tensor.data)
        if self.infos_reversed:
            infos.reverse()
        return self._padded(head + b"".join([*infos, *self.extra_infos])) + data

    def with_key(self, name: str, value: bytes) -> Document:
        """The key replaced where it is, or added at the end."""
        if name in dict(self.keys):
            return replace(self, keys=tuple((key, value if key == name else old) for key, old in self.keys))
        return replace(self, keys=(*self.keys, (name, value)))

    def without_keys(self, is_dropped: Callable[[str], bool]) -> Document:
        return replace(self, keys=tuple(item for item in self.keys if not is_dropped(item[0])))

    def with_tensor(self, tensor: Tensor) -> Document:
        return replace(self, tensors=(*self.tensors, tensor))

    def without_tensor(self, name: str) -> Document:
        return replace(self, tensors=tuple(tensor for tensor in self.tensors if tensor.name != name))

    def with_changed(self, name: str, change: Callable[[Tensor], Tensor]) -> Document:
        return replace(self, tensors=tuple(change(t) if t.name == name else t for t in self.tensors))

    def _padded(self, data: bytes) -> bytes:
        return data + bytes(-len(data) % self.alignment)


def split(document: Document, bounds: Sequence[int], *, n_tensors: int | None = None) -> list[bytes]:
    """The document cut before the tensors at `bounds`, in the layout of gguf-split: all keys in the first part."""
    cuts = [0, *bounds, len(document.tensors)]
    total = len(document.tensors) if n_tensors is None else n_tensors
    parts = []
    for i in range(len(cuts) - 1):
        part = replace(document, keys=document.keys if i == 0 else (), tensors=document.tensors[cuts[i] : cuts[i + 1]])
        parts.append(with_split_keys(part, i, len(cuts) - 1, total).to_bytes())
    return parts


def with_split_keys(document: Document, number: int, n_parts: int, n_tensors: int) -> Document:
    keys = (("split.no", u16(number)), ("split.count", u16(n_parts)), ("split.tensors.count", i32(n_tensors)))
    return replace(document, keys=(*document.keys, *keys))


def part_name(prefix: str, number: int, n_parts: int) -> str:
    """`number` counts from 0."""
    return f"{prefix}-{number + 1:05d}-of-{n_parts:05d}.gguf"


@cache
def base() -> Document:
    """`ok-base.gguf` taken apart with the gguf package."""
    from gguf import GGUFReader

    reader = GGUFReader(BASE)
    keys = [
        (name, b"".join(part.tobytes() for part in entry.parts[2:]))
        for name, entry in reader.fields.items()
        if not name.startswith("GGUF.")
    ]
    tensors = [Tensor(t.name, tuple(map(int, t.shape)), int(t.tensor_type), t.data.tobytes()) for t in reader.tensors]
    return Document(tuple(keys), tuple(tensors))


def patched_info(data: bytes, name: str, skip: int, value: bytes) -> bytes:
    """`data` with `value` written over the info of tensor `name`, `skip` bytes behind the name."""
    at = data.index(raw_string(name)) + 8 + len(name) + skip
    return data[:at] + value + data[at + len(value) :]
