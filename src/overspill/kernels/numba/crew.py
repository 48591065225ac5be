"""Steps, one after the other, by threads that stay awake between them.

OpenMP sends its threads to work once, for all steps: one leads the others from step to step, and they wait for the next
one in a loop. That costs a step under a microsecond, and between two runs no thread spins for long.

Nobody waits for a helper that did not come: steps hand out their tasks by a counter, so the leader alone would finish
them. It waits for those who are at work on a step before it goes on, no more. Who has waited for some tens of
microseconds offers its core to others, of which one may be what it waits for.

The threads are those of torch's OpenMP library: Numba's would spin on the cores that torch's need. Any number of Python
threads may call at once, each has helpers of its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import cache

from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.memory import acquire, load_i64, next_number, pause, reader, release, swap
from overspill.kernels.numba.native import Step, c_function, callable_at, caller
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE, Memory

_LINE = 8  # int64 numbers of a cache line
_OPEN, _ARRIVED, _BUSY = 0, 2 * _LINE, 3 * _LINE
_STEPS, _N_STEPS, _N_THREADS, _YIELD = range(_LINE, _LINE + 4)
# Looks before a core is offered.
_LOOKS = 2000
_OVER = -1


_N_STEP_FIELDS = len(Step._fields)
_read_step = reader(Step)
_call_task = caller(2)
_call_work = caller(1)
_call_yield = caller(0)
_call_gomp_parallel = caller(4)


class _Threads(threading.local):
    n = len(os.sched_getaffinity(0))


_THREADS = _Threads()


def n_threads() -> int:
    """Threads for what the calling thread begins."""
    return _THREADS.n


def use_threads(n_threads: int) -> None:
    """Say how many, for the calling thread; more than the machine has would wait for each other."""
    _THREADS.n = min(n_threads, len(os.sched_getaffinity(0)))


def use_threads_by_default(n_threads: int) -> None:
    """Say how many, for threads that do not say so themselves."""
    _Threads.n = min(n_threads, len(os.sched_getaffinity(0)))


class Crew:
    """Runs these steps, again and again, with at most so many threads. Without helpers the calling thread does all.

    kept: memory that the steps use.
    """

    def __init__(self, steps: Sequence[Step], n_threads: int, kept: object) -> None:
        self._memory = Memory(_n_bytes(steps, n_threads))
        _write(self._memory, steps, n_threads)
        self._kept = kept

    def run(self) -> None:
        """All steps; without the GIL."""
        _begin(self._memory)


def run(steps: Sequence[Step]) -> None:
    """Run steps once, with as many threads as the widest has calls."""
    n_threads = max(step.n_calls for step in steps)
    if n_threads == 1:
        for step in steps:
            callable_at(step.address, 2)(step.call, 0)
        return
    memory = WORKSPACE.memory("crew", _n_bytes(steps, n_threads))
    _write(memory, steps, n_threads)
    _begin(memory)


def _n_bytes(steps: Sequence[Step], n_threads: int) -> int:
    return 8 * (_BUSY + _LINE * n_threads + _N_STEP_FIELDS * len(steps))


def _write(memory: Memory, steps: Sequence[Step], n_threads: int) -> None:
    n_before = _BUSY + _LINE * n_threads
    head = (0,) * _LINE + (memory.address + 8 * n_before, len(steps), n_threads, _address_of("sched_yield"))
    memory.write(head + (0,) * (n_before - len(head)) + tuple(number for step in steps for number in step))


def _begin(memory: Memory) -> None:
    callable_at(_begin_address(), 3)(memory.address, _work_address(), _address_of("GOMP_parallel"))


@cache
def _address_of(name: str) -> int:
    """Address of a function of the C library, or of the OpenMP library that torch has loaded."""
    return ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0


@cache
def _begin_address() -> int:
    digest = SOURCE_DIGEST

    def begin(crew, work, gomp_parallel):
        _ = digest
        release(crew + 8 * _OPEN, 0)
        release(crew + 8 * _ARRIVED, 0)
        n_threads = load_i64(crew, _N_THREADS)
        if n_threads == 1:
            _call_work(work, (crew,))
        else:
            _call_gomp_parallel(gomp_parallel, (work, crew, n_threads, 0))

    return c_function(begin, 3)


@cache
def _work_address() -> int:
    digest = SOURCE_DIGEST

    def work(crew):
        """What each thread of a region does: the first leads."""
        _ = digest
        i_thread = next_number(crew + 8 * _ARRIVED)
        if i_thread == 0:
            _lead(crew)
        else:
            _help(crew, i_thread)

    return c_function(work, 1)


@inner
def _look_away(crew, n_looks):
    if n_looks < _LOOKS:
        pause()
    else:
        _call_yield(load_i64(crew, _YIELD), ())


@inner
def _lead(crew):
    """Open one step after the other, and take part in each."""
    steps, n_threads = load_i64(crew, _STEPS), load_i64(crew, _N_THREADS)
    for i in range(load_i64(crew, _N_STEPS)):
        step = _read_step(steps + 8 * _N_STEP_FIELDS * i)
        if step.n_calls == 1 or n_threads == 1:
            _call_task(step.address, (step.call, 0))
            continue
        release(crew + 8 * _OPEN, i + 1)
        _call_task(step.address, (step.call, 0))
        swap(crew + 8 * _OPEN, 0)
        for helper in range(1, n_threads):
            n_looks = 0
            while acquire(crew + 8 * (_BUSY + _LINE * helper)) != 0:
                n_looks += 1
                _look_away(crew, n_looks)
    release(crew + 8 * _OPEN, _OVER)


@inner
def _help(crew, i_thread):
    """Take part in steps while they are open."""
    steps, busy, done, n_looks = load_i64(crew, _STEPS), crew + 8 * (_BUSY + _LINE * i_thread), 0, 0
    while True:
        i_open = acquire(crew + 8 * _OPEN)
        if i_open == _OVER:
            break
        if i_open <= done:
            n_looks += 1
            _look_away(crew, n_looks)
            continue
        swap(busy, 1)
        if acquire(crew + 8 * _OPEN) == i_open:
            step = _read_step(steps + 8 * _N_STEP_FIELDS * (i_open - 1))
            if i_thread < step.n_calls:
                _call_task(step.address, (step.call, i_thread))
            done, n_looks = i_open, 0
        release(busy, 0)
