"""Layers for one token in one compiled call.

Beside a token's numbers, Python between compiled calls costs a quarter of a token where layers are small: it runs from
memory that the weights have pushed out of every cache. So the steps of all layers that follow each other are one
program, written once, for the thread that calls, its number of threads and the cells of its sequences. Python then only
says where the token is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from overspill.kernels import TokenLayer
from overspill.kernels.numba.crew import Crew, n_threads
from overspill.kernels.numba.experts import PreparedExperts
from overspill.kernels.numba.native import Step
from overspill.kernels.numba.one_token import attention_steps, router_steps
from overspill.kernels.numba.pieces import Pieces
from overspill.kernels.numba.token_cells import LayerCells, cells_bytes, find_cells_address


class TokenLayers:
    """Some layers, or the attention half of one."""

    def __init__(self, layers: Sequence[TokenLayer]) -> None:
        self._layers = layers
        self._written_for: tuple[object, ...] = ()

    def __call__(
        self,
        x: Tensor,
        cells: Sequence[tuple[Tensor, Tensor]],
        slot: int,
        position: int,
        angles: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """`kernels.TokenLayers`."""
        shapes = (x.shape, *(angle.shape for pair in angles for angle in pair))
        circumstances = (threading.get_ident(), n_threads(), *shapes, *(id(part) for pair in cells for part in pair))
        if self._written_for != circumstances:
            self._write(x, cells, angles)
            self._written_for, self._cells = circumstances, cells
        if not (0 <= slot < self._n_slots and 0 <= position < self._n_positions):
            raise ValueError(f"position {position} of sequence {slot} has no cells")
        self._x.copy_(x)
        for own, given in zip(self._angles, angles, strict=True):
            own[0].copy_(given[0])
            own[1].copy_(given[1])
        self._call.write((slot, position))
        self._crew.run()
        return self._x.clone()

    def _write(
        self, x: Tensor, cells: Sequence[tuple[Tensor, Tensor]], angles: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        pieces, layers = Pieces(), self._layers
        self._x = pieces.tensor("x", *x.shape)
        self._angles = [
            (pieces.tensor(f"cos {i}", *cos.shape), pieces.tensor(f"sin {i}", *sin.shape))
            for i, (cos, sin) in enumerate(angles)
        ]
        self._n_slots = min(len(keys) for keys, _ in cells)
        # Cells of a layer with a window may be a ring, so there only the others bound positions.
        bounds = [keys.shape[2] for layer, (keys, _) in zip(layers, cells, strict=True) if not layer.attention.window]
        self._n_positions = min(bounds, default=1 << 62)
        self._call = pieces.memory("layers", cells_bytes(len(layers)))
        steps, found = [Step(find_cells_address(), self._call.address)], list[LayerCells]()
        for layer, own_cells in zip(layers, cells, strict=True):
            attention, layer_cells = attention_steps(
                layer.attention, self._x, own_cells, self._angles[layer.i_angles], pieces
            )
            steps += attention + self._experts_steps(layer, pieces)
            found.append(layer_cells)
        self._call.write((0, 0, len(layers), *(number for layer_cells in found for number in layer_cells)))
        self._crew = Crew(steps, n_threads(), pieces.kept)

    def _experts_steps(self, layer: TokenLayer, pieces: Pieces) -> list[Step]:
        if layer.experts is None:
            return []
        router, weights, activation = layer.experts
        if weights.gate.shape[0] != router.router.shape[0] or weights.slot_of is not None:
            raise ValueError(f"experts {weights.gate.shape} are not those of a router {router.router.shape}")
        route, routing = router_steps(router, self._x, pieces)
        return route + PreparedExperts(*routing, weights, None, self._x, activation, pieces).steps
