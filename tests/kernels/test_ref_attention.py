"""The specification of attention against sums written out, and the CPU's against the specification."""

from __future__ import annotations

import math

import pytest
import torch

from overspill.kernels import cpu, ref
from overspill.kernels.ref import swiglu_oai

SHAPES = [  # queries, cells, query heads, kv heads, key channels, value channels
    (1, 1, 2, 1, 8, 8),
    (1, 9, 4, 2, 8, 8),
    (5, 9, 4, 2, 8, 8),
    (9, 9, 4, 4, 8, 4),
    (6, 40, 4, 1, 24, 16),
]


def case(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    T, C, H, G, A, B = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = [(T, H, A), (G, C, A), (G, C, B), (H,)]
    q, k, v, sinks = (torch.randn(size, generator=generator) for size in sizes)
    return q, k, v, sinks


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One query, one head, one key after the other, in float64."""
    (T, H, _), (G, C, B) = q.shape, v.shape
    out = torch.zeros(T, H, B, dtype=torch.float64)
    for t in range(T):
        pos = C - T + t
        for h in range(H):
            total = math.exp(float(sinks[h])) if sinks is not None else 0.0
            for p in range(C):
                if p <= pos and (window is None or pos - p < window):
                    g = h // (H // G)
                    weight = math.exp(0.3 * float(q[t, h].double() @ k[g, p].double()))
                    total += weight
                    out[t, h] += weight * v[g, p].double()
            out[t, h] /= total
    return out.float().flatten(1)


@pytest.mark.parametrize("attention", [ref.attention, cpu.attention], ids=["ref", "cpu"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, ...], window: int | None, has_sinks: bool, attention: object) -> None:
    q, k, v, sinks = case(shape)
    options = {"window": window, "sinks": sinks if has_sinks else None}
    out = attention(q, k, v, scale=0.3, **options)  # type: ignore[operator]
    torch.testing.assert_close(out, by_hand(q, k, v, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", [ref.attention, cpu.attention], ids=["ref", "cpu"])
def test_values_may_be_a_view_of_keys(attention: object) -> None:
    q, k, _, _ = case((6, 40, 4, 1, 24, 16))
    cells = torch.full((1, 64, 24), torch.nan)
    cells[:, 10:50] = k
    view = cells[:, 10:50]
    out = attention(q, view, view[..., :16], scale=0.3)  # type: ignore[operator]
    torch.testing.assert_close(out, by_hand(q, k, k[..., :16], None, None), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_bytes", [1, 700, 1 << 20])
def test_the_cpu_takes_few_rows_at_a_time(n_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SCORE_BYTES", n_bytes)
    q, k, v, sinks = case((9, 20, 4, 2, 8, 8))
    out = cpu.attention(q, k, v, scale=0.3, window=6, sinks=sinks)
    torch.testing.assert_close(out, by_hand(q, k, v, 6, sinks), atol=1e-5, rtol=1e-5)


def test_an_overwhelming_sink_takes_everything_and_no_sink_nothing() -> None:
    q, k, v, _ = case((5, 9, 4, 2, 8, 8))
    plain = ref.attention(q, k, v, scale=0.3)
    assert ref.attention(q, k, v, scale=0.3, sinks=torch.full((4,), 1e4)).abs().max() == 0
    torch.testing.assert_close(ref.attention(q, k, v, scale=0.3, sinks=torch.full((4,), -1e4)), plain)


def test_clamped_activation() -> None:
    gate = torch.tensor([-9.0, 0.5, 7.0, 50.0])
    up = torch.tensor([-50.0, 0.5, 7.0, 50.0])
    sigmoid = [1 / (1 + math.exp(-1.702 * g)) for g in (-9.0, 0.5, 7.0, 7.0)]
    expected = [-9.0 * sigmoid[0] * -6.0, 0.5 * sigmoid[1] * 1.5, 7.0 * sigmoid[2] * 8.0, 7.0 * sigmoid[3] * 8.0]
    torch.testing.assert_close(swiglu_oai(gate, up), torch.tensor(expected))
