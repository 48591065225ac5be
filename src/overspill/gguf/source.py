"""Where a model's tensors come from: a GGUF file, or random weights of a named shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from overspill.gguf.keys import Keys
from overspill.gguf.tensors import TensorInfo


class FileRange(NamedTuple):
    """`n_bytes` of a file from `offset` on; file_id: device and inode of the file that the path named."""

    path: Path
    file_id: tuple[int, int]
    offset: int
    n_bytes: int


class ModelSource(Protocol):
    """Metadata, tensor table and bytes of a model."""

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    @property
    def keys(self) -> Keys: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The tensor's blocks, uint8, one-dimensional, read-only."""
        ...

    def file_range(self, name: str) -> FileRange | None:
        """Where the same bytes lie in a file; None when `bytes_of` makes them."""
        ...
