"""What waves should give: the plain model, ubatch after ubatch, with nothing between it and the answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.cache.cells import CellType
from overspill.models.base import Model, UbatchView
from overspill.pipeline.history import TokenHistory
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.plain import new_caches


class Reference:
    """A model on the CPU with caches of its own. `chosen` says which experts the last wave's routers picked."""

    def __init__(
        self, model: Model, *, n_slots: int = 1, n_cells: int, n_rows: int = 128, cells: CellType = CellType.F32
    ) -> None:
        self._model = model
        self._n_rows = n_rows
        self._caches = new_caches(model, n_cells, n_slots=n_slots, cells=cells)
        self._history = TokenHistory(model.hparams.n_before, n_slots=n_slots, n_cells=n_cells)
        self.chosen: list[list[set[int]]] = []

    def run(self, wave: Wave) -> list[torch.Tensor]:
        """Per ubatch, logits of the wanted rows, `n_rows` rows at a time. `chosen[ubatch][layer]` are expert ids."""
        self.chosen = []
        return [self._run(ubatch) for ubatch in wave.ubatches]

    def _run(self, ubatch: Ubatch) -> torch.Tensor:
        model = self._model
        positions = [p for s in ubatch.segments for p in range(s.first_pos, s.end_pos)]
        view = UbatchView(
            ubatch.segments, torch.tensor(positions, dtype=torch.int32), torch.tensor(ubatch.ids, dtype=torch.int32)
        )
        x = model.embed(view.ids, self._history.add(ubatch.ids, ubatch.segments))
        self.chosen.append([])
        for i, cache in enumerate(self._caches):
            x = model.attend(i, x, cache, view)
            routing = model.route(i, x, view)
            if routing is not None:
                self.chosen[-1].append(set(routing.ids.flatten().tolist()))
                model.experts(i, model.added_to(x), routing, model.resident_experts(i), model.ops(i))
        rows = ubatch.output_rows
        pieces = [list(rows[i : i + self._n_rows]) for i in range(0, len(rows), self._n_rows)]
        return torch.cat([torch.empty(0, model.hparams.n_vocab), *(model.output(x[piece]) for piece in pieces)])


def reference_logits(model: Model, waves: Sequence[Wave], *, n_slots: int = 1, n_cells: int) -> torch.Tensor:
    """Logits `[rows wanted, V]` of waves that follow each other."""
    reference = Reference(model, n_slots=n_slots, n_cells=n_cells)
    return torch.cat([rows for wave in waves for rows in reference.run(wave)])
