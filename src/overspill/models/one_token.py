"""What one token goes through in compiled calls, where the kernels of its layers' device have them.

Layers that are plain throughout, and follow each other, are one call; of the others the parts that are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from overspill.cache.cells import Segment
from overspill.cache.kv import KvCache
from overspill.kernels import (
    AttentionWeights,
    Ops,
    RoutedWeights,
    RouterWeights,
    TokenEnds,
    TokenExperts,
    TokenLayer,
    TokenLayers,
    TokenRouter,
)
from overspill.models.base import UbatchView
from overspill.models.rope import Rope
from overspill.quant.experts import Activation, ExpertWeights


@dataclass(frozen=True, eq=False)
class PlainParts:
    """The parts of a layer that may be one op; None for one that may not, or is not there. rope: of the attention."""

    ops: Ops
    attention: AttentionWeights | None
    rope: Rope | None
    router: RouterWeights | None


class Together:
    """Layers, or the attention of one, or all layers between their ends, in one call."""

    def __init__(self, call: TokenLayers, ropes: Sequence[Rope]) -> None:
        self._call = call
        self._ropes = ropes

    def suits(self, caches: Iterable[KvCache]) -> bool:
        """Whether the cells are of the type that the calls take."""
        return all(cache.k.dtype == torch.float32 for cache in caches)

    def __call__(self, x: torch.Tensor | int, caches: Sequence[KvCache], segment: Segment) -> torch.Tensor:
        """`[1, D]` -> `[1, D]`, or a token -> `[1, V]`."""
        cells = [(cache.k, cache.v) for cache in caches]
        return self._call(
            x, cells, segment.slot, segment.first_pos, [rope.angles_at(segment.first_pos) for rope in self._ropes]
        )


class OneToken:
    """The compiled calls of a model.

    all_experts: of a layer that keeps them where it computes, and has no parts but the plain ones and them; else None.
    """

    def __init__(
        self,
        layers: Sequence[PlainParts],
        activation: Activation,
        all_experts: Callable[[int], ExpertWeights | None],
    ) -> None:
        self._layers = layers
        self._activation = activation
        self._all_experts = all_experts
        self._attentions = [self._together({i: None}) for i in range(len(layers))]
        self._routers = [_router(layer) for layer in layers]
        self._runs: dict[tuple[int, int], list[tuple[range, Together | None]]] = {}
        self._experts: dict[int, tuple[ExpertWeights, TokenExperts | None]] = {}

    def attend(self, i_layer: int, x: torch.Tensor, cache: KvCache, view: UbatchView) -> torch.Tensor | None:
        """The attention of a layer; None where it is no one call."""
        together = self._attentions[i_layer]
        return together(x, (cache,), view.segments[0]) if together is not None and together.suits((cache,)) else None

    def router(self, i_layer: int) -> TokenRouter | None:
        """The router of a layer."""
        return self._routers[i_layer]

    def experts(self, i_layer: int, weights: ExpertWeights, ops: Ops) -> TokenExperts | None:
        """Made for experts that a layer has for a second time: those that are staged differ every time."""
        known, found = self._experts.get(i_layer, (None, None))
        if known is weights and found is None and ops.token_experts is not None:
            found = ops.token_experts(weights, self._activation)
        self._experts[i_layer] = weights, found if known is weights else None
        return self._experts[i_layer][1]

    def runs(self, first: int, last: int) -> list[tuple[range, Together | None]]:
        """Layers `first <= i < last`, in as few calls as may be; None for those that are no part of one."""
        if (first, last) not in self._runs:
            experts = {i: self._routed(i) for i in range(first, last)}
            runs = []
            for is_one_call, some in groupby(experts, key=lambda i: self._is_one_call(i, experts[i])):
                layers = list(some)
                together = self._together({i: experts[i] for i in layers}) if is_one_call else None
                runs.append((range(layers[0], layers[-1] + 1), together))
            self._runs[first, last] = runs
        return self._runs[first, last]

    def whole(self, ends: TokenEnds) -> Together | None:
        """All layers between their ends; None where they are no one call."""
        ((layers, together), *others) = self.runs(0, len(self._layers))
        return None if together is None or others else self._together({i: self._routed(i) for i in layers}, ends)

    def _routed(self, i_layer: int) -> RoutedWeights | None:
        router, weights = self._layers[i_layer].router, self._all_experts(i_layer)
        return None if router is None or weights is None else RoutedWeights(router, weights, self._activation)

    def _is_one_call(self, i_layer: int, experts: RoutedWeights | None) -> bool:
        return experts is not None and self._together({i_layer: experts}) is not None

    def _together(self, experts: Mapping[int, RoutedWeights | None], ends: TokenEnds | None = None) -> Together | None:
        """Layers, on one device, with these experts; those without: the attention alone."""
        ropes: dict[str, Rope] = {}
        layers = []
        for i, routed in experts.items():
            attention, rope = self._layers[i].attention, self._layers[i].rope
            if attention is None or rope is None:
                return None
            ropes.setdefault(rope.name, rope)
            layers.append(TokenLayer(attention, routed, list(ropes).index(rope.name)))
        make = self._layers[next(iter(experts))].ops.token_layers
        call = None if make is None else make(layers, ends)
        return None if call is None else Together(call, list(ropes.values()))


def _router(layer: PlainParts) -> TokenRouter | None:
    make = layer.ops.token_router
    return None if layer.router is None or make is None else make(layer.router)
