"""Compiled code behind plain addresses.

Everything below the Python wrappers is a C function of int64 arguments, compiled on its own at first use and cached
on disk. That keeps start-up short (Numba's own calls are compiled again into every caller) and lets code that knows no
tensor type call code that does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from overspill.kernels.numba.emit import F32, I64, Emitter
from overspill.kernels.numba.jit import REASSOCIATES, cached, cfunc, intrinsic
from overspill.kernels.numba.target import SOURCE_DIGEST

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


def direct_address(function: Callable[..., None], n_arguments: int, n_floats: int = 0) -> int:
    """The same for int64 arguments, then float32 ones.

    Its sums may be reassociated, so that they use vectors: always in the same way, as one compilation serves all.
    """
    signature = types.void(*(_N64,) * n_arguments, *(types.float32,) * n_floats)
    compiled = cached(cfunc, function, signature, error_model="numpy", fastmath=REASSOCIATES)
    _KEPT.append(compiled)
    return compiled.address


def direct(function: Callable[..., None], n_arguments: int, n_floats: int = 0) -> Callable[..., None]:
    """A function compiled so, for Python to call: on the calling thread, without the GIL."""
    return callable_at(direct_address(function, n_arguments, n_floats), n_arguments, n_floats)


@cache
def callable_at(address: int, n_arguments: int, n_floats: int = 0) -> Callable[..., None]:
    """For Python to call: int64 arguments, then float32 ones."""
    return _prototype(n_arguments, n_floats)(address)


@cache
def _prototype(n_arguments: int, n_floats: int = 0) -> Callable[[int], Callable[..., None]]:
    return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * n_arguments, *(ctypes.c_float,) * n_floats)


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


def float_bits(value: float) -> int:
    """The bits of a float32, for the low half of an int64 number."""
    return int(np.float32(value).view(np.int32))


class Step(NamedTuple):
    """A C function (call, i), called once, with 0, or by up to `n_calls` threads at once, with their numbers.

    Functions of several calls must work on tasks that they take from a counter, until there are no more.
    """

    address: int
    call: int
    n_calls: int = 1


@cache
def block_step_address(n_arguments: int) -> int:
    """C function (block, i) for a `Step`: calls what the block names.

    A block: address of a function of `direct_address`, its one float32 (in the low half), its int64 arguments.
    """
    digest = SOURCE_DIGEST

    def call_block(block, i):
        _call_block(n_arguments, digest, block)

    return c_function(call_block, 2)


@intrinsic(prefer_literal=True)
def _call_block(typing_context, n_arguments, digest, block):
    def codegen(context, builder, signature, args):
        e, n = Emitter(builder), n_arguments.literal_value
        block = e.pointer(args[2])
        numbers = [e.load(block, 8 * i, I64) for i in (0, *range(2, 2 + n))]
        function = ir.FunctionType(ir.VoidType(), [I64] * n + [F32])
        address = builder.inttoptr(numbers[0], function.as_pointer())
        builder.call(address, [*numbers[1:], e.load(block, 8, F32)])
        return context.get_dummy_value()

    return types.void(n_arguments, digest, block), codegen
