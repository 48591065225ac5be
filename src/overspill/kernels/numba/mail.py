"""The CPU's side of letters in pinned memory: waiting for flags, opening, raising flags. See `letter_room`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from overspill.kernels.numba.memory import (
    acquire,
    load_bf16,
    load_f32,
    load_i32,
    load_i64,
    pause,
    reader,
    release,
    store_f32,
    store_i32,
    store_i64,
)
from overspill.kernels.numba.native import c_function, direct
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE
from overspill.letter_room import FLAG_STRIDE

# Looks before the caller gets to look at the clock: some milliseconds.
_LOOKS = 1 << 18
# Looks before a step that waits gives up: many seconds.
_MAX_LOOKS = 1 << 29


class Waiting(NamedTuple):
    """Addresses: flags of a letter, in `n_flags` numbers; the int64 that they must reach; where it is noted if they do
    not."""

    flags: int
    n_flags: int
    number: int
    late: int


class Opening(NamedTuple):
    """What a letter to the CPU is turned into.

    normed: `n_values` numbers, of two bytes (bfloat16) or four; x: the same, float32. who: int32, the party of each of
    `n_slices` slices of `n_experts`; slot_of: int32, where the expert is if the party is `party`. out: float32, `n_out`
    zeros.
    """

    normed: int
    n_bytes: int
    n_values: int
    x: int
    who: int
    n_experts: int
    n_slices: int
    party: int
    slot_of: int
    out: int
    n_out: int


_read_waiting = reader(Waiting)
_read_opening = reader(Opening)


@cache
def wait_address() -> int:
    """C function (`Waiting`, i). Once one letter of a step was late, no one waits for the others."""
    digest = SOURCE_DIGEST

    def wait_for_letter(waiting, i):
        _ = digest
        w = _read_waiting(waiting)
        wanted, n_looks = load_i64(w.number, 0), 0
        for i_flag in range(0, w.n_flags, FLAG_STRIDE):
            while acquire(w.flags + 8 * i_flag) < wanted and load_i64(w.late, 0) != wanted:
                pause()
                n_looks += 1
                if n_looks >= _MAX_LOOKS:
                    store_i64(w.late, 0, wanted)

    return c_function(wait_for_letter, 2)


@cache
def open_address() -> int:
    """C function (`Opening`, i)."""
    digest = SOURCE_DIGEST

    def open_letter(opening, i):
        _ = digest
        o = _read_opening(opening)
        for n in range(o.n_values):
            store_f32(o.x, n, load_f32(o.normed, n) if o.n_bytes == 4 else load_bf16(o.normed, n))
        for e in range(o.n_experts):
            store_i32(o.slot_of, e, np.int32(e if load_i32(o.who, e * o.n_slices) == o.party else -1))
        for n in range(o.n_out):
            store_f32(o.out, n, np.float32(0))

    return c_function(open_letter, 2)


@cache
def raise_address() -> int:
    """C function (`Waiting`, i): raises the flags instead."""
    digest = SOURCE_DIGEST

    def raise_letter(waiting, i):
        _ = digest
        w = _read_waiting(waiting)
        for i_flag in range(0, w.n_flags, FLAG_STRIDE):
            release(w.flags + 8 * i_flag, load_i64(w.number, 0))

    return c_function(raise_letter, 2)


@cache
def _wait() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def wait_for_flags(flags, n_flags, wanted, is_up):
        _ = digest
        n_looks = 0
        for i in range(0, n_flags, FLAG_STRIDE):
            while acquire(flags + 8 * i) < wanted and n_looks < _LOOKS:
                pause()
                n_looks += 1
        store_i64(is_up, 0, 1 if n_looks < _LOOKS else 0)

    return direct(wait_for_flags, 4)


@cache
def _raise() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def raise_flags(flags, n_flags, value):
        _ = digest
        for i in range(0, n_flags, FLAG_STRIDE):
            release(flags + 8 * i, value)

    return direct(raise_flags, 3)


def look_for_flags(flags: int, n_flags: int, wanted: int) -> bool:
    """Spin until the flags in so many int64 have reached a number, or for some milliseconds. Whether they have."""
    is_up = WORKSPACE.memory("is_up", 8)
    _wait()(flags, n_flags, wanted, is_up.address)
    return is_up.read(0) == 1


def raise_flags(flags: int, n_flags: int, value: int) -> None:
    """Set the flags in so many int64 numbers, after all that was written before."""
    _raise()(flags, n_flags, value)
