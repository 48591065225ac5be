"""A model file with some tensors or keys exchanged: a source in memory, for tests of layouts and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from overspill.gguf.keys import Keys
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.gguf.values import Entry, ValueType

Value = bool | int | float | str


@dataclass(frozen=True)
class Edited:
    """A `ModelSource` whose tensors lie in memory."""

    name: str
    keys: Keys
    tensors: Mapping[str, TensorInfo]
    data: Mapping[str, NDArray[np.uint8]]

    @classmethod
    def of(cls, source: ModelSource) -> Edited:
        """A copy of another source."""
        return cls(source.name, source.keys, source.tensors, {name: source.bytes_of(name) for name in source.tensors})

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        return self.data[name]

    def file_range(self, name: str) -> None:
        """No file holds these tensors."""

    def array(self, name: str) -> NDArray[np.float32]:
        """The values of a float32 tensor."""
        assert self.tensors[name].type is TensorType.F32
        return self.data[name].view(np.float32).reshape(self.tensors[name].shape)

    def without(self, names: Iterable[str]) -> Edited:
        gone = set(names)
        assert gone <= self.tensors.keys()
        return replace(
            self,
            tensors={name: info for name, info in self.tensors.items() if name not in gone},
            data={name: raw for name, raw in self.data.items() if name not in gone},
        )

    def with_array(self, name: str, values: NDArray[np.floating]) -> Edited:
        """With a float32 tensor, new or in place of the one of that name."""
        raw = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(-1)
        return self.with_blocks(name, TensorType.F32, values.shape, raw)

    def with_blocks(self, name: str, type: TensorType, shape: tuple[int, ...], raw: NDArray[np.uint8]) -> Edited:
        info = TensorInfo(name=name, shape=shape, type=type, n_bytes=len(raw), part=0, offset=0)
        return replace(self, tensors={**self.tensors, name: info}, data={**self.data, name: raw})

    def with_keys(self, values: Mapping[str, Value | None]) -> Edited:
        """With keys set, or taken out (None)."""
        made = Keys.of({k: v for k, v in values.items() if v is not None}, "edited")._entries
        entries = {**self.keys._entries, **made}
        kept = {key: entry for key, entry in entries.items() if values.get(key, 0) is not None}
        return replace(self, keys=Keys(kept, Path(self.name)))

    def with_flags(self, key: str, flags: Sequence[bool]) -> Edited:
        """With an array of bools."""
        entry = Entry(key, ValueType.ARRAY, np.array(flags, np.uint8), ValueType.BOOL)
        return replace(self, keys=Keys({**self.keys._entries, key: entry}, Path(self.name)))

    def with_arch(self, arch: str) -> Edited:
        """As a file of another architecture that has the same keys."""
        old = self.keys.arch
        entries = {key.replace(old + ".", arch + ".", 1): entry for key, entry in self.keys._entries.items()}
        renamed = {key: replace(entry, key=key) for key, entry in entries.items()}
        return replace(self, keys=Keys(renamed, Path(self.name))).with_keys({"general.architecture": arch})
