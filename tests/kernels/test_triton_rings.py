"""Prompts and steps that pass the end of a ring of cells, in Triton: the bits of cells in a row."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_device import DEVICE

from overspill.cache.cells import CellType, KvShape, Segment
from overspill.cache.kv import KvCache
from overspill.kernels import Steps
from overspill.kernels.triton import make_ops
from overspill.models.base import UbatchView
from overspill.models.layers import PlainHeads, attend_cached
from overspill.models.transformer import _Preparation, _RawHeads

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
N, H, G, A, WINDOW, N_UBATCH = 24, 2, 1, 32, 7, 5


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def attended(shape: KvShape, n_spare: int | None, cells: CellType, *, is_raw: bool) -> torch.Tensor:
    """A prompt in ubatches of five, then steps."""
    ops = make_ops(DEVICE, dtype=torch.float32)
    stored = shape.tensor_shapes(1, N, n_spare)
    if cells is CellType.Q8_0:
        stored = tuple((*dims[:3], cells.row_bytes(dims[3])) for dims in stored)
    dtype = torch.uint8 if cells is CellType.Q8_0 else torch.float32
    cache = KvCache.over(shape, [torch.zeros(dims, dtype=dtype, device=DEVICE) for dims in stored], ops.q8_rows)
    q, k, v = normal(N, H * A, seed=1), normal(N, G * A, seed=2), normal(N, G * A, seed=3)
    angles = normal(N, A // 2, seed=4), normal(N, A // 2, seed=5)
    outputs = []
    for first, n in [*((i, N_UBATCH) for i in range(0, 20, N_UBATCH)), *((i, 1) for i in range(20, N))]:
        rows = slice(first, first + n)
        positions = torch.arange(first, first + n, dtype=torch.int32, device=DEVICE)
        steps = None if n > 1 else Steps(torch.zeros_like(positions), positions)
        view = UbatchView((Segment(0, first, n),), positions, positions, steps=steps)
        if is_raw:
            turned = tuple(angle[rows] for angle in angles)
            how = _Preparation((None, None), 1e-5, False)
            put: _RawHeads | PlainHeads = _RawHeads(cache, ops, q[rows], k[rows], v[rows], turned, how)  # type: ignore[arg-type]
        else:
            put = PlainHeads(cache, *(x[rows].view(n, -1, A) for x in (q, k, v)))
        outputs.append(attend_cached(ops, cache, view, put, scale=0.2, window=WINDOW))
    return torch.cat(outputs)


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("cells", [CellType.F32, CellType.Q8_0])
def test_rings_give_the_bits_of_cells_in_a_row(cells: CellType, is_raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.kernels.triton.steps._N_PROGRAMS", 8)  # the interpreter runs one by one
    shape = KvShape(G, A, A, reach=WINDOW)
    wanted, found = (attended(shape, n_spare, cells, is_raw=is_raw) for n_spare in (None, N_UBATCH))
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)
