"""Compiled code behind plain addresses, and the one parallel loop that runs it.

Everything below the Python wrappers is a C function of int64 arguments, compiled on its own at first use and cached
on disk. That keeps start-up short (Numba's own calls are compiled again into every caller, its parallel loops are
slow to compile) and lets code that knows no tensor type call code that does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from llvmlite import ir
from numba import prange, types

from overspill.kernels.numba.emit import F32, I64, Emitter
from overspill.kernels.numba.jit import REASSOCIATES, cached, cfunc, intrinsic, njit
from overspill.kernels.numba.memory import load_i64
from overspill.kernels.numba.target import SOURCE_DIGEST
from overspill.kernels.numba.workspace import WORKSPACE, Memory

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


_call_task = caller(2)


class Step(NamedTuple):
    """A C function (call, i) to be called for i = 0 .. n_calls - 1, each on a thread of its own."""

    address: int
    call: int
    n_calls: int = 1


_STEP_BYTES = 8 * len(Step._fields)


def _run_all(steps, n_steps):
    for i_step in range(n_steps):
        at = steps + i_step * _STEP_BYTES
        address, call, n_calls = load_i64(at, 0), load_i64(at, 1), load_i64(at, 2)
        if n_calls == 1:
            _call_task(address, (call, 0))
        else:
            for i in prange(n_calls):
                _call_task(address, (call, i))


_run_steps = cached(njit, _run_all, parallel=True, nogil=True, error_model="numpy")


class Program:
    """Steps that run one after the other, each when the one before is done. kept: memory that they use."""

    def __init__(self, steps: Sequence[Step], kept: Sequence[object]) -> None:
        self._numbers = Memory(_STEP_BYTES * len(steps))
        self._numbers.write(tuple(number for step in steps for number in step))
        self._kept = kept

    def run(self, first: int, end: int) -> None:
        """Steps `first` to `end - 1`."""
        _run_steps(self._numbers.address + first * _STEP_BYTES, end - first)


def run(steps: Sequence[Step]) -> None:
    """Run steps once. Those of one call run on the calling thread."""
    if all(step.n_calls == 1 for step in steps):
        for step in steps:
            callable_at(step.address, 2)(step.call, 0)
        return
    numbers = WORKSPACE.memory("steps", _STEP_BYTES * len(steps))
    numbers.write(tuple(number for step in steps for number in step))
    _run_steps(numbers.address, len(steps))


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
