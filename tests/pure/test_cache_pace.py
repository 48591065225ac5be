"""When the expert cache is used: never for long where it loses, and tried again later."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from overspill.pipeline.cache_pace import FIRST_TRIAL, LONGEST_PAUSE, N_TIMED, PAUSE, CachePace
from overspill.pipeline.schedule import Order, Policy, WaveSchedule

CACHED = WaveSchedule(Order.BREADTH_FIRST, Policy.SPREAD, n_cached=(8,))
PLAIN = WaveSchedule(Order.BREADTH_FIRST, Policy.SPREAD)


def run(pace: CachePace, n_steps: int, seconds: Callable[[bool], float], n_tokens: int = 1) -> list[bool]:
    """Which steps used the cache, if they take so long."""
    used = []
    for _ in range(n_steps):
        used.append(pace.chosen(CACHED, n_tokens) == CACHED)
        pace.note(n_tokens, seconds(used[-1]))
    return used


def test_a_cache_that_wins_stays(caplog: pytest.LogCaptureFixture) -> None:
    used = run(CachePace(lambda n: PLAIN), 20 * LONGEST_PAUSE, lambda cached: 1.0 if cached else 1.3)

    assert all(used[:FIRST_TRIAL])
    assert used[: 2 * PAUSE].count(False) <= 2 * N_TIMED
    assert used.count(False) < 0.002 * len(used)
    assert not caplog.messages


def test_a_cache_that_loses_steps_aside_and_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    pace = CachePace(lambda n: PLAIN)
    used = run(pace, 20 * LONGEST_PAUSE, lambda cached: 1.4 if cached else 1.0)

    (message,) = caplog.messages
    assert "steps aside" in message
    for n in (PAUSE, 3 * PAUSE, len(used)):
        assert sum(1.4 if cached else 1.0 for cached in used[:n]) < n / 0.95, "B19"
    assert used[FIRST_TRIAL + 2 * N_TIMED] is False
    assert True in used[-2 * LONGEST_PAUSE :]

    used = run(pace, 2 * LONGEST_PAUSE, lambda cached: 0.5 if cached else 1.0)

    assert used[-1]
    assert "used again" in caplog.messages[-1]


def test_a_few_slow_steps_decide_nothing() -> None:
    times = iter([9.0, 1.0, 1.0, 1.1] * 1000)
    used = run(CachePace(lambda n: PLAIN), 8 * FIRST_TRIAL, lambda cached: next(times) if cached else 1.05)
    assert used[-1]


def test_numbers_of_tokens_are_judged_apart() -> None:
    pace = CachePace(lambda n: PLAIN)
    run(pace, 2 * FIRST_TRIAL, lambda cached: 2.0 if cached else 1.0, n_tokens=1)
    run(pace, 2 * FIRST_TRIAL, lambda cached: 1.0 if cached else 2.0, n_tokens=4)
    assert pace.chosen(CACHED, 1) == PLAIN
    assert pace.chosen(CACHED, 4) == CACHED


def test_what_runs_without_is_asked_for_by_its_tokens() -> None:
    asked: list[int] = []

    def uncached(n_tokens: int) -> WaveSchedule:
        asked.append(n_tokens)
        return PLAIN

    run(CachePace(uncached), FIRST_TRIAL + 2 * N_TIMED, lambda cached: 1.0, n_tokens=3)
    assert asked == [3] * N_TIMED
