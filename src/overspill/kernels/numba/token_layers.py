"""Layers for one token in one compiled call, and what is before and after them.

Beside a token's numbers, Python between compiled calls costs a quarter of a token where layers are small: it runs from
memory that the weights have pushed out of every cache. So the steps of all layers that follow each other are one
program, written once, for the thread that calls, its number of threads and the cells of its sequences. Python then only
says where the token is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from overspill.kernels import TokenEnds, TokenLayer
from overspill.kernels.numba.crew import Crew, n_threads
from overspill.kernels.numba.experts import PreparedExperts
from overspill.kernels.numba.lookup import lookup_step
from overspill.kernels.numba.native import Step
from overspill.kernels.numba.one_token import attention_steps, norm_product_steps, router_steps
from overspill.kernels.numba.pieces import Pieces
from overspill.kernels.numba.token_cells import TOKEN_AT, LayerCells, cells_bytes, find_cells_address


class TokenLayers:
    """Some layers, or the attention half of one, or all layers between their ends."""

    def __init__(self, layers: Sequence[TokenLayer], ends: TokenEnds | None) -> None:
        self._layers = layers
        self._ends = ends
        self._written_for: tuple[object, ...] = ()

    def __call__(
        self,
        x: Tensor | int,
        cells: Sequence[tuple[Tensor, Tensor]],
        slot: int,
        position: int,
        angles: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """`kernels.TokenLayers`."""
        shapes = tuple(angle.shape for pair in angles for angle in pair)
        circumstances = (threading.get_ident(), n_threads(), *shapes, *(id(part) for pair in cells for part in pair))
        if self._written_for != circumstances:
            self._write(cells, angles)
            self._written_for, self._cells = circumstances, cells
        if not (0 <= slot < self._n_slots and 0 <= position < self._n_positions):
            raise ValueError(f"position {position} of sequence {slot} has no cells")
        self._turns.write(tuple(angle.data_ptr() for pair in angles for angle in pair))
        self._call.write((slot, position, self._begin(x)))
        self._crew.run()
        return torch.from_numpy(self._found.copy())  # torch would wake threads for logits

    def _begin(self, x: Tensor | int) -> int:
        """Hidden states are put in place; a token is returned, for the call."""
        if isinstance(x, Tensor):
            self._x.copy_(x)
            return 0
        assert self._ends is not None
        n_rows = self._ends.embedding.shape[0]
        if not 0 <= x < n_rows:
            raise IndexError(f"ids must be 0 to {n_rows - 1}: {x}")
        return x

    def _write(self, cells: Sequence[tuple[Tensor, Tensor]], angles: Sequence[tuple[Tensor, Tensor]]) -> None:
        pieces, layers = Pieces(), self._layers
        self._x = pieces.tensor("x", 1, layers[0].attention.gain.numel())
        self._turns = pieces.memory("angles", 16 * len(angles))
        self._n_slots = min(len(keys) for keys, _ in cells)
        # Cells of a layer with a window may be a ring, so there only the others bound positions.
        bounds = [keys.shape[2] for layer, (keys, _) in zip(layers, cells, strict=True) if not layer.attention.window]
        self._n_positions = min(bounds, default=1 << 62)
        self._call = pieces.memory("layers", cells_bytes(len(layers)))
        first, last, found = self._end_steps(pieces)
        steps, all_cells = [Step(find_cells_address(), self._call.address), *first], list[LayerCells]()
        for layer, own_cells in zip(layers, cells, strict=True):
            attention, layer_cells = attention_steps(
                layer.attention, self._x, own_cells, angles[layer.i_angles], pieces
            )
            steps += attention + self._experts_steps(layer, pieces)
            all_cells.append(layer_cells._replace(i_angles=layer.i_angles))
        numbers = (number for layer_cells in all_cells for number in layer_cells)
        self._call.write((0, 0, 0, self._turns.address, len(layers), *numbers))
        self._found = found.numpy()
        self._crew = Crew([*steps, *last], n_threads(), pieces.kept)

    def _end_steps(self, pieces: Pieces) -> tuple[list[Step], list[Step], Tensor]:
        """What is before and after all layers, and where it leaves what is asked for."""
        if self._ends is None:
            return [], [], self._x
        embedding, gain, eps, output = self._ends
        n_vocab, n_model = output.shape
        normed, logits = pieces.tensor("normed", 1, n_model), pieces.tensor("logits", 1, n_vocab)
        token = self._call.address + 8 * TOKEN_AT, 1
        first = lookup_step(embedding, token, self._x, pieces.memory)
        return [first], norm_product_steps(gain, eps, output, (self._x, normed, logits), pieces), logits

    def _experts_steps(self, layer: TokenLayer, pieces: Pieces) -> list[Step]:
        if layer.experts is None:
            return []
        router, weights, activation = layer.experts
        if weights.gate.shape[0] != router.router.shape[0] or weights.slot_of is not None:
            raise ValueError(f"experts {weights.gate.shape} are not those of a router {router.router.shape}")
        route, routing = router_steps(router, self._x, pieces)
        return route + PreparedExperts(*routing, weights, None, self._x, activation, pieces).steps
