"""Cells of type q8_0, and float16 ones, in Triton: against `quant.q8_rows` and the reference."""

# ruff: noqa: I001  (where Triton runs is decided before it is imported)
from __future__ import annotations

import pytest
import torch

from tests.helpers.triton_device import DEVICE, assert_near

from overspill.cache.cells import CellType
from overspill.kernels import Steps, ref
from overspill.kernels.triton.heads import Angles, HeadGains
from overspill.kernels.triton.q8_heads import prepare_q8_heads, prepare_q8_steps
from overspill.kernels.triton.q8_rows import TritonRows, n_row_values
from overspill.kernels.triton.steps import attend_steps
from overspill.kernels.triton.workspace import Workspace
from overspill.quant.q8_rows import TORCH_ROWS, decode, encode

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
EPS = 1e-6
SIZES = [2, 16, 24, 32, 48, 64, 100, 128, 192]


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def row_bytes(n: int) -> int:
    return CellType.Q8_0.row_bytes(n)


def triton_rows() -> TritonRows:
    return TritonRows(Workspace(DEVICE), torch.float32)


def steps_of(slots: list[int], positions: list[int]) -> Steps:
    return Steps(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)))


@pytest.mark.parametrize("n", SIZES)
def test_a_row_has_as_many_values_as_it_was_made_for(n: int) -> None:
    assert n_row_values(row_bytes(n)) == n


@pytest.mark.parametrize("n", [*SIZES, 576])
def test_rows_are_those_of_the_format(n: int) -> None:
    """Bit for bit, ties and empty groups included; nothing beside the cells is touched."""
    T, G, first = 19, 2, 3
    x = normal(T, G, 2 * n, seed=n)[:, :, :n] * 10
    x[3, 1] = 0
    x[4, 0] = torch.arange(n, device=DEVICE) - n // 2 + 0.5
    wanted = torch.full((2, G, 30, row_bytes(n)), 77, dtype=torch.uint8, device=DEVICE)
    got = wanted.clone()
    cells = slice(first, first + T)
    TORCH_ROWS.put(x, wanted[1, :, cells])
    triton_rows().put(x, got[1, :, cells])
    assert torch.equal(got, wanted)
    (back,) = triton_rows().read([got[1, :, first + 1 : first + T]], [n])
    assert torch.equal(back, decode(wanted[1, :, first + 1 : first + T], n))


