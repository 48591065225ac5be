"""Files that hold the same weights in another layout, presented as the tensors that architectures list.

Over the years the same matrices were stored one expert at a time, gate and up in one tensor, queries, keys and
values in one tensor, the two halves of a latent projection in one, or all inputs of the delta rule in one. Everything
behind this module sees one layout only. Bytes of a part of a tensor are cut out when they are read: rows that follow
each other are a view, other parts and stacks are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.gguf.source import FileRange, ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.models.specs.base import TensorSpec

Bytes = NDArray[np.uint8]


class _Derived(NamedTuple):
    """A tensor that the file holds as (a part of) others. `read` makes its bytes of theirs, in order."""

    info: TensorInfo
    originals: tuple[str, ...]
    read: Callable[[list[Bytes]], Bytes]


class Relaid:
    """A `ModelSource` whose tensors are those of another one, some of them derived."""

    def __init__(self, source: ModelSource, derived: Mapping[str, _Derived]) -> None:
        gone = {name for d in derived.values() for name in d.originals}
        self._source = source
        self._derived = derived
        self.name = source.name
        self.keys: Keys = source.keys
        self.tensors: Mapping[str, TensorInfo] = {
            **{name: info for name, info in source.tensors.items() if name not in gone},
            **{name: d.info for name, d in derived.items()},
        }

    def bytes_of(self, name: str) -> Bytes:
        """The tensor's blocks, uint8, one-dimensional."""
        derived = self._derived.get(name)
        if derived is None:
            return self._source.bytes_of(name)
        return derived.read([self._source.bytes_of(original) for original in derived.originals])

    def file_range(self, name: str) -> FileRange | None:
        """Where a tensor lies that the file holds as it is listed."""
        return None if name in self._derived else self._source.file_range(name)


def in_one_layout(source: ModelSource, specs: Iterable[TensorSpec]) -> ModelSource:
    """The source itself, or a view of it in which the tensors of `specs` that it holds otherwise are found.

    `UserError` names a tensor that cannot be what its name says.
    """
    shapes = {spec.name: spec.shape for spec in specs}
    derived: dict[str, _Derived] = {}
    for name in sorted(shapes.keys() - source.tensors.keys()):
        for rule in (_fused_experts, _single_experts, _fused_rows, _latent, _delta_inputs):
            derived |= {d.info.name: d for d in rule(name, shapes, source.tensors)}
    return Relaid(source, derived) if derived else source


Shapes = Mapping[str, tuple[int, ...]]
Infos = Mapping[str, TensorInfo]


def _fused_experts(name: str, shapes: Shapes, tensors: Infos) -> Iterator[_Derived]:
    """`ffn_gate_up_exps`: of each expert first the rows of gate, then those of up."""
    part, info = _original(name, tensors, ("ffn_gate_exps", "ffn_up_exps"), "ffn_gate_up_exps")
    if info is not None:
        E, F, *rest = shapes[name]
        _expect(info, (E, 2 * F, *rest))
        n = info.n_bytes // E // 2
        first = 0 if part == "ffn_gate_exps" else n
        yield _derive(name, shapes[name], info, partial(_cut, n_runs=E, first=first, last=first + n))
        yield from _scale(name, info, tensors)


def _single_experts(name: str, shapes: Shapes, tensors: Infos) -> Iterator[_Derived]:
    """`ffn_gate.E.weight` and so on: a tensor for each expert."""
    stem = name.removesuffix("_exps.weight")
    first = tensors.get(f"{stem}.0.weight")
    if stem == name or first is None:
        return
    E, *matrix = shapes[name]
    for e in range(E):
        single = tensors.get(f"{stem}.{e}.weight")
        if single is None:
            raise UserError(f"tensor {stem}.{e}.weight is missing: the file should have {E} experts")
        _expect(single, tuple(matrix))
        if single.type is not first.type:
            raise UserError(f"tensor {single.name} is {single.type.name}, that of expert 0 {first.type.name}")
    info = replace(first, name=name, shape=shapes[name], n_bytes=E * first.n_bytes)
    yield _Derived(info, tuple(f"{stem}.{e}.weight" for e in range(E)), np.concatenate)


def _fused_rows(name: str, shapes: Shapes, tensors: Infos) -> Iterator[_Derived]:
    """`attn_qkv`: the rows of queries, keys and values, one behind the other."""
    parts = ("attn_q.", "attn_k.", "attn_v.")
    part, info = _original(name, tensors, parts, "attn_qkv.")
    if info is not None:
        n_rows = [shapes[name.replace(part, other)][0] for other in parts]
        _expect(info, (sum(n_rows), *shapes[name][1:]))
        n, before = info.n_bytes // info.shape[0], sum(n_rows[: parts.index(part)])
        first, last = before * n, (before + shapes[name][0]) * n
        yield _derive(name, shapes[name], info, partial(_cut, n_runs=1, first=first, last=last))
        yield from _scale(name, info, tensors)


