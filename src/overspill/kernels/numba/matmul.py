"""Activations times stored matrices, over all threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from overspill.kernels.numba import crew
from overspill.kernels.numba.crew import run
from overspill.kernels.numba.digits import digit_bytes, digitise
from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.memory import load_i64, next_number, reader, store_f32, store_i64
from overspill.kernels.numba.native import Step, c_function, caller
from overspill.kernels.numba.panel import (
    ADD,
    BLOCK_TOKENS,
    N_MULTIPLY_ARGS,
    SCRATCH_BYTES,
    STORE,
    Rows,
    describe,
    multiply_address,
    takes_digits,
)
from overspill.kernels.numba.target import SOURCE_DIGEST, TASK_ROWS, UNIT_ELEMENTS
from overspill.kernels.numba.workspace import WORKSPACE, Memory
from overspill.quant.qtensor import QTensor

# Tasks per thread: many, for the fast threads to take over from the slow; each asks for the rows of the next.
_TASKS_PER_THREAD = 12
# Bytes of weights times tokens that are worth waking another thread for.
_BYTES_PER_THREAD = 1 << 16
# Activations that one thread makes digits of before another would be awake.
_FEW_ACTIVATIONS = 1 << 14


class _Call(NamedTuple):
    """What the threads read: counts, addresses, strides in bytes. inputs: an int64 array to be filled.

    then: what to do with products. weights: a float32 array to be filled with ones. products: the first `_Product`.
    digits: rows of activations as digits, `digit_inputs` an int64 array to be filled with their addresses;
    n_digitised: how many tokens `prepare` makes digits of; the threads do the others.
    """

    counter: int
    digits_counter: int
    multiply: int
    n_tokens: int
    n_threads: int
    then: int
    weights: int
    x: int
    x_stride: int
    inputs: int
    n_elements: int
    digits: int
    digits_stride: int
    digit_inputs: int
    n_digitised: int
    scratch: int
    n_products: int
    products: int


class _Product(NamedTuple):
    """One matrix of a call; its description, `panel.Rows`, follows. outputs: an int64 array to be filled.

    inputs: the array of the call that it takes.
    """

    n_rows: int
    out: int
    out_stride: int
    inputs: int
    outputs: int


_read_call = reader(_Call)
_read_product = reader(_Product)
_call_multiply = caller(N_MULTIPLY_ARGS)
_COUNTER, _DIGITS_COUNTER = 0, 1
_N_CALL, _N_PRODUCT = len(_Call._fields), len(_Product._fields)
_PRODUCT_BYTES = 8 * (_N_PRODUCT + len(Rows._fields))


def matmul(x: Tensor, w: QTensor) -> Tensor:
    """x float32 [T, K] times w [N, K] transposed: float32 [T, N].

    Every product sums in one order whatever T, so a token's result has the same bits in any batch and with any
    number of threads (`crew.use_threads`). The type of `w` must have a kernel.
    Raises ValueError if the shapes do not fit.
    """
    return matmuls(x, (w,))[0]


def matmuls(x: Tensor, weights: Sequence[QTensor]) -> list[Tensor]:
    """`matmul` with each of the weights."""
    _check(x, weights)
    n_tokens = x.shape[0]
    outs = [torch.empty(n_tokens, w.shape[0], dtype=torch.float32) for w in weights]
    _multiply(x, weights, outs, STORE)
    return outs


def add_matmul(out: Tensor, x: Tensor, w: QTensor) -> None:
    """Add `matmul(x, w)` to `out`, float32 [T, N] with contiguous rows."""
    _check(x, (w,))
    if out.shape != (len(x), w.shape[0]) or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError(f"an output {out.dtype} {tuple(out.shape)} does not fit {len(x)} tokens and {w.shape}")
    _multiply(x, (w,), (out,), ADD)


def _check(x: Tensor, weights: Sequence[QTensor]) -> None:
    n_elements = x.shape[1]
    for w in weights:
        if w.shape != (w.shape[0], n_elements):
            raise ValueError(f"activations {tuple(x.shape)} do not fit a weight {w.shape}")
    if x.dtype != torch.float32:
        raise ValueError(f"activations must be float32: {x.dtype}")


def _multiply(x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], then: int) -> None:
    x = padded(x)
    out_rows = [(out.data_ptr(), 4 * out.stride(0)) for out in outs]
    run(product_steps((x.data_ptr(), 4 * x.stride(0)), x.shape, weights, out_rows, then, WORKSPACE.memory))


def product_steps(
    x: tuple[int, int],
    x_shape: tuple[int, ...],
    weights: Sequence[QTensor],
    outs: Sequence[tuple[int, int]],
    then: int,
    memory: Callable[[str, int], Memory],
) -> list[Step]:
    """What multiplies the rows of x with weights. x, outs: address and bytes from row to row. memory: gives it."""
    n_tokens, n_elements = x_shape
    all_rows = [describe(w) for w in weights]
    n_bytes = sum(w.shape[0] * rows.row_bytes for w, rows in zip(weights, all_rows, strict=True))
    n_threads = max(1, min(crew.n_threads(), n_tokens * n_bytes // _BYTES_PER_THREAD))
    # The call block: fields, products with their descriptions, then arrays with an entry per token.
    n_arrays = len(weights) + 3  # inputs, digit inputs, outputs, ones
    call = memory("call", 8 * (_N_CALL + n_arrays * n_tokens) + len(weights) * _PRODUCT_BYTES)
    products = call.address + 8 * _N_CALL
    inputs = products + len(weights) * _PRODUCT_BYTES
    digit_inputs, digits_stride = inputs + 8 * n_tokens, digit_bytes(n_elements)
    any_digits = any(takes_digits(w.type) for w in weights)
    has_few = n_threads == 1 or n_tokens * n_elements <= _FEW_ACTIVATIONS
    numbers: tuple[int, ...] = _Call(
        counter=0,
        digits_counter=0,
        multiply=multiply_address(),
        n_tokens=n_tokens,
        n_threads=n_threads,
        then=then,
        weights=inputs + 8 * (n_arrays - 1) * n_tokens,
        x=x[0],
        x_stride=x[1],
        inputs=inputs,
        n_elements=n_elements,
        digits=memory("digits", n_tokens * digits_stride).address if any_digits else 0,
        digits_stride=digits_stride,
        digit_inputs=digit_inputs,
        n_digitised=n_tokens if any_digits and has_few else 0,
        scratch=memory("scratch", n_threads * SCRATCH_BYTES).address,
        n_products=len(weights),
        products=products,
    )
    for i, (w, rows, out) in enumerate(zip(weights, all_rows, outs, strict=True)):
        outputs, taken = inputs + 8 * (i + 2) * n_tokens, digit_inputs if takes_digits(w.type) else inputs
        numbers += _Product(w.shape[0], *out, taken, outputs) + rows
    call.write(numbers)
    steps = [Step(_prepare_address(), call.address)]
    if any_digits and not has_few:
        steps.append(Step(_digitise_address(), call.address, n_threads))
    return [*steps, Step(_work_address(), call.address, n_threads)]


def padded(x: Tensor) -> Tensor:
    """x with rows that are contiguous and, where their length is no multiple of UNIT_ELEMENTS, end in zeros."""
    n_missing = -x.shape[1] % UNIT_ELEMENTS
    if n_missing:
        return torch.nn.functional.pad(x, (0, n_missing))
    return x if x.stride(1) == 1 else x.contiguous()


@inner
def rows_per_task(n_rows, n_groups, n_threads):
    """How many rows of each of `n_groups` matrices make a task: whole tiles, a few tasks for every thread."""
    n_tiles = (n_rows + TASK_ROWS - 1) // TASK_ROWS
    n_tasks = (_TASKS_PER_THREAD * n_threads + n_groups - 1) // n_groups
    return (n_tiles + n_tasks - 1) // n_tasks * TASK_ROWS


@cache
def _prepare_address() -> int:
    digest = SOURCE_DIGEST

    def prepare_matmul(call, i_thread):
        _ = digest
        c = _read_call(call)
        store_i64(call, _COUNTER, 0)
        store_i64(call, _DIGITS_COUNTER, 0)
        for i in range(c.n_tokens):
            store_i64(c.inputs, i, c.x + i * c.x_stride)
            store_i64(c.digit_inputs, i, c.digits + i * c.digits_stride)
            store_f32(c.weights, i, np.float32(1))
        for i in range(c.n_digitised):
            digitise(c.x + i * c.x_stride, c.n_elements, c.digits + i * c.digits_stride)
        for i_product in range(c.n_products):
            p = _read_product(c.products + i_product * _PRODUCT_BYTES)
            for i in range(c.n_tokens):
                store_i64(p.outputs, i, p.out + i * p.out_stride)

    return c_function(prepare_matmul, 2)


@cache
def _digitise_address() -> int:
    digest = SOURCE_DIGEST

    def digitise_tokens(call, i_thread):
        _ = digest
        c = _read_call(call)
        while True:
            i = next_number(call + 8 * _DIGITS_COUNTER)
            if i >= c.n_tokens:
                break
            digitise(c.x + i * c.x_stride, c.n_elements, c.digits + i * c.digits_stride)

    return c_function(digitise_tokens, 2)


class _Task(NamedTuple):
    """Up to `n_rows` rows of a product, from `row` at `address` on, times a block of tokens. product: 0 for no task."""

    product: int
    row: int
    n_rows: int
    i_block: int
    address: int


@inner
def _find_task(c, number, n_blocks):
    for i_product in range(c.n_products):
        product = c.products + i_product * _PRODUCT_BYTES
        n_rows = load_i64(product, 0)
        n_per_task = rows_per_task(n_rows, 1, c.n_threads)
        n_tasks = (n_rows + n_per_task - 1) // n_per_task * n_blocks
        if number < n_tasks:
            row, matrix = number // n_blocks * n_per_task, product + 8 * _N_PRODUCT
            address = load_i64(matrix, 0) + row * load_i64(matrix, 1)
            return _Task(product, row, n_per_task, number % n_blocks, address)
        number -= n_tasks
    return _Task(0, 0, 0, 0, 0)


@cache
def _work_address() -> int:
    digest = SOURCE_DIGEST

    def work_matmul(call, i_thread):
        """Tasks are numbered through all matrices. The next is taken early: it is asked for while this one is read."""
        _ = digest
        c = _read_call(call)
        n_blocks = (c.n_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        task = _find_task(c, next_number(call + 8 * _COUNTER), n_blocks)
        while task.product != 0:
            following = _find_task(c, next_number(call + 8 * _COUNTER), n_blocks)
            p, i_block = _read_product(task.product), task.i_block
            first = i_block * BLOCK_TOKENS
            n_rows, n_tokens = min(task.n_rows, p.n_rows - task.row), min(BLOCK_TOKENS, c.n_tokens - first)
            part = (task.product + 8 * _N_PRODUCT, 0, task.row, n_rows, following.address, 0, 0)
            tokens = (n_tokens, p.inputs + 8 * first, p.outputs + 8 * first, c.weights + 4 * first)
            _call_multiply(c.multiply, (*part, *tokens, c.then, scratch))
            task = following

    return c_function(work_matmul, 2)
