"""Random models of a named shape: a source of tensors that needs no file.

Blocks are made in their quantised form: random codes under scales that give the wanted spread, so that activations
and logits stay sane and routing is spread over all experts. A tensor repeats a random tile of a few MiB: what is
read, moved and computed is the same, and 100 GB of weights appear at the speed of memory.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

from overspill.bench.families import Values
from overspill.bench.shapes import SHAPES
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.models.registry import architecture
from overspill.models.specs.base import TensorSpec
from overspill.placement.shape import Role, role_of

_TILE_BLOCKS = 1 << 16
_SAMPLE_BLOCKS = 64
_T = TensorType

# Where a block keeps its half-precision factors, and how large each is relative to the first: a minimum is taken off,
# so its factor is chosen to centre the values.
_FACTORS: dict[TensorType, tuple[tuple[int, float], ...]] = {
    _T.Q4_0: ((0, 1.0),),
    _T.Q4_1: ((0, 1.0), (2, -7.5)),
    _T.Q5_0: ((0, 1.0),),
    _T.Q5_1: ((0, 1.0), (2, -15.5)),
    _T.Q8_0: ((0, 1.0),),
    _T.Q2_K: ((80, 1.0), (82, 1.5)),
    _T.Q3_K: ((108, 1.0),),
    _T.Q4_K: ((0, 1.0), (2, 7.5)),
    _T.Q5_K: ((0, 1.0), (2, 15.5)),
    _T.Q6_K: ((208, 1.0),),
    _T.IQ4_NL: ((0, 1.0),),
    _T.IQ4_XS: ((0, 1.0),),
}
_CONV = "conv1d"
_PLAIN = {_T.F32: np.float32, _T.F16: np.float16}


@dataclass(frozen=True)
class SyntheticModel:
    """A `ModelSource` of random weights: matrices of `type`, router and vectors F32.

    A table of which few rows are read is all zeros, and takes no memory.
    """

    name: str
    keys: Keys
    type: TensorType
    seed: int = 0

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every required tensor of the architecture."""
        arch = architecture(self.keys.arch)
        specs = arch.tensors(arch.read_hparams(self.keys))
        wanted = [s for s in specs if s.is_required or s.name == "output.weight"]
        return {spec.name: self._info(spec) for spec in wanted}

    def _info(self, spec: TensorSpec) -> TensorInfo:
        type = self._type_of(spec)
        n_bytes = prod(spec.shape[:-1]) * type.row_bytes(spec.shape[-1])
        return TensorInfo(name=spec.name, shape=spec.shape, type=type, n_bytes=n_bytes, part=0, offset=0)

    def _type_of(self, spec: TensorSpec) -> TensorType:
        if spec.is_index:
            return _T.I32
        if len(spec.shape) == 1 or spec.name.endswith((".bias", "ffn_gate_inp.weight")) or _CONV in spec.name:
            return _T.F32
        is_whole = spec.shape[-1] % self.type.block.n_elements == 0
        return self.type if is_whole else _T.Q8_0

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """Random blocks; the same for each call."""
        info = self.tensors[name]
        if role_of(name)[0] is Role.LOOKUP:
            return _zeros(info.n_bytes)
        if info.type is _T.I32:
            return _expert_ids(*info.shape, n_expert=self.keys.scoped(self.keys.arch).u32("expert_count"))
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if info.type is _T.F32:
            return _plain(rng, info)
        n_blocks = info.n_bytes // info.type.block.n_bytes
        tile = _blocks(rng, info.type, min(n_blocks, _TILE_BLOCKS), _spread(info)).reshape(-1)
        return np.resize(tile, info.n_bytes)

    def file_range(self, name: str) -> None:
        """None: in no file, made when asked for."""


def synthetic(shape: str, *, quant: str, n_layer: int | None = None, seed: int = 0) -> SyntheticModel:
    """A random model of a named shape, optionally with another depth. `UserError` for unknown names."""
    if shape not in SHAPES:
        raise UserError(f"--shape {shape}: choose one of {', '.join(sorted(SHAPES))}")
    if quant not in TensorType.__members__ or not _can_make(TensorType[quant]):
        known = [t.name for t in TensorType if _can_make(t)]
        raise UserError(f"--quant {quant}: choose one of {', '.join(known)}")
    if n_layer is not None and n_layer < 1:
        raise UserError(f"--layers {n_layer}: give at least 1")
    values = dict(SHAPES[shape])
    if n_layer is not None:
        values = _with_layers(values, n_layer)
    return SyntheticModel(f"{shape} {quant} (random)", Keys.of(values, shape), TensorType[quant], seed)


