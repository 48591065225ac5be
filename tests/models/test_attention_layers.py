"""What layers may see of the cache: windows, chunks, several sequences; and a latent cache of one tensor."""

from __future__ import annotations

import pytest
import torch

from overspill.cache.cells import CellType, KvShape, Segment
from overspill.cache.kv import KvCache
from overspill.kernels import ref
from overspill.models.base import UbatchView
from overspill.models.layers import PlainHeads, attend_cached
from overspill.models.llama4 import temperature

N, H, A = 37, 2, 4
NO_IDS = torch.empty(0, dtype=torch.int32)


def heads(seed: int, n: int) -> torch.Tensor:
    return torch.randn(N, n, A, generator=torch.Generator().manual_seed(seed))


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """Attention with one kv head under a mask `[N, N]`."""
    scores = torch.einsum("tha,pa->htp", q, k[:, 0]).masked_fill(~is_seen, -torch.inf)
    return torch.einsum("htp,pa->tha", scores.softmax(-1), v[:, 0]).flatten(1)


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("n_ubatch", [1, 5, 16, N])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (7, None), (None, 8), (None, 100), (5, 8)])
def test_windows_and_chunks(window: int | None, chunk: int | None, n_ubatch: int, is_ring: bool) -> None:
    q, k, v = heads(1, H), heads(2, 1), heads(3, 1)
    shape = KvShape(1, A, A, reach=window or chunk)
    stored = shape.tensor_shapes(1, N, n_ubatch if is_ring else None)
    assert stored[0][2] == (min(N, (window or chunk or N) + n_ubatch) if is_ring else N)
    cache = KvCache.over(shape, [torch.full(dims, torch.nan) for dims in stored])
    outputs = []
    for first in range(0, N, n_ubatch):
        rows = slice(first, min(N, first + n_ubatch))
        view = UbatchView((Segment(0, first, rows.stop - first),), torch.arange(first, rows.stop), NO_IDS)
        outputs.append(
            attend_cached(
                ref.OPS,
                cache,
                view,
                PlainHeads(cache, q[rows], k[rows], v[rows]),
                scale=1.0,
                window=window,
                chunk=chunk,
            )
        )
    pos, key = torch.arange(N)[:, None], torch.arange(N)[None]
    is_seen = (key <= pos) & (pos - key < (window or N)) & (key >= pos // (chunk or N) * (chunk or N))
    torch.testing.assert_close(torch.cat(outputs), masked(q, k, v, is_seen))


def test_chunks_of_two_sequences_in_one_ubatch() -> None:
    q, k, v = heads(1, H), heads(2, 1), heads(3, 1)
    shape = KvShape(1, A, A)
    cache = KvCache.over(shape, [torch.full(dims, torch.nan) for dims in shape.tensor_shapes(2, N)])
    segments = (Segment(1, 0, 20), Segment(0, 0, 17))
    positions = torch.cat([torch.arange(20), torch.arange(17)])
    out = attend_cached(
        ref.OPS, cache, UbatchView(segments, positions, NO_IDS), PlainHeads(cache, q, k, v), scale=1.0, chunk=8
    )
    sequence = torch.tensor([1] * 20 + [0] * 17)
    pos, key = positions[:, None], positions[None]
    is_seen = (sequence[:, None] == sequence[None]) & (key <= pos) & (key >= pos // 8 * 8)
    torch.testing.assert_close(out, masked(q, k, v, is_seen))


def test_a_latent_cache_is_one_tensor() -> None:
    shape = KvShape(1, 6, 4, has_values=False)
    assert shape.tensor_shapes(2, 5) == ((2, 1, 5, 6),)
    assert shape.cell_bytes(CellType.F16) == 2 * 6
    assert KvShape(3, 6, 4).cell_bytes(CellType.F32) == 4 * 30
    assert KvShape(3, 64, 40).cell_bytes(CellType.Q8_0) == 3 * (64 + 2 * 2 + 40 + 2 * 2)
    (memory,) = (torch.full(dims, torch.nan) for dims in shape.tensor_shapes(2, 5))
    cache = KvCache.over(shape, [memory])
    k = torch.arange(18.0).view(3, 1, 6)
    cache.append(Segment(1, 1, 3), k, k[..., :4])
    keys, values = cache.visible(Segment(1, 1, 3), first=1)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, keys[..., :4])
    assert memory.isnan().sum() == memory.numel() - k.numel()


def test_temperature_grows_at_the_floors() -> None:
    positions = torch.tensor([0, 8190, 8191, 16383, 24575], dtype=torch.int32)
    expected = [1.0, 1.0, 1.0 + 0.1 * 0.6931472, 1.0 + 0.1 * 1.0986123, 1.0 + 0.1 * 1.3862944]
    torch.testing.assert_close(temperature(positions), torch.tensor(expected))