def _latent(name: str, shapes: Shapes, tensors: Infos) -> Iterator[_Derived]:
    """`attn_kv_b`: of each head the rows that make its key of a latent, then those that make its value.

    `attn_k_b` is the first part transposed. Blocks cannot be transposed, so it becomes plain numbers: in half
    precision where the file has less.
    """
    part, info = _original(name, tensors, ("attn_k_b.weight", "attn_v_b.weight"), "attn_kv_b.weight")
    if info is None:
        return
    H, v_dim, n_latent = shapes[name.replace(part, "attn_v_b.weight")]
    k_dim = shapes[name.replace(part, "attn_k_b.weight")][2]
    _expect(info, (H * (k_dim + v_dim), n_latent))
    n_keys = k_dim * info.type.row_bytes(n_latent)
    if part == "attn_v_b.weight":
        last = info.n_bytes // H
        yield _derive(name, shapes[name], info, partial(_cut, n_runs=H, first=n_keys, last=last))
    else:
        to = info.type if info.type in (TensorType.F32, TensorType.BF16) else TensorType.F16
        read = partial(_keys_transposed, n_keys=n_keys, type=info.type, to=to, shape=(H, k_dim, n_latent))
        yield _derive(name, shapes[name], replace(info, type=to), read)
    yield from _scale(name, info, tensors)


def _delta_inputs(name: str, shapes: Shapes, tensors: Infos) -> Iterator[_Derived]:
    """`ssm_in`: of each key head the rows of its query, its key, its values, and their gates."""
    part, info = _original(name, tensors, ("attn_qkv.weight", "attn_gate.weight"), "ssm_in.weight")
    if info is None:
        return
    n_channels, n_embd = shapes[name.replace(part, "attn_qkv.weight")]
    n_values = shapes[name.replace(part, "attn_gate.weight")][0]
    (dim,) = shapes[name.replace(part, "ssm_norm.weight")]
    n_runs = (n_channels - n_values) // 2 // dim
    _expect(info, (n_channels + n_values, n_embd))
    row_bytes = info.n_bytes // info.shape[0]
    ends = [0, dim, 2 * dim, 2 * dim + n_values // n_runs, 2 * dim + 2 * n_values // n_runs]
    cuts = [partial(_cut, n_runs=n_runs, first=a * row_bytes, last=b * row_bytes) for a, b in pairwise(ends)]
    if part == "attn_gate.weight":
        yield _derive(name, shapes[name], info, cuts[3])
    else:
        yield _derive(name, shapes[name], info, lambda raw: np.concatenate([cut(raw) for cut in cuts[:3]]))
    yield from _scale(name, info, tensors)


def _original(name: str, tensors: Infos, parts: tuple[str, ...], whole: str) -> tuple[str, TensorInfo | None]:
    """Which of `parts` the name contains, and the tensor that has `whole` in its place."""
    part = next((part for part in parts if part in name), "")
    return part, tensors.get(name.replace(part, whole)) if part else None


def _derive(name: str, shape: tuple[int, ...], info: TensorInfo, read: Callable[[Bytes], Bytes]) -> _Derived:
    """A tensor made of one other, `info`; its type counts."""
    n_bytes = prod(shape[:-1]) * info.type.row_bytes(shape[-1])
    return _Derived(
        replace(info, name=name, shape=shape, n_bytes=n_bytes), (info.name,), lambda originals: read(originals[0])
    )


def _scale(name: str, info: TensorInfo, tensors: Infos) -> Iterator[_Derived]:
    """The scale of a tensor is the scale of each of its parts."""
    scale = tensors.get(info.name.removesuffix(".weight") + ".scale")
    if scale is not None and name.endswith(".weight"):
        yield _derive(name.removesuffix(".weight") + ".scale", scale.shape, scale, lambda raw: raw)


def _expect(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        found, wanted = ("{" + ", ".join(map(str, reversed(s))) + "}" for s in (info.shape, shape))
        raise UserError(f"tensor {info.name}: shape {found}, expected {wanted}; convert the model again")


def _cut(raw: Bytes, *, n_runs: int, first: int, last: int) -> Bytes:
    """Bytes `first` to `last` of each of `n_runs` runs of equal length."""
    return raw.reshape(n_runs, -1)[:, first:last].reshape(-1)


def _keys_transposed(
    raw: Bytes, *, n_keys: int, type: TensorType, to: TensorType, shape: tuple[int, int, int]
) -> Bytes:
    """The first `n_keys` bytes of each head as a matrix, its two dimensions exchanged, in plain numbers."""
    import torch

    from overspill.quant.dequant import dequantize
    from overspill.quant.qtensor import QTensor

    dtypes = {TensorType.F32: torch.float32, TensorType.F16: torch.float16, TensorType.BF16: torch.bfloat16}
    keys = _cut(raw, n_runs=shape[0], first=0, last=n_keys)
    values = dequantize(QTensor.from_bytes(torch.from_numpy(keys.copy()), type, shape))
    out: Bytes = values.transpose(1, 2).to(dtypes[to]).contiguous().view(torch.uint8).numpy().reshape(-1)
    return out
