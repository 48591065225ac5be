"""Steps by threads that stay awake: every task is done once, and no step begins before the one before is done."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from overspill.kernels.numba import use_threads
from overspill.kernels.numba.crew import Crew
from overspill.kernels.numba.memory import load_i64, next_number, store_i64
from overspill.kernels.numba.native import Step, c_function
from overspill.kernels.numba.target import SOURCE_DIGEST

_N = 1000


@cache
def _reverse() -> int:
    digest = SOURCE_DIGEST

    def reverse(call, i_thread):
        """call: counter, then addresses of source and target: number i goes to place N - 1 - i, plus one."""
        _ = digest
        while True:
            i = next_number(call)
            if i >= _N:
                break
            store_i64(load_i64(call, 2), _N - 1 - i, load_i64(load_i64(call, 1), i) + 1)

    return c_function(reverse, 2)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_calls", [lambda i: 5, lambda i: 1 + i % 2])
def test_every_step_sees_all_of_the_one_before(n_threads: int, n_calls: Callable[[int], int]) -> None:
    rows = np.zeros((202, _N), np.int64)
    rows[0] = np.arange(_N)
    calls = [np.array([0, _address(rows[i]), _address(rows[i + 1])]) for i in range(200)]
    use_threads(n_threads)
    crew = Crew([Step(_reverse(), _address(call), n_calls(i)) for i, call in enumerate(calls)], n_threads, None)

    for _ in range(3):
        rows[1:] = 0
        for call in calls:
            call[0] = 0
        crew.run()
        assert np.array_equal(rows[200], np.arange(_N) + 200)
        assert np.array_equal(rows[199], np.arange(_N)[::-1] + 199)
