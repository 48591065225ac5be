"""A model on the CPU without any pipeline: the plain forward that everything else is compared with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from overspill.cache.cells import Segment
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


def new_caches(model: Model, n_cells: int, *, n_slots: int = 1) -> list[KvCache]:
    """Empty caches, one for each layer."""
    shapes = [model.hparams.kv_shape(i) for i in range(model.hparams.n_layer)]
    tensors = [(*s.tensor_shapes(n_slots, n_cells), *s.state_shapes(n_slots)) for s in shapes]
    return [KvCache.over(s, [torch.full(d, torch.nan) for d in dims]) for s, dims in zip(shapes, tensors, strict=True)]


class Plain:
    """One sequence of a model, ubatch after ubatch."""

    def __init__(self, model: Model, n_cells: int) -> None:
        self._model = model
        self._caches = new_caches(model, n_cells)
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


def plain_logits(model: Model, ids: Sequence[int], n_ubatch: int) -> torch.Tensor:
    """Logits of all positions `[T, V]`, computed ubatch by ubatch."""
    plain = Plain(model, len(ids))
    return torch.cat([plain(ids[first : first + n_ubatch]) for first in range(0, len(ids), n_ubatch)])
