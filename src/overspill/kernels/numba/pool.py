"""Threads that wait for work awake: for the CPU's part of a decoding step, which comes every few hundred microseconds.

Waking a sleeping thread costs tens of microseconds, and twice as often as there are layers; these spin between pieces
of work, each on a CPU of its own. After some milliseconds without work they sleep in short naps, so an idle process
costs next to nothing, and the first piece of work after a pause waits for at most one nap.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import cache

from llvmlite import ir
from numba import types

from overspill.kernels.numba.emit import I32
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.memory import acquire, load_i64, next_number, release, store_i64
from overspill.kernels.numba.native import Step, caller, direct
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import Memory

_N64 = types.int64
# Fields of the block that the threads share, each in a cache line of its own; then what is to be run.
_TURN, _N_DONE, _TASK, _CALL, _N_CALLS = 0, 8, 16, 17, 18
_BLOCK_BYTES = 256
_SPINS = 1 << 17
_NAP_US = 1000

_call_task = caller(2)


@intrinsic
def _nap(typing_context, n_us):
    """Sleep for some microseconds."""

    def codegen(context, builder, signature, args):
        function = ir.FunctionType(I32, [I32])
        usleep = builder.module.globals.get("usleep") or ir.Function(builder.module, function, "usleep")
        builder.call(usleep, [builder.trunc(args[0], I32)])
        return context.get_dummy_value()

    return types.void(_N64), codegen


@cache
def _serve() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def serve(block, i_thread):
        """Until there is no task: run what is asked for, with the number of this thread."""
        _ = digest
        seen = 0
        n_spins = 0
        while True:
            turn = acquire(block)
            if turn == seen:
                n_spins += 1
                if n_spins > _SPINS:
                    _nap(_NAP_US)
                continue
            seen, n_spins = turn, 0
            task = load_i64(block, _TASK)
            if task == 0:
                return
            if i_thread < load_i64(block, _N_CALLS):
                _call_task(task, (load_i64(block, _CALL), i_thread))
            next_number(block + 8 * _N_DONE)

    return direct(serve, 2)


@cache
def _ask() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def ask(block, task, call, n_calls, n_others):
        """Have a task run by so many threads, the calling one being number 0, and wait until all have done it."""
        _ = digest
        store_i64(block, _TASK, task)
        store_i64(block, _CALL, call)
        store_i64(block, _N_CALLS, n_calls)
        store_i64(block, _N_DONE, 0)
        release(block, acquire(block) + 1)
        if task == 0:
            return
        _call_task(task, (call, 0))
        while acquire(block + 8 * _N_DONE) < n_others:
            pass

    return direct(ask, 5)


class SpinningThreads:
    """`n_threads` threads, the one that calls `run` included. `close` ends them."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        # What one thread does alone is asked in a block that no other looks at.
        self._block, self._alone = (_empty_block() for _ in range(2))
        self._ask = _ask()
        cpus = sorted(os.sched_getaffinity(0))
        self._threads = [
            threading.Thread(target=self._work, args=(i, cpus[i % len(cpus)]), daemon=True) for i in range(1, n_threads)
        ]
        _serve()
        for thread in self._threads:
            thread.start()

    def run(self, steps: Sequence[Step]) -> None:
        """As `native.run`; no step may have more calls than there are threads."""
        for address, call, n_calls in steps:
            if n_calls == 1:
                self._ask(self._alone.address, address, call, 1, 0)
            else:
                assert n_calls <= self.n_threads
                self._ask(self._block.address, address, call, n_calls, len(self._threads))

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._threads:
            self._ask(self._block.address, 0, 0, 0, 0)
            for thread in self._threads:
                thread.join()
            self._threads = []

    def _work(self, i_thread: int, cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        _serve()(self._block.address, i_thread)


def _empty_block() -> Memory:
    block = Memory(_BLOCK_BYTES)
    block.write((0,) * (_BLOCK_BYTES // 8))
    return block
