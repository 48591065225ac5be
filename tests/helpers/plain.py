"""A model on the CPU without any pipeline: the plain forward that everything else is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from overspill.cache.cells import CellType, Segment
from overspill.cache.kv import KvCache
from overspill.device.base import Devices
from overspill.device.cpu import CpuDevice
from overspill.gguf.source import ModelSource
from overspill.kernels import Ops, ref
from overspill.models.base import Model, UbatchView, forward
from overspill.models.check import understand
from overspill.pipeline.history import TokenHistory
from overspill.pipeline.split import Layout
from overspill.pipeline.weights import load

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(os.environ.get("OVERSPILL_FIXTURES", Path(__file__).parents[3] / "shared" / "fixtures"))


def plain_model(source: ModelSource, ops: Ops = ref.OPS) -> Model:
    """All weights in place on the CPU."""
    arch, hp, specs, source = understand(source)
    layout = Layout(0, (0,) * hp.n_layer, 0, ((),) * hp.n_layer)
    devices = Devices((), CpuDevice(is_asynchronous=False))
    return load(source, specs, arch.Model, hp, layout, devices, lambda device: ops).model


def new_caches(model: Model, n_cells: int, *, n_slots: int = 1, cells: CellType = CellType.F32) -> list[KvCache]:
    """Empty caches, one for each layer."""
    caches = []
    for i in range(model.hparams.n_layer):
        shape = model.hparams.kv_shape(i)
        stored = shape.tensor_shapes(n_slots, n_cells)
        n_plain = len(stored) - len(shape.blocks)
        tensors = [_nothing(dims, cells) for dims in stored[:n_plain]]
        tensors += [torch.full(dims, torch.nan, dtype=_BLOCKS.get(cells)) for dims in stored[n_plain:]]
        states = [torch.full(dims, torch.nan) for dims in shape.state_shapes(n_slots)]
        caches.append(KvCache.over(shape, [*tensors, *states], model.ops(i).q8_rows))
    return caches


_BLOCKS = {CellType.F16: torch.float16, CellType.BF16: torch.bfloat16, CellType.Q8_0: torch.float16}


def _nothing(dims: tuple[int, ...], cells: CellType) -> torch.Tensor:
    """Cells of no number: all bits are set."""
    n_bytes = cells.row_bytes(dims[-1])
    raw = torch.full((*dims[:-1], n_bytes), 0xFF, dtype=torch.uint8)
    return raw if cells is CellType.Q8_0 else raw.view(_BLOCKS.get(cells, torch.float32))


class Plain:
    """One sequence of a model, ubatch after ubatch."""

    def __init__(self, model: Model, n_cells: int, cells: CellType = CellType.F32) -> None:
        self._model = model
        self._caches = new_caches(model, n_cells, cells=cells)
        self._history = TokenHistory(model.hparams.n_before, n_slots=1, n_cells=n_cells)
        self._n_done = 0

    def __call__(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits `[T, V]` of the next tokens."""
        segment = Segment(0, self._n_done, len(ids))
        before = self._history.add(list(ids), [segment])
        self._n_done = segment.end_pos
        positions = torch.arange(segment.first_pos, segment.end_pos, dtype=torch.int32)
        view = UbatchView((segment,), positions, torch.tensor(np.asarray(ids, dtype=np.int32)))
        return forward(self._model, before, self._caches, view)


def plain_logits(model: Model, ids: Sequence[int], n_ubatch: int, cells: CellType = CellType.F32) -> torch.Tensor:
    """Logits of all positions `[T, V]`, computed ubatch by ubatch."""
    plain = Plain(model, len(ids), cells)
    return torch.cat([plain(ids[first : first + n_ubatch]) for first in range(0, len(ids), n_ubatch)])
