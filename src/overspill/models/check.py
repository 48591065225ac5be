"""Does a file hold what its architecture and its tokenizer need? Known before a byte of weights is read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import NamedTuple

from overspill.errors import UserError
from overspill.gguf.cursor import shown, shown_path
from overspill.gguf.keys import Keys
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.models.layouts import in_one_layout
from overspill.models.registry import Architecture, architecture
from overspill.models.specs.base import HParams, TensorSpec
from overspill.placement.shape import role_of
from overspill.text.tokenizer import Tokenizer

_NEVER_STORED = (TensorType.Q8_1, TensorType.Q8_K)
_OF_IMAGES = ("v.", "mm.")
# Scales of inputs, the joint matrix of a latent beside its two halves, what chooses experts for parts of images.
_WITHOUT_EFFECT = (".input_scale", ".attn_kv_b.weight", ".exp_probs_b_vl.bias")
_log = logging.getLogger(__name__)


class Understood(NamedTuple):
    """A source as a model: its architecture, hyper-parameters, and the tensors to load, which are those of `source`.

    source: the one given, or a view of it in which the weights have the layout that architectures list.
    """

    architecture: Architecture
    hparams: HParams
    specs: list[TensorSpec]
    source: ModelSource


def understand(source: ModelSource) -> Understood:
    """Everything that can be known without reading a weight, checked. `UserError` begins with the source's name."""
    with errors_name(source):
        arch = architecture(source.keys.arch)
        hparams = arch.read_hparams(_keys_of(source))
        specs = arch.tensors(hparams)
        source = in_one_layout(source, specs)
        return Understood(arch, hparams, check_tensors(specs, source.tensors), source)


def _keys_of(source: ModelSource) -> Keys:
    """The keys, without a count of prediction layers where those it counts have no `nextn` tensors: then they are
    layers like the others. Where nothing of them is there, the count holds."""
    keys = source.keys
    name = f"{keys.arch}.nextn_predict_layers"
    n_block, n = keys.u32(f"{keys.arch}.block_count", default=0), keys.u32(name, default=0)
    last = [tensor for tensor in source.tensors if _layer_of(tensor) in range(n_block - n, n_block)]
    if not last or n >= n_block or any(_is_of_prediction(tensor) for tensor in last):
        return keys
    _log.warning("%s is %d, but the file has no prediction layers: all %d layers are run", name, n, n_block)
    return keys.without(name)


def has_tokenizer(source: ModelSource) -> bool:
    """Whether text can go in and out; token ids always can."""
    return source.keys.text("tokenizer.ggml.model", default="none") not in ("none", "no_vocab")


def tokenizer_of(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. `UserError` when it has none, or one that is damaged or not supported."""
    require_tokenizer(source)
    with errors_name(source):
        return Tokenizer.from_keys(source.keys)


def require_tokenizer(source: ModelSource) -> None:
    """`UserError` when the model has no tokenizer."""
    if not has_tokenizer(source):
        name = shown_path(source.name)
        raise UserError(
            f"{name}: no tokenizer (tokenizer.ggml.model is missing or none): only token ids can go in and out"
        )


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
            present += [spec, *_scale_of(spec, tensors)]
    _refuse_others(tensors.keys() - {spec.name for spec in present}, {_layer_of(spec.name) for spec in present})
    return present


def _scale_of(spec: TensorSpec, tensors: Mapping[str, TensorInfo]) -> list[TensorSpec]:
    """What products with the weight are multiplied by, one number or one for each expert, if the file says so."""
    name = spec.name.removesuffix(".weight") + ".scale"
    if name == spec.name or name not in tensors:
        return []
    scale = TensorSpec(name, (spec.shape[0],) if "_exps." in name else (1,))
    _check(scale, tensors[name])
    return [scale]


def _refuse_others(names: Set[str], layers: Set[int | None]) -> None:
    """Say what is not loaded: prediction layers, what sees images, and what changes no result. The rest would."""
    behind = {name for name in names if _layer_of(name) not in layers}
    if behind and any(map(_is_of_prediction, behind)):
        _log.info("%d tensor(s) of prediction layers are not loaded", len(behind))
        names = names - behind
    images = {name for name in names if name.startswith(_OF_IMAGES)}
    if images:
        _log.info("%d tensor(s) for images are not loaded", len(images))
    unknown = {name for name in names - images if not name.endswith(_WITHOUT_EFFECT)}
    if unknown:
        raise UserError(
            f"{len(unknown)} tensor name(s) unknown to this architecture, without which text would be wrong: "
            f"{_some(unknown)}"
        )


def _layer_of(name: str) -> int | None:
    return role_of(name)[1]


def _is_of_prediction(name: str) -> bool:
    return ".nextn." in name


def _check(spec: TensorSpec, info: TensorInfo) -> None:
    is_longer = spec.is_padded and info.shape[0] >= spec.shape[0] and info.shape[1:] == spec.shape[1:]
    if _without_ones(info.shape) != _without_ones(spec.shape) and not is_longer:
        what = "the vocabulary size does not match: " if spec.name == "token_embd.weight" else ""
        raise UserError(f"tensor {spec.name}: {what}shape {_gguf(info.shape)}, expected {_gguf(spec.shape)}")
    if spec.is_index:
        if info.type is not TensorType.I32:
            raise UserError(f"tensor {spec.name} is {info.type.name}, expected I32: convert the model again")
    elif info.type.is_integer or info.type in _NEVER_STORED:
        raise UserError(f"tensor {spec.name} is {info.type.name}, a type no weight can have: convert the model again")


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Converters leave dimensions of 1 in some tensors and drop them from others."""
    return tuple(n for n in shape if n != 1)


def _gguf(shape: tuple[int, ...]) -> str:
    return "{" + ", ".join(str(n) for n in reversed(shape)) + "}"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(map(shown, ordered[:3])) + (", ..." if len(ordered) > 3 else "")
