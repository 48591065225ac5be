"""Attention of decoding sequences and mail, in Triton's interpreter, against the reference."""

from __future__ import annotations

import pytest
import torch

from overspill.kernels import Steps, ref
from overspill.letter_room import FLAG_STRIDE
from overspill.quant.q8_rows import encode

from tests.helpers.triton_device import DEVICE  # isort: skip


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _cells(position: int, window: int | None, chunk: int | None) -> slice:
    first = 0 if window is None else max(0, position - window + 1)
    return slice(first if chunk is None else position // chunk * chunk, position + 1)


@pytest.mark.parametrize(
    ("n_heads", "n_kv", "n_key", "n_value", "window", "chunk", "has_sinks"),
    [
        (4, 2, 16, 16, None, None, False),
        (8, 1, 24, 16, None, None, False),
        (4, 4, 64, 64, 7, None, True),
        (6, 2, 32, 32, None, 8, False),
        (4, 1, 80, 64, None, None, True),
    ],
)
def test_each_token_attends_to_its_own_sequence(
    n_heads: int, n_kv: int, n_key: int, n_value: int, window: int | None, chunk: int | None, has_sinks: bool
) -> None:
    from overspill.kernels.triton.steps import attend_steps

    slots, positions = [2, 0, 3], [0, 150, 29]
    k, v = _random(4, n_kv, 160, n_key, seed=1), _random(4, n_kv, 160, n_value, seed=2)
    q = _random(3, n_heads, n_key, seed=3)
    sinks = _random(n_heads, seed=4) if has_sinks else None
    steps = Steps(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)))

    out = attend_steps(q, k, v, n_value, steps, scale=0.3, window=window, chunk=chunk, sinks=sinks, dtype=torch.float32)

    for t, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        cells = _cells(position, window, chunk)
        wanted = ref.attention(q[t : t + 1], k[slot, :, cells], v[slot, :, cells], scale=0.3, sinks=sinks)
        torch.testing.assert_close(out[t : t + 1], wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_q8", [False, True])
@pytest.mark.parametrize(("n_ring", "window", "chunk"), [(7, 7, None), (12, 9, None), (90, 70, None), (13, None, 8)])
def test_cells_of_a_ring_give_the_bits_of_cells_in_a_row(
    n_ring: int, window: int | None, chunk: int | None, is_q8: bool
) -> None:
    from overspill.kernels.triton.steps import attend_steps

    slots, positions, n_kv, n = [2, 0, 1], [5, 151, 2 * n_ring], 2, 200
    cells = [_random(3, n_kv, n, 32, seed=i) for i in (1, 2)]
    cells = [encode(x) for x in cells] if is_q8 else cells
    rings = [torch.full_like(x[:, :, :n_ring], 0 if is_q8 else torch.nan) for x in cells]
    for slot, position in zip(slots, positions, strict=True):
        for p in range(max(0, position - n_ring + 1), position + 1):
            for ring, x in zip(rings, cells, strict=True):
                ring[slot, :, p % n_ring] = x[slot, :, p]
    q, sinks = _random(3, 4, 32, seed=3), _random(4, seed=4)
    steps = Steps(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)))
    how = {"scale": 0.3, "window": window, "chunk": chunk, "sinks": sinks, "dtype": torch.float32}
    assert torch.equal(attend_steps(q, *rings, 32, steps, **how), attend_steps(q, *cells, 32, steps, **how))


def test_values_may_be_channels_of_keys() -> None:
    from overspill.kernels.triton.steps import attend_steps

    k = _random(1, 1, 40, 48, seed=1)
    q = _random(1, 4, 48, seed=2)
    steps = Steps(*(torch.tensor([x], dtype=torch.int32, device=DEVICE) for x in (0, 33)))

    out = attend_steps(q, k, k[..., :32], 32, steps, scale=0.2, dtype=torch.float32)

    wanted = ref.attention(q, k[0, :, :34], k[0, :, :34, :32], scale=0.2)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("has_gains", [False, True])
