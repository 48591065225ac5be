"""Compiled code behind plain addresses, and the one parallel loop that runs it.

Everything below the Python wrappers is a C function of int64 arguments, compiled on its own at first use and cached
on disk. That keeps start-up short (Numba's own calls are compiled again into every caller, its parallel loops are
slow to compile) and lets code that knows no tensor type call code that does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import prange, types

from overspill.kernels.numba.emit import I64
from overspill.kernels.numba.jit import REASSOCIATES, cached, cfunc, intrinsic, njit

_N64 = types.int64
_KEPT: list[Any] = []


def c_function(function: Callable[..., None], n_arguments: int) -> int:
    """Compile a function of int64 arguments, or load it from the cache; its address, valid for the process.

    Numba's cache knows one source file and the closure of the function, so the closure must hold SOURCE_DIGEST.
    """
    signature = types.void(*(_N64,) * n_arguments)
    compiled = cached(cfunc, function, signature, error_model="numpy")
    _KEPT.append(compiled)
    return compiled.address


def direct(function: Callable[..., None], n_arguments: int, n_floats: int = 0) -> Callable[..., None]:
    """The same for Python to call: int64 arguments, then float32 ones, on the calling thread, without the GIL.

    Its sums may be reassociated, so that they use vectors: always in the same way, as one compilation serves all.
    """
    signature = types.void(*(_N64,) * n_arguments, *(types.float32,) * n_floats)
    compiled = cached(cfunc, function, signature, error_model="numpy", fastmath=REASSOCIATES)
    _KEPT.append(compiled)
    return _prototype(n_arguments, n_floats)(compiled.address)


@cache
def _prototype(n_arguments: int, n_floats: int = 0) -> Callable[[int], Callable[..., None]]:
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * n_arguments, *(ctypes.c_float,) * n_floats)


@cache
def _task(address: int) -> Callable[..., None]:
    return _prototype(2)(address)


def caller(n_arguments: int) -> Any:
    """An intrinsic that calls the C function at an address with a tuple of int64 arguments."""

    @intrinsic
    def call(typing_context, address, arguments):
        signature = types.void(_N64, types.UniTuple(_N64, n_arguments))

        def codegen(context, builder, signature, args):
            function = ir.FunctionType(ir.VoidType(), [I64] * n_arguments)
            unpacked = [builder.extract_value(args[1], i) for i in range(n_arguments)]
            builder.call(builder.inttoptr(args[0], function.as_pointer()), unpacked)
            return context.get_dummy_value()

        return signature, codegen

    return call


_call_task = caller(2)


def _run(prepare, first, second, third, fourth, call, n_threads):
    if prepare != 0:
        _call_task(prepare, (call, 0))
    if first != 0:
        for i in prange(n_threads):
            _call_task(first, (call, i))
    if second != 0:
        for i in prange(n_threads):
            _call_task(second, (call, i))
    if third != 0:
        for i in prange(n_threads):
            _call_task(third, (call, i))
    if fourth != 0:
        for i in prange(n_threads):
            _call_task(fourth, (call, i))


# Without "fusion": False Numba, which sees no data pass between the loops, would make them one.
_run_threads = cached(njit, _run, parallel={"fusion": False}, nogil=True, error_model="numpy")


def run(addresses: tuple[int, int, int, int, int], call: int, n_threads: int) -> None:
    """Call the C functions at five addresses with (call, i): the first once, the others once for every thread.

    Each starts when all calls before it are done; address 0 is left out. One thread is the calling one.
    """
    if n_threads > 1:
        _run_threads(*addresses, call, n_threads)
        return
    for address in addresses:
        if address:
            _task(address)(call, 0)
