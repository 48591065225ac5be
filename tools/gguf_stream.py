"""Writes a GGUF file from entries whose data is made when it is their turn: one tensor in memory at a time.

What both makers of test models (`upcycle.py`, `synth_gguf.py`) share. The file appears under its name only when it is
complete: until then it is `NAME.part`, which an error removes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

from overspill.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One tensor to write.

    `shape` is in numpy order (rows first, the contiguous axis last), in elements. `make` returns the tensor's bytes as
    any array of `n_bytes` bytes; it is called once, at write time.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    make: Callable[[], np.ndarray]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor; a `UserError` where a row does not divide into blocks of the type."""
        block_elements, block_bytes = GGML_QUANT_SIZES[self.type]
        if self.shape[-1] % block_elements:
            raise UserError(
                f"{self.name}: rows of {self.shape[-1]} elements do not divide into {self.type.name} blocks of "
                f"{block_elements}; choose another type"
            )
        return int(np.prod(self.shape, dtype=np.int64)) // block_elements * block_bytes


@dataclass(frozen=True)
class Field:
    """One metadata entry; `sub_type` is the element type where `type` is ARRAY."""

    key: str
    value: Any
    type: GGUFValueType
    sub_type: GGUFValueType | None = None


def write_gguf(path: Path, arch: str, fields: Sequence[Field], entries: Sequence[Entry]) -> None:
    """Writes `path` with `general.architecture` = `arch`, then `fields`, then `entries`, in that order."""
    part = path.with_name(path.name + ".part")
    try:
        _write(part, arch, fields, entries)
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another place") from error
    finally:
        part.unlink(missing_ok=True)


def _write(path: Path, arch: str, fields: Sequence[Field], entries: Sequence[Entry]) -> None:
    writer = GGUFWriter(path, arch)
    for field in fields:
        writer.add_key_value(field.key, field.value, field.type, field.sub_type)
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.n_bytes, raw_dtype=entry.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    try:
        for entry in entries:
            writer.write_tensor_data(entry.make())
    finally:
        writer.close()
