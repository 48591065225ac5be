"""Opens a model file, or all parts of a split one, as named byte ranges and typed metadata.

Everything the container can get wrong is found here, before a device is touched: what the magic, the counts, the
names, types, shapes and offsets say is checked against the bytes that exist. Whether the tensors and keys make a
model is the business of the architectures. Opening maps the files and reads their headers; tensor bytes are read
from disk when somebody touches a view.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.cursor import shown_path
from overspill.gguf.part import Part, read_part
from overspill.gguf.source import FileRange
from overspill.gguf.split import is_piece, whole_set
from overspill.gguf.tensors import TensorInfo


class GgufFile:
    """An open model.

    path: as it was given.   paths: all parts, in order.   version: of the first part.   keys: of the first part.
    tensors: name -> info, in the order of the parts and of the infos in each.
    """

    def __init__(self, path: Path, parts: tuple[Part, ...]) -> None:
        self.path = path
        self.paths = tuple(part.path for part in parts)
        self.version = parts[0].version
        self.keys = parts[0].keys
        self.tensors: dict[str, TensorInfo] = {}
        for part in parts:
            self.tensors.update(part.table.tensors)
        self._file_ids = tuple(part.file_id for part in parts)
        self._maps: tuple[NDArray[np.uint8], ...] = tuple(part.data for part in parts)

    @property
    def name(self) -> str:
        """The path as it was given, for people."""
        return str(self.path)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.n_bytes for info in self.tensors.values())

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor: uint8 `[n_bytes]`, a read-only view of the mapped file.

        The view stays valid after `close`. `KeyError` if there is no such tensor, `ValueError` after `close`.
        """
        if not self._maps:
            raise ValueError(f"{self.path} is closed")
        info = self.tensors[name]
        return self._maps[info.part][info.offset : info.end]

    def file_range(self, name: str) -> FileRange:
        """Where the bytes of a tensor lie. `KeyError` if there is no such tensor."""
        info = self.tensors[name]
        return FileRange(self.paths[info.part], self._file_ids[info.part], info.offset, info.n_bytes)

    def close(self) -> None:
        """Let go of the maps; each goes away with the last view of it."""
        self._maps = ()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Open a `.gguf` file; any part of a split file stands for all of it.

    Raises `UserError` with one line that says what is wrong with which file.
    """
    return GgufFile(Path(path), whole_set(_read_first(Path(path))))


def _read_first(path: Path) -> Part:
    try:
        return read_part(path)
    except UserError as error:
        if path.is_file() and is_piece(path):
            raise UserError(
                f"{shown_path(path)}: is one piece of a file that was cut up by bytes; join all pieces in order "
                "(cat model.gguf.part1of2 model.gguf.part2of2 > model.gguf) and open the result"
            ) from error
        raise