def test_heads_enter_the_cells_of_their_tokens(is_interleaved: bool, has_gains: bool) -> None:
    from overspill.kernels.triton.heads import Angles, HeadGains, prepare_heads
    from overspill.kernels.triton.steps import prepare_steps

    slots, positions = [1, 0], [5, 2 * 20 + 17]
    H, G, A, B = 4, 2, 24, 16
    q, k, v = _random(2, H * A, seed=1), _random(2, G * A, seed=2), _random(2, G * B, seed=3)
    cos, sin = _random(2, 8, seed=4), _random(2, 8, seed=5)
    gains = (_random(A, seed=6), _random(A, seed=7)) if has_gains else (None, None)
    caches = _random(2, G, 20, A, seed=8), _random(2, G, 20, B, seed=9)
    wanted = tuple(cache.clone() for cache in caches)
    wanted_q = []
    for t, (slot, cell) in enumerate(zip(slots, positions, strict=True)):
        rows, cells = slice(t, t + 1), tuple(cache[slot, :, cell % 20][:, None] for cache in wanted)
        angles = Angles(cos[rows], sin[rows], is_interleaved)
        how = angles, HeadGains(*gains, 1e-5)
        wanted_q.append(prepare_heads(q[rows], k[rows], v[rows], cells, *how))

    steps = Steps(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)))
    how = Angles(cos, sin, is_interleaved), HeadGains(*gains, 1e-5)
    queries = prepare_steps(q, k, v, caches, steps, *how)

    torch.testing.assert_close(queries, torch.cat(wanted_q))
    for cache, expected in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, expected)


def _shared(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in memory that the host and the device reach."""
    return torch.zeros(n, dtype=dtype, pin_memory=DEVICE.type == "cuda")


def test_mail_arrives_whole() -> None:
    from overspill.kernels.triton.mail import put_mail, take_mail

    parts = [_random(3, 699, seed=1), torch.arange(22, dtype=torch.int32, device=DEVICE).view(2, 11)]
    flags, late = _shared(6 * FLAG_STRIDE, torch.int64), _shared(1, torch.int64)
    box, step = _shared(3 * 699 + 3 + 24, torch.int32), torch.tensor([7], device=DEVICE)

    put_mail(step, parts, box, flags)
    received = [torch.zeros_like(part) for part in parts]
    take_mail(step, received, box, flags, late)
    copies = [part.cpu() for part in received]  # waits for the device

    assert flags[::FLAG_STRIDE].tolist() == [7] * 6
    assert late.item() == 0
    for part, copy in zip(parts, copies, strict=True):
        assert torch.equal(part.cpu(), copy)


@pytest.mark.parametrize("n_terms", [1, 3, 4, 9])
def test_mail_is_added_in_order(n_terms: int) -> None:
    from overspill.kernels.sharing import Term
    from overspill.kernels.triton.mail import add_mail

    numbers = [_random(3, 701, seed=i) * 10.0**i for i in range(n_terms)]
    flags, late = _shared(3 * FLAG_STRIDE, torch.int64).fill_(7), _shared(1, torch.int64)
    terms = [Term(x.view(torch.int32).view(-1), flags) if i % 3 == 1 else Term(x) for i, x in enumerate(numbers)]
    expected = numbers[0].clone()
    for x in numbers[1:]:
        expected += x

    out = numbers[0]
    add_mail(torch.tensor([7], device=DEVICE), out, terms, late)

    assert torch.equal(out, expected)
    assert late.item() == 0


@pytest.mark.parametrize(("n_cells", "window"), [(40, None), (12, 7)])
def test_rows_of_one_sequence_see_those_before_them(n_cells: int, window: int | None) -> None:
    """A short prompt after earlier cells: its first rows stand there twice, all write before any attends."""
    from overspill.kernels.triton.heads import Angles, HeadGains
    from overspill.kernels.triton.steps import attend_steps, prepare_steps

    rows, first_pos, H, G, A = [0, 1, 0, 1, 2, 3, 4], 15, 4, 2, 16
    k, v = _random(first_pos + 5, G * A, seed=1), _random(first_pos + 5, G * A, seed=2)
    q, cos, sin = _random(5, H * A, seed=3)[rows], torch.ones(7, 8, device=DEVICE), torch.zeros(7, 8, device=DEVICE)
    caches = tuple(torch.full((2, G, n_cells, A), torch.nan, device=DEVICE) for _ in range(2))
    for position in range(first_pos):
        for cache, x in zip(caches, (k, v), strict=True):
            cache[1, :, position % n_cells] = x[position].view(G, A)
    positions = torch.tensor([first_pos + row for row in rows], dtype=torch.int32, device=DEVICE)
    steps = Steps(torch.ones_like(positions), positions)
    new = k[first_pos:][rows], v[first_pos:][rows]
    queries = prepare_steps(q, *new, caches, steps, Angles(cos, sin, False), HeadGains(None, None, 1e-5))
    out = attend_steps(queries, *caches, A, steps, scale=0.3, window=window, dtype=torch.float32)

    for t, position in enumerate(positions.tolist()):
        cells = _cells(position, window, None)
        seen = (x[cells].view(-1, G, A).transpose(0, 1) for x in (k, v))
        wanted = ref.attention(q[t : t + 1].view(1, H, A), *seen, scale=0.3)
        torch.testing.assert_close(out[t : t + 1], wanted, rtol=2e-5, atol=2e-5)
