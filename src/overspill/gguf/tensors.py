"""The tensor table of one file: read, checked, placed.

After `read_tensors` every tensor is known to lie inside the file, aligned, overlapping no other, with whole blocks
in every row. Gaps, any order of the infos, bytes after the last tensor and a last tensor without padding are fine.
Sizes are Python integers: no product can wrap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from overspill.gguf.cursor import MAX_NAME_BYTES, Cursor, decode_name, shown
from overspill.gguf.types import TensorType

MAX_DIMS = 4
_MIN_INFO_BYTES = 8 + 4 + 4 + 8  # name length, number of dimensions, type, offset
_MAX_ELEMENTS = 2**63 - 1
_DAMAGED = "damaged file; fetch it again"
_REMOVED_TYPES = frozenset({4, 5, 31, 32, 33, 36, 37, 38})


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies and how its bytes are to be read.

    shape: torch order, the GGUF dimensions reversed: `[out, in]`, `[expert, out, in]`.
    n_bytes, offset: bytes; `offset` counts from the beginning of the file that is part number `part` (from 0).
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    n_bytes: int
    part: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes


@dataclass(frozen=True)
class TensorTable:
    """`tensors` in file order; `end` is where the last byte of data (or the header, without tensors) ends."""

    tensors: dict[str, TensorInfo]
    alignment: int
    end: int


def read_tensors(cursor: Cursor, n_tensors: int, alignment: int, part: int) -> TensorTable:
    """Read `n_tensors` infos at the cursor, which must stand behind the metadata; `UserError` on any defect."""
    cursor.check_count(n_tensors, _MIN_INFO_BYTES, "tensor count")
    relative: dict[str, TensorInfo] = {}
    for i in range(n_tensors):
        info = _read_info(cursor, i, part)
        if info.name in relative:
            raise cursor.fail(f"duplicate tensor {shown(info.name)}: damaged file; convert the model again")
        relative[info.name] = info
    data_start = padded(cursor.position, alignment)
    tensors = {name: _placed(cursor, info, data_start, alignment) for name, info in relative.items()}
    _check_overlap(cursor, tensors.values())
    return TensorTable(tensors, alignment, max((info.end for info in tensors.values()), default=cursor.position))


def padded(n_bytes: int, alignment: int) -> int:
    """`n_bytes` rounded up to a multiple of `alignment`."""
    return -(-n_bytes // alignment) * alignment


def _read_info(cursor: Cursor, i: int, part: int) -> TensorInfo:
    name = decode_name(cursor.string("tensor name", f"of tensor {i}", MAX_NAME_BYTES))
    if not name:
        raise cursor.fail(f"tensor {i} has an empty name: damaged file; fetch it again")
    dims = _read_dims(cursor, name)
    type = _tensor_type(cursor, name, cursor.u32(f"type of tensor {shown(name)}"))
    if dims[0] % type.block.n_elements:
        raise cursor.fail(
            f"tensor {shown(name)} has rows of {dims[0]} values, {type.name} needs a multiple of "
            f"{type.block.n_elements}: convert the model again"
        )
    n_bytes = type.row_bytes(dims[0]) * prod(dims[1:])
    offset = cursor.u64(f"offset of tensor {shown(name)}")
    return TensorInfo(name=name, shape=dims[::-1], type=type, n_bytes=n_bytes, part=part, offset=offset)


def _read_dims(cursor: Cursor, name: str) -> tuple[int, ...]:
    """The dimensions in file order, contiguous first; a scalar counts as one value."""
    n_dims = cursor.u32(f"number of dimensions of tensor {shown(name)}")
    if n_dims > MAX_DIMS:
        raise cursor.fail(
            f"tensor {shown(name)} has {n_dims} dimensions, at most {MAX_DIMS} are possible: damaged file"
        )
    dims = tuple(cursor.i64(f"dimensions of tensor {shown(name)}") for _ in range(n_dims)) or (1,)
    if min(dims) < 1:
        raise cursor.fail(f"tensor {shown(name)} has a dimension of {min(dims)} in {list(dims)}: {_DAMAGED}")
    if prod(dims) > _MAX_ELEMENTS:
        raise cursor.fail(f"tensor {shown(name)} has dimensions {list(dims)}, which no file can hold: {_DAMAGED}")
    return dims


def _tensor_type(cursor: Cursor, name: str, type_id: int) -> TensorType:
    if type_id in _REMOVED_TYPES:
        raise cursor.fail(
            f"tensor {shown(name)} has type {type_id}, which was removed from the format: convert the model again"
        )
    if type_id not in TensorType.__members__.values():
        raise cursor.fail(
            f"tensor {shown(name)} has type {type_id}, which is unknown: a newer format or a damaged file"
        )
    return TensorType(type_id)


def _placed(cursor: Cursor, info: TensorInfo, data_start: int, alignment: int) -> TensorInfo:
    """`info` with its offset counted from the beginning of the file."""
    if info.offset % alignment:
        raise cursor.fail(
            f"tensor {shown(info.name)} has offset {info.offset}, not a multiple of the alignment {alignment}: "
            "damaged file; convert the model again"
        )
    start, size = data_start + info.offset, len(cursor.data)
    if start + info.n_bytes > size:
        raise cursor.fail(
            f"truncated: tensor {shown(info.name)} needs {info.n_bytes} bytes at byte {start}, past the end of the "
            f"file at byte {size}; fetch it again"
        )
    return TensorInfo(
        name=info.name, shape=info.shape, type=info.type, n_bytes=info.n_bytes, part=info.part, offset=start
    )


def _check_overlap(cursor: Cursor, tensors: Iterable[TensorInfo]) -> None:
    before: TensorInfo | None = None
    for info in sorted(tensors, key=lambda info: info.offset):
        if before is not None and info.offset < before.end:
            raise cursor.fail(
                f"tensors {shown(before.name)} and {shown(info.name)} overlap at offset {info.offset}: "
                "damaged file; convert the model again"
            )
        before = info
