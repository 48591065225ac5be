"""What every model shares: a layer's weights, and the contract.

A model is tensor functions only; hyper-parameters and tensor lists are data and lie in `models.specs`. The contract is
six steps, and `pipeline.split` cuts the work at the same names:

    embed(ids, before) -> x    token ids to hidden states
    attend(i, x, cache, view)  attention of layer i, residual included
    route(i, x, view)          the layer's own feed-forward part (dense or shared) added to x, and the routing of the
                               rest: None where the layer has no routed experts
    added_to(x) -> y           the part of x that experts are added to, a view
    experts(i, y, routing, w, ops)  adds the routed experts that `w` holds to y, in place; `ops` because experts in
                               host RAM may be computed elsewhere than their layer
    output(x) -> logits        final norm and head, for the rows that are wanted

`layers(first, x, caches, view)` is attend, route and experts of layers whose experts lie where they compute.

Each layer's weights are bound to a device by the loader; a model never asks which.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.kernels import Ops, StateSteps, Steps
from overspill.models.rope import Rope
from overspill.models.specs.base import HParams, TensorSpec
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

__all__ = ["Block", "HParams", "Model", "Routing", "TensorSpec", "UbatchView", "forward", "forward_layer"]


class Block:
    """Weights of one layer (or of the embedding, or of the head) by GGUF name without the `blk.N.` prefix.

    Matrices are `QTensor`s; one-dimensional tensors and all biases are float32. All of them lie on one device, and
    `ops` are the kernels of that device: a block is what the loader binds to a place.
    """

    def __init__(self, ops: Ops, matrices: Mapping[str, QTensor], vectors: Mapping[str, torch.Tensor]) -> None:
        self.ops = ops
        self._matrices = matrices
        self._vectors = vectors

    def matrix(self, name: str) -> QTensor:
        """`name.weight` of two or three dimensions."""
        return self._matrices[name + ".weight"]

    def vector(self, name: str) -> torch.Tensor:
        """`name.weight` of one dimension."""
        return self._vectors[name + ".weight"]

    def values(self, name: str) -> torch.Tensor:
        """A tensor of one dimension that is called `name` and nothing else."""
        return self._vectors[name]

    def bias(self, name: str) -> torch.Tensor | None:
        """`name.bias`, None where the file has none."""
        return self._vectors.get(name + ".bias")

    def scale(self, name: str) -> torch.Tensor | None:
        """`name.scale`, what products with `name.weight` are multiplied by; None where the file has none."""
        return self._vectors.get(name + ".scale")

    @property
    def device(self) -> torch.device:
        """Where the weights are, for blocks that have vectors."""
        return next(iter(self._vectors.values())).device

    def has(self, name: str) -> bool:
        """Whether `name.weight` is in the file."""
        return name + ".weight" in self._matrices or name + ".weight" in self._vectors


class Routing(NamedTuple):
    """Which experts get which tokens. normed: `[T, D]`; ids: int32 `[T, K]`; mix: float32 `[T, K]`."""

    normed: torch.Tensor
    ids: torch.Tensor
    mix: torch.Tensor


@dataclass(frozen=True, eq=False)
class UbatchView:
    """What attention must know of a ubatch on one device.

    segments: in row order. positions, ids: of each row, and its token, int32 `[T]`. turned: cos and sin that layers
    have computed so far, by what `Rope` calls them; layers that rotate alike share them. steps, state_rows: set where
    the work is recorded; then nothing may depend on the segments.
    """

    segments: tuple[Segment, ...]
    positions: torch.Tensor
    ids: torch.Tensor
    turned: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    steps: Steps | None = None
    state_rows: StateSteps | None = None

    @property
    def is_one_token(self) -> bool:
        """Whether it is one, and known to the host."""
        return self.steps is None and len(self.segments) == 1 and self.segments[0].n_tokens == 1

    def angles(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `[T, n_rot / 2]` of the rows."""
        if rope.name not in self.turned:
            self.turned[rope.name] = rope.angles(self.positions)
        return self.turned[rope.name]


class Model(Protocol):
    """The contract of the module's text."""

    def __init__(self, hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> None: ...

    @property
    def hparams(self) -> HParams: ...

    def embed(self, ids: torch.Tensor, before: torch.Tensor) -> torch.Tensor: ...

    def attend(self, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor: ...

    def route(self, i_layer: int, x: torch.Tensor, view: UbatchView) -> Routing | None: ...

    def added_to(self, x: torch.Tensor) -> torch.Tensor: ...

    def experts(self, i_layer: int, y: torch.Tensor, routing: Routing, weights: ExpertWeights, ops: Ops) -> None: ...

    def layers(self, first: int, x: torch.Tensor, caches: Sequence[KvCache], view: UbatchView) -> torch.Tensor: ...

    def resident_experts(self, i_layer: int) -> ExpertWeights: ...

    def resident_part(self, i_layer: int, i_part: int) -> QTensor: ...

    def expert_vectors(self, i_layer: int) -> ExpertVectors: ...

    def ops(self, i_layer: int) -> Ops: ...

    def token_logits(self, token: int, segment: Segment, caches: Sequence[KvCache]) -> torch.Tensor | None: ...

    def output(self, x: torch.Tensor) -> torch.Tensor: ...


def forward_layer(model: Model, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor:
    """A whole layer whose experts lie where it computes."""
    x = model.attend(i_layer, x, cache, view)
    routing = model.route(i_layer, x, view)
    if routing is not None:
        model.experts(i_layer, model.added_to(x), routing, model.resident_experts(i_layer), model.ops(i_layer))
    return x


def forward(model: Model, before: torch.Tensor, caches: Iterable[KvCache], view: UbatchView) -> torch.Tensor:
    """One ubatch through all layers on one device: the plain meaning of a model. Returns logits `[T, V]`.

    before: the tokens before each one, see `HParams.n_before`.
    """
    x = model.embed(view.ids, before)
    for i_layer, cache in enumerate(caches):
        x = forward_layer(model, i_layer, x, cache, view)
    return model.output(x)