@pytest.mark.parametrize("n", [48, 128])
def test_steps_write_their_own_cells(n: int) -> None:
    x, steps = normal(3, 2, n, seed=n), steps_of([2, 0, 1], [0, 7, 3 * 8 + 4])
    wanted = torch.zeros(3, 2, 8, row_bytes(n), dtype=torch.uint8, device=DEVICE)
    got = wanted.clone()
    TORCH_ROWS.put_steps(x, wanted, *steps)
    triton_rows().put_steps(x, got, *steps)
    assert torch.equal(got, wanted)
    assert torch.equal(got[0, :, 7], encode(x[1]))
    assert torch.equal(got[1, :, 4], encode(x[2]))


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_gains", [False, True])
@pytest.mark.parametrize(("A", "B", "n_rot"), [(24, 16, 16), (64, 48, 64), (96, 128, 32)])
def test_heads_are_normed_rotated_and_encoded(
    A: int, B: int, n_rot: int, has_gains: bool, is_interleaved: bool
) -> None:
    T, H, G, first = 19, 4, 2, 5
    q, k, v = normal(T, H * A + G * A + G * B, seed=1).split([H * A, G * A, G * B], 1)
    angles = Angles(normal(T, n_rot // 2, seed=2), normal(T, n_rot // 2, seed=3), is_interleaved)
    gains = HeadGains(normal(A, seed=4), normal(A, seed=5), EPS) if has_gains else HeadGains(None, None, EPS)
    caches = [torch.zeros(2, G, 40, row_bytes(n), dtype=torch.uint8, device=DEVICE) for n in (A, B)]
    expected = [cache.clone() for cache in caches]
    cells, wanted = ((x[1, :, first : first + T], y[1, :, first : first + T]) for x, y in (caches, expected))
    how = {"eps": EPS, "is_interleaved": is_interleaved}
    wanted_q = ref.prepare_heads(q, k, v, wanted, angles[:2], gains[:2], **how)

    queries = prepare_q8_heads(q, k, v, cells, angles, gains, dtype=torch.float32)

    assert_near(queries, wanted_q)
    assert torch.equal(caches[1], expected[1])
    keys, wanted_keys = decode(cells[0], A), decode(wanted[0], A)
    steps = wanted_keys.abs().amax(-1, keepdim=True) / 127
    assert bool(((keys - wanted_keys).abs() <= 1.01 * steps).all())
    assert float((keys != wanted_keys).float().mean()) < 0.02
    assert not caches[0][0].any()
    assert not caches[0][1, :, :first].any()


def test_steps_write_what_prompts_do() -> None:
    """Bit for bit, so a sequence that is read in again has the same cells."""
    H, G, A, B = 4, 2, 64, 32
    slots, positions = [1, 0, 2], [5, 17, 9]
    q, k, v = normal(3, H * A, seed=1), normal(3, G * A, seed=2), normal(3, G * B, seed=3)
    cos, sin, gains = normal(3, 32, seed=4), normal(3, 32, seed=5), HeadGains(normal(A, seed=6), normal(A, seed=7), EPS)
    caches = tuple(torch.zeros(3, G, 20, row_bytes(n), dtype=torch.uint8, device=DEVICE) for n in (A, B))
    wanted = tuple(cache.clone() for cache in caches)
    wanted_q = []
    for t, (slot, cell) in enumerate(zip(slots, positions, strict=True)):
        row, cells = slice(t, t + 1), (wanted[0][slot, :, cell : cell + 1], wanted[1][slot, :, cell : cell + 1])
        angles = Angles(cos[row], sin[row], False)
        wanted_q.append(prepare_q8_heads(q[row], k[row], v[row], cells, angles, gains, dtype=torch.float32))

    how = Angles(cos, sin, False), gains
    queries = prepare_q8_steps(q, k, v, caches, steps_of(slots, positions), *how, dtype=torch.float32)

    assert torch.equal(queries, torch.cat(wanted_q))
    for cache, expected in zip(caches, wanted, strict=True):
        assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "n_key", "n_value", "window", "chunk", "has_sinks"),
    [
        (4, 2, 16, 16, None, None, False),
        (8, 1, 24, 16, None, None, False),
        (4, 4, 64, 64, 7, None, True),
        (6, 2, 128, 128, None, 8, False),
        (4, 1, 80, 48, None, None, True),
    ],
)
@pytest.mark.parametrize("cells", ["f16", "q8_0"])
def test_each_token_attends_to_cells_as_they_are_stored(
    cells: str,
    n_heads: int,
    n_kv: int,
    n_key: int,
    n_value: int,
    window: int | None,
    chunk: int | None,
    has_sinks: bool,
) -> None:
    slots, positions = [2, 0, 3], [0, 150, 29]
    k, v = normal(4, n_kv, 160, n_key, seed=1), normal(4, n_kv, 160, n_value, seed=2)
    q = normal(3, n_heads, n_key, seed=3)
    sinks = normal(n_heads, seed=4) if has_sinks else None
    stored = (k.half(), v.half()) if cells == "f16" else (encode(k), encode(v))
    k, v = (x.float() for x in stored) if cells == "f16" else (decode(stored[0], n_key), decode(stored[1], n_value))

    steps = steps_of(slots, positions)
    how = {"scale": 0.3, "window": window, "chunk": chunk, "sinks": sinks}
    out = attend_steps(q, *stored, n_value, steps, **how, dtype=torch.float32)

    assert out.dtype == torch.float32
    for t, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        first = 0 if window is None else max(0, position - window + 1)
        seen = slice(first if chunk is None else position // chunk * chunk, position + 1)
        wanted = ref.attention(q[t : t + 1], k[slot, :, seen], v[slot, :, seen], scale=0.3, sinks=sinks)
        limit = 2e-5 if cells == "q8_0" else 4e-3
        torch.testing.assert_close(out[t : t + 1], wanted, rtol=limit, atol=limit)


def test_values_may_be_channels_of_keys() -> None:
    k, q = encode(normal(1, 1, 40, 80, seed=1)), normal(1, 4, 80, seed=2)

    out = attend_steps(q, k, k, 64, steps_of([0], [33]), scale=0.2, dtype=torch.float32)

    keys = decode(k, 80)[0, :, :34]
    wanted = ref.attention(q, keys, keys[..., :64], scale=0.2)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)