def _with_layers(values: Values, n_layer: int) -> Values:
    """The same with another number of layers; what is there for each layer ends early or begins again."""
    name = f"{values['general.architecture']}.block_count"
    n_before = values[name]
    cut = {
        key: tuple(value[i % len(value)] for i in range(n_layer))
        if isinstance(value, tuple) and len(value) == n_before
        else value
        for key, value in values.items()
    }
    return cut | {name: n_layer}


def _zeros(n_bytes: int) -> NDArray[np.uint8]:
    """A file of which no byte is stored, mapped: pages come into being when they are read, and may go again."""
    with tempfile.TemporaryFile() as file:
        file.truncate(n_bytes)
        return np.memmap(file, np.uint8, "r", shape=(n_bytes,))


def _expert_ids(n_vocab: int, n_used: int, *, n_expert: int) -> NDArray[np.uint8]:
    """Of each token different experts, spread evenly."""
    ids = np.arange(n_vocab, dtype=np.int32)[:, None] * n_used + np.arange(n_used, dtype=np.int32)
    return (ids % n_expert).reshape(-1).view(np.uint8)


def _can_make(type: TensorType) -> bool:
    return type in _FACTORS or type in _PLAIN or type in (_T.BF16, _T.MXFP4)


def _spread(info: TensorInfo) -> float:
    """Standard deviation of a matrix: about 1 / sqrt(fan-in), so that activations keep their size."""
    if info.name == "token_embd.weight":
        return 1.0
    return (3.0 if info.name == "output.weight" else 1.2) / sqrt(info.shape[-1])


def _plain(rng: np.random.Generator, info: TensorInfo) -> NDArray[np.uint8]:
    if info.name.endswith("ssm_a"):  # decays, which must be
        values = -np.exp(rng.uniform(-1.0, 2.0, info.shape))
    elif len(info.shape) == 1:
        values = rng.normal(0.0 if info.name.endswith(".bias") else 1.0, 0.2, info.shape)
    else:
        values = rng.normal(0.0, 1.5 / sqrt(info.shape[-1]), info.shape)
    return values.astype(np.float32).reshape(-1).view(np.uint8)


def _blocks(rng: np.random.Generator, type: TensorType, n_blocks: int, spread: float) -> NDArray[np.uint8]:
    """Blocks uint8 `[n_blocks, block bytes]` whose values have the standard deviation `spread`."""
    if type in _PLAIN or type is _T.BF16:
        return _float_blocks(rng, type, n_blocks, spread)
    raw = rng.integers(0, 256, (n_blocks, type.block.n_bytes), dtype=np.uint8)
    if type is _T.MXFP4:
        raw[:, 0] = 128 + round(np.log2(spread / 6.2))
        return raw
    return _with_factor(raw, type, spread / _deviation(_with_factor(raw[:_SAMPLE_BLOCKS].copy(), type, 1.0), type))


def _deviation(blocks: NDArray[np.uint8], type: TensorType) -> float:
    import torch  # here: plans of a shape are made without it

    from overspill.quant.dequant import dequantize
    from overspill.quant.qtensor import QTensor

    return float(dequantize(QTensor(torch.from_numpy(blocks), type, (len(blocks), type.block.n_elements))).std())


def _float_blocks(rng: np.random.Generator, type: TensorType, n_blocks: int, spread: float) -> NDArray[np.uint8]:
    values = rng.normal(0.0, spread, (n_blocks, 1)).astype(np.float32)
    if type is _T.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(_PLAIN[type]).view(np.uint8)


def _with_factor(raw: NDArray[np.uint8], type: TensorType, factor: float) -> NDArray[np.uint8]:
    for offset, ratio in _FACTORS[type]:
        raw[:, offset : offset + 2] = np.full(1, factor * ratio, "<f2").view(np.uint8)
    return raw
