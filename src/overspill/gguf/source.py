"""Where a model's tensors come from: a GGUF file, or random weights of a named shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from overspill.gguf.keys import Keys
from overspill.gguf.tensors import TensorInfo


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
