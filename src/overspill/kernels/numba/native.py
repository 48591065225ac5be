"""Compiled code behind plain addresses, and the one parallel loop that runs it.

Everything below the Python wrappers is a C function of int64 arguments, compiled on its own at first use and cached
on disk. That keeps start-up short (Numba's own calls are compiled again into every caller, its parallel loops are
slow to compile) and lets code that knows no tensor type call code that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import prange, types

from overspill.kernels.numba.emit import I64
from overspill.kernels.numba.jit import cached, cfunc, intrinsic, njit

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


def _run(prepare, first, second, call, n_threads):
    if prepare != 0:
        _call_task(prepare, (call, 0))
    for i in prange(n_threads):
        _call_task(first, (call, i))
    if second != 0:
        for i in prange(n_threads):
            _call_task(second, (call, i))


# Call the C functions at three addresses with (call, i): `prepare` once, the others once for every thread. Each
# starts when all calls before it are done; address 0 is left out. Without "fusion": False Numba, which sees no data
# pass between the two loops, would make them one.
run = cached(njit, _run, parallel={"fusion": False}, nogil=True, error_model="numpy")
