"""GGUF architecture name -> module. The only place where an architecture's name decides anything."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Protocol, cast

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models import llama, qwen2, qwen3, qwen3moe
from overspill.models.base import HParams, Model, TensorSpec


class Architecture(Protocol):
    """What an architecture module offers."""

    Model: type[Model]

    def read_hparams(self, keys: Keys) -> HParams:
        """Checked hyper-parameters; `UserError` names the key."""
        ...

    def tensors(self, hp: HParams) -> list[TensorSpec]:
        """Every tensor a file may hold for this architecture."""
        ...


_MODULES: dict[str, ModuleType] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "qwen3moe": qwen3moe}


def architecture(name: str) -> Architecture:
    """The module of a GGUF architecture, or a `UserError` that lists the supported ones."""
    if name not in _MODULES:
        raise UserError(f"general.architecture is {name!r}: not supported (supported: {', '.join(names())})")
    return cast(Architecture, _MODULES[name])


def names() -> Iterator[str]:
    """The supported architectures."""
    return iter(sorted(_MODULES))
