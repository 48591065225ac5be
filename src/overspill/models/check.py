"""Does a file hold what its architecture and its tokenizer need? Known before a byte of weights is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from overspill.errors import UserError
from overspill.gguf.cursor import shown, shown_path
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.models.registry import Architecture, architecture
from overspill.models.specs.base import HParams, TensorSpec
from overspill.text.tokenizer import Tokenizer

_NEVER_STORED = (TensorType.Q8_1, TensorType.Q8_K)
_log = logging.getLogger(__name__)


class Understood(NamedTuple):
    """A source as a model: its architecture, hyper-parameters, and the tensors to load."""

    architecture: Architecture
    hparams: HParams
    specs: list[TensorSpec]


def understand(source: ModelSource) -> Understood:
    """Everything that can be known without reading a weight, checked. `UserError` begins with the source's name."""
    with errors_name(source):
        arch = architecture(source.keys.arch)
        hparams = arch.read_hparams(source.keys)
        return Understood(arch, hparams, check_tensors(arch.tensors(hparams), source.tensors))


def has_tokenizer(source: ModelSource) -> bool:
    """Whether text can go in and out; token ids always can."""
    return "tokenizer.ggml.model" in source.keys


def tokenizer_of(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. `UserError` when it has none, or one that is damaged or not supported."""
    require_tokenizer(source)
    with errors_name(source):
        return Tokenizer.from_keys(source.keys)


def require_tokenizer(source: ModelSource) -> None:
    """`UserError` when the model has no tokenizer."""
    if not has_tokenizer(source):
        name = shown_path(source.name)
        raise UserError(f"{name}: no tokenizer (tokenizer.ggml.model is missing): only token ids can go in and out")


@contextmanager
def errors_name(source: ModelSource) -> Iterator[None]:
    """Make every `UserError` inside begin with the source's name, unless it does."""
    try:
        yield
    except UserError as error:
        name = shown_path(source.name)
        if str(error).startswith(name):
            raise
        raise UserError(f"{name}: {error}") from None


def check_tensors(specs: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo]) -> list[TensorSpec]:
    """The tensors to load. `UserError` names the first that is missing, misshapen or of a type no weight can have."""
    present = []
    for spec in specs:
        info = tensors.get(spec.name)
        if info is None and spec.is_required:
            raise UserError(f"tensor {spec.name} is missing: the file is no complete model of this architecture")
        if info is not None:
            _check(spec, info)
            present.append(spec)
    unknown = tensors.keys() - {spec.name for spec in present}
    if unknown:
        _log.warning("%d tensor(s) that this architecture does not use are ignored: %s", len(unknown), _some(unknown))
    return present


def _check(spec: TensorSpec, info: TensorInfo) -> None:
    if info.shape != spec.shape:
        what = "the vocabulary size does not match: " if spec.name == "token_embd.weight" else ""
        raise UserError(f"tensor {spec.name}: {what}shape {_gguf(info.shape)}, expected {_gguf(spec.shape)}")
    if info.type.is_integer or info.type in _NEVER_STORED:
        raise UserError(f"tensor {spec.name} is {info.type.name}, a type no weight can have: convert the model again")


def _gguf(shape: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(n) for n in reversed(shape)) + "}"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(shown, ordered[:3])) + (", ..." if len(ordered) > 3 else "")
