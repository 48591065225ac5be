"""Many short steps, one after the other, by threads that stay awake between them.

OpenMP sends its threads to work once, for all steps: the thread that calls leads them from step to step, the others
wait for the next one in a loop. That costs a step under a microsecond, and between two runs no thread spins.

Nobody waits for a helper that did not come: steps hand out their tasks by a counter, so the leader alone would finish
them. It waits for those who are at work on a step before it goes on, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from numba import prange

from overspill.kernels.numba.jit import cached, njit
from overspill.kernels.numba.memory import acquire, load_i64, pause, release, swap
from overspill.kernels.numba.native import Step, c_function, caller
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import Memory

_LINE = 8  # int64 numbers of a cache line
_OPEN, _STEPS, _N_STEPS, _BUSY = 0, _LINE, _LINE + 1, 2 * _LINE
_OVER = -1
_N_STEP_FIELDS = len(Step._fields)
_call_task = caller(2)


@cache
def _lead_address() -> int:
    digest = SOURCE_DIGEST

    def lead(crew, n_threads):
        """Open one step after the other, and take part in each."""
        _ = digest
        steps, n_steps = load_i64(crew, _STEPS), load_i64(crew, _N_STEPS)
        for i in range(n_steps):
            step = steps + 8 * _N_STEP_FIELDS * i
            address, call, n_calls = load_i64(step, 0), load_i64(step, 1), load_i64(step, 2)
            if n_calls == 1 or n_threads == 1:
                _call_task(address, (call, 0))
                continue
            release(crew + 8 * _OPEN, i + 1)
            _call_task(address, (call, 0))
            swap(crew + 8 * _OPEN, 0)
            for helper in range(1, n_threads):
                while acquire(crew + 8 * (_BUSY + _LINE * helper)) != 0:
                    pause()
        release(crew + 8 * _OPEN, _OVER)

    return c_function(lead, 2)


@cache
def _help_address() -> int:
    digest = SOURCE_DIGEST

    def help_in_open_steps(crew, i_thread):
        _ = digest
        steps, busy, done = load_i64(crew, _STEPS), crew + 8 * (_BUSY + _LINE * i_thread), 0
        while True:
            i_open = acquire(crew + 8 * _OPEN)
            if i_open == _OVER:
                break
            if i_open <= done:
                pause()
                continue
            swap(busy, 1)
            if acquire(crew + 8 * _OPEN) == i_open:
                step = steps + 8 * _N_STEP_FIELDS * (i_open - 1)
                if i_thread < load_i64(step, 2):
                    _call_task(load_i64(step, 0), (load_i64(step, 1), i_thread))
                done = i_open
            release(busy, 0)

    return c_function(help_in_open_steps, 2)


def _work(lead, help_in_open_steps, crew, n_threads):
    for i in prange(n_threads):
        if i == 0:
            _call_task(lead, (crew, n_threads))
        else:
            _call_task(help_in_open_steps, (crew, i))


_start: Any = cached(njit, _work, parallel=True, nogil=True, error_model="numpy")


class Crew:
    """Runs these steps, again and again, with at most so many threads. Those of one call run on the calling thread.

    Functions of steps with more calls must work on tasks that they take from a counter, until there are no more.
    kept: memory that the steps use.
    """

    def __init__(self, steps: Sequence[Step], n_threads: int, kept: object) -> None:
        self._n_threads = n_threads
        self._steps = Memory(8 * _N_STEP_FIELDS * max(1, len(steps)))
        self._steps.write(tuple(number for step in steps for number in step))
        self._crew = Memory(8 * (_BUSY + _LINE * n_threads))
        self._header = (*(0,) * _LINE, self._steps.address, len(steps), *(0,) * (_LINE - 2 + _LINE * n_threads))
        self._kept = kept

    def run(self) -> None:
        """All steps; without the GIL."""
        self._crew.write(self._header)
        _start(_lead_address(), _help_address(), self._crew.address, self._n_threads)
