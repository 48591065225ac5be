"""What placement must know of a model: its tensors' sizes and roles, and what a token costs in each layer.

A `ModelShape` is made from a file's tensor list and hyper-parameters, or invented by a test; it holds no weights.
Only the weights of routed experts have the role EXPERT: they alone may live apart from their layer, because they are
most of the bytes and each token reads few of them. Routers, shared experts, and the biases and scales of routed
experts stay with the layer: they are small, and every token needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final, NamedTuple

TOKEN_EMBEDDING: Final = "token_embd.weight"
OUTPUT_WEIGHT: Final = "output.weight"
LOOKUP_TABLE: Final = "per_layer_token_embd.weight"

_LAYER: Final = re.compile(r"blk\.(\d+)\.")
_EXPERT: Final = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)(?:_(?:ch)?exps|\.\d+)\.weight")


class Role(StrEnum):
    """Which rule places a tensor: read on the host, part of a layer, routed experts of a layer, or of the output.

    LOOKUP: a table of which so few rows are ever read that it stays in the file, and takes no memory.
    """

    EMBED = "embed"
    LOOKUP = "lookup"
    LAYER = "layer"
    EXPERT = "expert"
    OUTPUT = "output"


class TensorSize(NamedTuple):
    """A tensor as placement sees it: bytes as stored in the file; `layer` is None outside the layers."""

    name: str
    n_bytes: int
    layer: int | None
    role: Role


def role_of(name: str) -> tuple[Role, int | None]:
    """Role and layer of a tensor, from its GGUF name.

    EXPERT: `blk.N.ffn_{gate,up,down,gate_up}_exps.weight`, `..._chexps.weight`, and the old one-tensor-per-expert
    form `blk.N.ffn_gate.E.weight`. A name outside the layers that is not of the output is EMBED: the host reads it.
    """
    layer = _LAYER.match(name)
    if layer is not None:
        return (Role.EXPERT if _EXPERT.fullmatch(name) else Role.LAYER), int(layer[1])
    if name == LOOKUP_TABLE:
        return Role.LOOKUP, None
    return (Role.OUTPUT if name.startswith("output") else Role.EMBED), None


def sized_tensors(sizes: Iterable[tuple[str, int]], *, n_layer: int) -> tuple[TensorSize, ...]:
    """(name, bytes) pairs with their roles. Layers from `n_layer` on (prediction layers) are not run: left out."""
    tensors = (_sized(name, n_bytes) for name, n_bytes in sizes)
    return tuple(t for t in tensors if t.layer is None or t.layer < n_layer)


def _sized(name: str, n_bytes: int) -> TensorSize:
    role, layer = role_of(name)
    return TensorSize(name, n_bytes, layer, role)


class CellRing(NamedTuple):
    """Cells of a layer that sees at most `reach` positions: so many, and one for each token of a ubatch."""

    reach: int
    cell_bytes: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes and costs of one model.

    kv_bytes_per_cell: per layer, bytes that grow with each context cell. rings: per layer, cells whose number does not;
    (): there are none. state_bytes: per layer, bytes of one recurrent state. flops_per_token: per layer, products with
    weights. attention_flops: per layer, for each pair of a query token and a visible key (4 * heads * head size).
    x_dim: numbers that go with a token from layer to layer. expert_values: weights of one routed expert, in the layer
    where they are most. n_expert_slices: into so many slices of their hidden width experts may be cut.
    """

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    tensors: tuple[TensorSize, ...]
    kv_bytes_per_cell: tuple[int, ...]
    state_bytes: tuple[int, ...]
    flops_per_token: tuple[float, ...]
    attention_flops: tuple[float, ...]
    output_flops: float
    x_dim: int
    expert_values: int = 0
    n_expert_slices: int = 1
    rings: tuple[CellRing | None, ...] = ()

    def __post_init__(self) -> None:
        per_layer = (self.kv_bytes_per_cell, self.state_bytes, self.flops_per_token, self.attention_flops)
        assert all(len(values) == self.n_layer for values in per_layer)
        assert len(self.rings) in (0, self.n_layer)
        assert all(t.layer is None or t.layer < self.n_layer for t in self.tensors), "use sized_tensors"
        assert self.n_expert > 0 or not any(t.role is Role.EXPERT for t in self.tensors)

    @property
    def has_states(self) -> bool:
        """Whether some layer is recurrent."""
        return any(self.state_bytes)

    def layer_bytes(self, layer: int) -> int:
        """Weights of one layer without its routed experts."""
        return self.dense_bytes[layer]

    def expert_bytes(self, layer: int) -> int:
        """Weights of one layer's routed experts, 0 for a dense layer."""
        return self.routed_bytes[layer]

    def expert_flops(self, layer: int) -> float:
        """FLOPs per token in the routed experts, from the share of the layer's bytes that a token reads."""
        read = self.expert_bytes(layer) * self.n_expert_used / max(1, self.n_expert)
        return self.flops_per_token[layer] * read / (read + self.layer_bytes(layer))

    @cached_property
    def dense_bytes(self) -> tuple[int, ...]:
        """`layer_bytes` of all layers."""
        return self._bytes_per_layer(Role.LAYER)

    @cached_property
    def routed_bytes(self) -> tuple[int, ...]:
        """`expert_bytes` of all layers."""
        return self._bytes_per_layer(Role.EXPERT)

    @cached_property
    def n_tensors(self) -> tuple[int, ...]:
        """Tensors of each layer: about so many ops compute it."""
        counts = [0] * self.n_layer
        for t in self.tensors:
            if t.layer is not None:
                counts[t.layer] += 1
        return tuple(counts)

    @cached_property
    def embed_bytes(self) -> int:
        return self._bytes_of(Role.EMBED)

    @cached_property
    def has_lookup(self) -> bool:
        """Whether embeddings read a table that stays in the file: then the host makes them."""
        return any(t.role is Role.LOOKUP for t in self.tensors)

    @cached_property
    def output_bytes(self) -> int:
        """What the device that computes logits holds: the output tensors, and the embedding where it is tied."""
        return self._bytes_of(Role.OUTPUT) + self.tied_bytes

    @cached_property
    def tied_bytes(self) -> int:
        """Size of the token embedding where it also serves as output matrix, else 0."""
        if any(t.name == OUTPUT_WEIGHT for t in self.tensors):
            return 0
        return sum(t.n_bytes for t in self.tensors if t.name == TOKEN_EMBEDDING)

    @cached_property
    def total_bytes(self) -> int:
        return sum(t.n_bytes for t in self.tensors)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of `tensors`, in their order."""
        return tuple(t.name for t in self.tensors)

    @property
    def is_moe(self) -> bool:
        return self.n_expert > 0

    def _bytes_per_layer(self, role: Role) -> tuple[int, ...]:
        totals = [0] * self.n_layer
        for t in self.tensors:
            if t.role is role and t.layer is not None:
                totals[t.layer] += t.n_bytes
        return tuple(totals)

    def _bytes_of(self, role: Role) -> int:
        return sum(t.n_bytes for t in self.tensors if t.role is role)
