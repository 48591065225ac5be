"""GGUF architecture name -> its modules. The only place where an architecture's name decides anything.

What an architecture is (`models.specs.NAME`) is known at once; its tensor functions (`models.NAME`, class `Model`),
which need torch, are imported when somebody builds a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, cast

from overspill.errors import UserError
from overspill.gguf.cursor import shown
from overspill.gguf.keys import Keys
from overspill.models.specs import (
    deepseek2,
    deepseek4,
    gemma3,
    glm4moe,
    gpt_oss,
    granitemoe,
    kimi_linear,
    llama,
    llama4,
    minimax_m2,
    olmoe,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen3vlmoe,
    qwen4exp,
    qwen35,
    qwen35moe,
)
from overspill.models.specs.base import HParams, TensorSpec

if TYPE_CHECKING:
    from overspill.models.base import Model

_SPECS: dict[str, ModuleType] = {
    "deepseek2": deepseek2,
    "deepseek4": deepseek4,
    "gemma3": gemma3,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "granitemoe": granitemoe,
    "kimi-linear": kimi_linear,
    "llama": llama,
    "llama4": llama4,
    "minimax-m2": minimax_m2,
    "olmoe": olmoe,
    "qwen2": qwen2,
    "qwen2moe": qwen2moe,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "qwen3next": qwen3next,
    "qwen3vlmoe": qwen3vlmoe,
    "qwen4exp": qwen4exp,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
}


class Spec(Protocol):
    """What a module of `models.specs` offers."""

    def read_hparams(self, keys: Keys) -> HParams:
        """Checked hyper-parameters; `UserError` names the key."""
        ...

    def tensors(self, hp: HParams) -> list[TensorSpec]:
        """Every tensor a file may hold for this architecture."""
        ...


@dataclass(frozen=True)
class Architecture:
    """An architecture: `spec` is data, `Model` computes. module: the name that both modules have."""

    module: str
    spec: Spec

    def read_hparams(self, keys: Keys) -> HParams:
        """Checked hyper-parameters; `UserError` names the key."""
        return self.spec.read_hparams(keys)

    def tensors(self, hp: HParams) -> list[TensorSpec]:
        """Every tensor a file may hold for this architecture."""
        return self.spec.tensors(hp)

    @cached_property
    def Model(self) -> type[Model]:  # noqa: N802
        """The class of the tensor functions; imports torch."""
        return cast("type[Model]", import_module(f"overspill.models.{self.module}").Model)


def architecture(name: str) -> Architecture:
    """The architecture of a GGUF name, or a `UserError` that lists the supported ones."""
    if name not in _SPECS:
        raise UserError(f"general.architecture is {shown(name)}: not supported (supported: {', '.join(names())})")
    spec = _SPECS[name]
    return Architecture(spec.__name__.rpartition(".")[2], cast(Spec, spec))


def names() -> Iterator[str]:
    """The supported architectures."""
    return iter(sorted(_SPECS))
