"""The CPU's side of letters in pinned memory: waiting for flags, raising them. See `kernels.triton.mail`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from overspill.kernels.numba.memory import acquire, release, store_i64
from overspill.kernels.numba.native import direct
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE

# Looks before the caller gets to look at the clock: some milliseconds.
_LOOKS = 1 << 22


@cache
def _wait() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def wait_for_flags(flags, n_flags, wanted, is_up):
        _ = digest
        n_looks = 0
        for i in range(n_flags):
            while acquire(flags + 8 * i) < wanted and n_looks < _LOOKS:
                n_looks += 1
        store_i64(is_up, 0, 1 if n_looks < _LOOKS else 0)

    return direct(wait_for_flags, 4)


@cache
def _raise() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def raise_flags(flags, n_flags, value):
        _ = digest
        for i in range(n_flags):
            release(flags + 8 * i, value)

    return direct(raise_flags, 3)


def look_for_flags(flags: int, n_flags: int, wanted: int) -> bool:
    """Spin until the int64 numbers at an address have reached a number, or for some milliseconds. Whether they have."""
    is_up = WORKSPACE.memory("is_up", 8)
    _wait()(flags, n_flags, wanted, is_up.address)
    return is_up.read(0) == 1


def raise_flags(flags: int, n_flags: int, value: int) -> None:
    """Set the int64 numbers at an address, after all that was written before."""
    _raise()(flags, n_flags, value)
