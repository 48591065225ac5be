"""A model on the CPU without any pipeline: the plain forward that everything else is compared with."""

from __future__ import annotations

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
from overspill.pipeline.split import Layout
from overspill.pipeline.weights import load

DATA = Path(__file__).parents[1] / "data"
SHARED = Path(__file__).parents[3] / "shared" / "fixtures"


def plain_model(source: ModelSource, ops: Ops = ref.OPS) -> Model:
    """All weights in place on the CPU."""
    arch, hp, specs, source = understand(source)
    layout = Layout(0, (0,) * hp.n_layer, 0, ((),) * hp.n_layer)
    devices = Devices((), CpuDevice(is_asynchronous=False))
    return load(source, specs, arch.Model, hp, layout, devices, lambda device: ops).model


def new_caches(model: Model, n_cells: int, *, n_slots: int = 1) -> list[KvCache]:
    """Empty caches, one for each layer."""
    shapes = [model.hparams.kv_shape(i) for i in range(model.hparams.n_layer)]
    return [
        KvCache.over(s, [torch.full(dims, torch.nan) for dims in s.tensor_shapes(n_slots, n_cells)]) for s in shapes
    ]


def plain_logits(model: Model, ids: Sequence[int], n_ubatch: int) -> torch.Tensor:
    """Logits of all positions `[T, V]`, computed ubatch by ubatch."""
    caches = new_caches(model, len(ids))
    rows = []
    for first in range(0, len(ids), n_ubatch):
        piece = torch.tensor(np.asarray(ids[first : first + n_ubatch]))
        n = len(piece)
        view = UbatchView((Segment(0, first, n),), torch.arange(first, first + n, dtype=torch.int32))
        rows.append(forward(model, piece, caches, view))
    return torch.cat(rows)
