"""Activations times one stored matrix, over all threads."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from numba import get_num_threads
from torch import Tensor

from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.memory import next_number, reader, store_i64
from overspill.kernels.numba.native import c_function, caller, run
from overspill.kernels.numba.panel import (
    BLOCK_TOKENS,
    N_MULTIPLY_ARGS,
    SCRATCH_BYTES,
    STORE,
    describe,
    multiply_address,
)
from overspill.kernels.numba.target import SOURCE_DIGEST, TILE_ROWS, UNIT_ELEMENTS
from overspill.kernels.numba.workspace import WORKSPACE
from overspill.quant.qtensor import QTensor

# Tasks per thread: some, for the fast threads to take over from the slow; not many, as long runs of rows read faster.
_TASKS_PER_THREAD = 4


class _Call(NamedTuple):
    """What the threads read: counts, addresses, strides in bytes. inputs, outputs: int64 arrays to be filled."""

    counter: int
    multiply: int
    matrix: int
    n_rows: int
    n_tokens: int
    n_threads: int
    x: int
    x_stride: int
    out: int
    out_stride: int
    inputs: int
    outputs: int
    scratch: int


_read_call = reader(_Call)
_call_multiply = caller(N_MULTIPLY_ARGS)


def matmul(x: Tensor, w: QTensor) -> Tensor:
    """x float32 [T, K] times w [N, K] transposed: float32 [T, N].

    Every product sums in one order whatever T, so a token's result has the same bits in any batch and with any
    number of threads (`numba.set_num_threads` of the calling thread). The type of `w` must have a kernel.
    Raises ValueError if the shapes do not fit.
    """
    (n_tokens, n_elements), n_rows = x.shape, w.shape[0]
    if w.shape != (n_rows, n_elements):
        raise ValueError(f"activations {tuple(x.shape)} do not fit a weight {w.shape}")
    if x.dtype != torch.float32:
        raise ValueError(f"activations must be float32: {x.dtype}")
    x = padded(x)
    out = torch.empty(n_tokens, n_rows, dtype=torch.float32)
    n_threads = get_num_threads()
    rows = describe(w)
    call = WORKSPACE.memory("call", 8 * (len(_Call._fields) + len(rows) + 2 * n_tokens))
    matrix = call.address + 8 * len(_Call._fields)
    inputs = matrix + 8 * len(rows)
    scratch = WORKSPACE.memory("scratch", n_threads * SCRATCH_BYTES).address
    fields = _Call(
        counter=0,
        multiply=multiply_address(),
        matrix=matrix,
        n_rows=n_rows,
        n_tokens=n_tokens,
        n_threads=n_threads,
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        out=out.data_ptr(),
        out_stride=4 * n_rows,
        inputs=inputs,
        outputs=inputs + 8 * n_tokens,
        scratch=scratch,
    )
    call.write(fields + rows)
    run(_prepare_address(), _work_address(), 0, call.address, n_threads)
    return out


def padded(x: Tensor) -> Tensor:
    """x with rows that are contiguous and, where their length is no multiple of UNIT_ELEMENTS, end in zeros."""
    n_missing = -x.shape[1] % UNIT_ELEMENTS
    if n_missing:
        return torch.nn.functional.pad(x, (0, n_missing))
    return x if x.stride(1) == 1 else x.contiguous()


@inner
def rows_per_task(n_rows, n_groups, n_threads):
    """How many rows of each of `n_groups` matrices make a task: whole tiles, a few tasks for every thread."""
    n_tiles = (n_rows + TILE_ROWS - 1) // TILE_ROWS
    n_tasks = (_TASKS_PER_THREAD * n_threads + n_groups - 1) // n_groups
    return (n_tiles + n_tasks - 1) // n_tasks * TILE_ROWS


@cache
def _prepare_address() -> int:
    digest = SOURCE_DIGEST

    def prepare_matmul(call, i_thread):
        _ = digest
        c = _read_call(call)
        for i in range(c.n_tokens):
            store_i64(c.inputs, i, c.x + i * c.x_stride)
            store_i64(c.outputs, i, c.out + i * c.out_stride)

    return c_function(prepare_matmul, 2)


@cache
def _work_address() -> int:
    digest = SOURCE_DIGEST

    def work_matmul(call, i_thread):
        _ = digest
        c = _read_call(call)
        n_per_task = rows_per_task(c.n_rows, 1, c.n_threads)
        n_blocks = (c.n_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        n_tasks = (c.n_rows + n_per_task - 1) // n_per_task * n_blocks
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        while True:
            task = next_number(call)
            if task >= n_tasks:
                break
            row, first = task // n_blocks * n_per_task, task % n_blocks * BLOCK_TOKENS
            n_rows, n_tokens = min(n_per_task, c.n_rows - row), min(BLOCK_TOKENS, c.n_tokens - first)
            inputs, outputs = c.inputs + 8 * first, c.outputs + 8 * first
            part, tokens = (c.matrix, 0, row, n_rows, 0, 0, 0), (n_tokens, inputs, outputs, 0)
            _call_multiply(c.multiply, (*part, *tokens, STORE, scratch))

    return c_function(work_matmul, 2)
