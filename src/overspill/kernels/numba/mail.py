"""The CPU's side of letters in pinned memory: waiting for flags, raising them. See `kernels.triton.mail`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from numba import types

from overspill.kernels.numba.emit import I64
from overspill.kernels.numba.jit import intrinsic
from overspill.kernels.numba.native import direct
from overspill.kernels.numba.target import SOURCE_DIGEST

_N64 = types.int64
# Between two looks at the clock of the caller: some milliseconds.
_LOOKS = 1 << 22


@intrinsic
def _acquire(typing_context, address):
    """The int64 number at an address, as it is now; nothing that follows is read before it."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return _N64(_N64), codegen


@intrinsic
def _release(typing_context, address, value):
    """Store an int64 number after all that was stored before it."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(_N64, _N64), codegen


@cache
def _wait() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def wait_for_flags(flags, n_flags, wanted):
        _ = digest
        n_looks = 0
        for i in range(n_flags):
            while _acquire(flags + 8 * i) < wanted and n_looks < _LOOKS:
                n_looks += 1

    return direct(wait_for_flags, 3)


@cache
def _raise() -> Callable[..., None]:
    digest = SOURCE_DIGEST

    def raise_flags(flags, n_flags, value):
        _ = digest
        for i in range(n_flags):
            _release(flags + 8 * i, value)

    return direct(raise_flags, 3)


def look_for_flags(flags: int, n_flags: int, wanted: int) -> None:
    """Spin until the int64 numbers at an address have reached a number, or for some milliseconds."""
    _wait()(flags, n_flags, wanted)


def raise_flags(flags: int, n_flags: int, value: int) -> None:
    """Set the int64 numbers at an address, after all that was written before."""
    _raise()(flags, n_flags, value)
