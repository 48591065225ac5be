"""Raw memory by address for Numba code: what C would write as pointers.

All addresses are int64. Nothing is checked: only this package's drivers, which own the buffers, may call these.
"""

from __future__ import annotations

from platform import machine

from llvmlite import ir
from numba import types
from numba.core import cgutils

from overspill.kernels.numba.emit import F32, I16, I32, I64, Emitter, const
from overspill.kernels.numba.jit import intrinsic

_N64 = types.int64
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}


def _loader(ir_type, numba_type, n_bytes):
    @intrinsic
    def load(typing_context, address, index):
        def codegen(context, builder, signature, args):
            e = Emitter(builder)
            value = e.load(e.pointer(args[0]), e.offset(args[1], n_bytes), ir_type)
            return builder.sext(value, I64) if ir_type == I32 else value

        return numba_type(_N64, _N64), codegen

    return load


def _storer(ir_type, numba_type, n_bytes):
    @intrinsic
    def store(typing_context, address, index, value):
        def codegen(context, builder, signature, args):
            e = Emitter(builder)
            builder.store(args[2], e.at(e.pointer(args[0]), e.offset(args[1], n_bytes), ir_type)).align = n_bytes
            return context.get_dummy_value()

        return types.void(_N64, _N64, numba_type), codegen

    return store


load_i64 = _loader(I64, _N64, 8)
load_i32 = _loader(I32, _N64, 4)
load_f32 = _loader(F32, types.float32, 4)


@intrinsic
def load_bf16(typing_context, address, index):
    """The bfloat16 at an index, as float32."""

    def codegen(context, builder, signature, args):
        e = Emitter(builder)
        half = e.load(e.pointer(args[0]), e.offset(args[1], 2), I16)
        return builder.bitcast(builder.shl(builder.zext(half, I32), const(16, I32)), F32)

    return types.float32(_N64, _N64), codegen


store_i64 = _storer(I64, _N64, 8)
store_i32 = _storer(I32, types.int32, 4)
store_f32 = _storer(F32, types.float32, 4)


@intrinsic
def acquire(typing_context, address):
    """The int64 number at an address, as it is now; nothing that follows is read before it."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return _N64(_N64), codegen


@intrinsic
def release(typing_context, address, value):
    """Store an int64 number after all that was stored before it."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(_N64, _N64), codegen


@intrinsic
def swap(typing_context, address, value):
    """Store an int64 number; all threads agree where that stands among other swaps and what is acquired after them."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return _N64(_N64, _N64), codegen


@intrinsic
def pause(typing_context):
    """What a thread does between two looks: leaves the core to its sibling for some cycles."""

    def codegen(context, builder, signature, args):
        if machine() in _PAUSES:
            name, numbers = _PAUSES[machine()]
            function = ir.FunctionType(ir.VoidType(), [I32] * len(numbers))
            hint = cgutils.get_or_insert_function(builder.module, function, name)
            builder.call(hint, [const(number, I32) for number in numbers])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def next_number(typing_context, address):
    """Take the next number from the int64 counter at `address`; every thread gets another one."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, const(1), "monotonic")

    return _N64(_N64), codegen


def reader(fields):
    """An intrinsic that reads a NamedTuple class of integers from the int64 numbers at an address."""

    @intrinsic
    def read(typing_context, address):
        n = len(fields._fields)

        def codegen(context, builder, signature, args):
            e = Emitter(builder)
            values = [e.load(e.pointer(args[0]), 8 * i, I64) for i in range(n)]
            return context.make_tuple(builder, signature.return_type, values)

        return types.NamedUniTuple(_N64, n, fields)(_N64), codegen

    return read
