"""Counts and order of layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.placement.layout import apportion, deal, spread


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (48, (1, 1), (24, 24)),
        (48, (3, 1), (36, 12)),
        (7, (1, 1, 1), (3, 2, 2)),
        (10, (0, 1, 1), (0, 5, 5)),
        (48, (16, 16, 16), (16, 16, 16)),
        (3, (24, 24, 24, 2), (1, 1, 1, 0)),
        (0, (1, 2), (0, 0)),
    ],
)
def test_apportion(total: int, weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert apportion(total, weights) == counts


@given(st.integers(0, 200), st.lists(st.floats(0, 1e12), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3))
def test_apportion_sums_up_and_stays_within_one(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-6


@pytest.mark.parametrize(
    ("counts", "grain", "grid"),
    [
        ((4, 4), 1, "01010101"),
        ((4, 4), 2, "00110011"),
        ((4, 4), 4, "00001111"),
        ((3, 2, 2), 1, "0120120"),
        ((4, 2), 1, "001010"),
        ((4, 2), 3, "000011"),
        ((0, 3, 3), 1, "121212"),
        ((5, 0), 1, "00000"),
        ((0, 0), 1, ""),
        ((2, 1), 50, "001"),
    ],
)
def test_deal(counts: tuple[int, ...], grain: int, grid: str) -> None:
    assert "".join(map(str, deal(counts, grain))) == grid


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_equal_devices_take_turns_of_grain_layers(n_device: int, grain: int, n_rounds: int) -> None:
    n_layer = n_device * grain * n_rounds
    assert deal((n_layer // n_device,) * n_device, grain) == tuple((l // grain) % n_device for l in range(n_layer))


@given(st.integers(1, 60), st.integers(1, 9))
def test_grain_one_is_cyclic_for_any_number_of_layers(n_layer: int, n_device: int) -> None:
    counts = apportion(n_layer, [1.0] * n_device)
    assert deal(counts, 1) == tuple(l % n_device for l in range(n_layer))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 30))
def test_each_device_gets_its_count(counts: list[int], grain: int) -> None:
    dealt = deal(tuple(counts), grain)
    assert [dealt.count(i) for i in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("n", "n_chosen", "chosen"), [(8, 0, []), (8, 1, [7]), (8, 2, [3, 7]), (8, 3, [1, 4, 7]), (3, 3, [0, 1, 2])]
)
def test_spread(n: int, n_chosen: int, chosen: list[int]) -> None:
    assert spread(n, n_chosen) == chosen
