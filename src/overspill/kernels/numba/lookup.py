"""Rows of a stored matrix as float32: the embedding of tokens, decoded as `leaf` decodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from overspill.kernels.numba.decode import DECODERS
from overspill.kernels.numba.leaf import N_DECODE_ARGS, decode_address
from overspill.kernels.numba.memory import load_f32, load_i64, reader, store_f32
from overspill.kernels.numba.native import Step, c_function, callable_at, caller
from overspill.kernels.numba.target import LANES, SOURCE_DIGEST, TILE_ROWS, UNIT_ELEMENTS
from overspill.kernels.numba.workspace import WORKSPACE, Memory
from overspill.quant.qtensor import QTensor

_call_decode = caller(N_DECODE_ARGS)


class _Call(NamedTuple):
    """Addresses, and sizes in bytes; a row is `n_units` units of `unit_bytes` and `tail_bytes` of plain numbers.

    ids: int64. scratch: room for a decoded row, whose vectors lie `LANES * TILE_ROWS` floats apart.
    """

    decode: int
    matrix: int
    row_bytes: int
    n_units: int
    tail_bytes: int
    n_columns: int
    ids: int
    n_ids: int
    out: int
    scratch: int


_read_call = reader(_Call)


def rows_of(weight: QTensor, ids: Tensor) -> Tensor:
    """Rows `ids [T]` of a matrix `[V, D]`: float32 `[T, D]`. Raises IndexError for an id that is no row."""
    n_rows, n_columns = weight.shape
    ids = ids.to(torch.int64).contiguous()
    if len(ids):
        numbers = ids.numpy()  # quicker than torch for few
        first, last = numbers.min(), numbers.max()
        if first < 0 or last >= n_rows:
            raise IndexError(f"ids must be 0 to {n_rows - 1}: {first} to {last}")
    out = torch.empty(len(ids), n_columns)
    step = lookup_step(weight, (ids.data_ptr(), len(ids)), out, WORKSPACE.memory)
    callable_at(step.address, 2)(step.call, 0)
    return out


def lookup_step(weight: QTensor, ids: tuple[int, int], out: Tensor, memory: Callable[[str, int], Memory]) -> Step:
    """What puts rows into `out [T, D]`. ids: address of int64 numbers below V, and how many. memory: gives it."""
    decoder, n_columns = DECODERS[weight.type], weight.shape[1]
    n_units, n_left = divmod(n_columns, decoder.n_elements)
    call = memory("call", 8 * len(_Call._fields))
    call.write(
        _Call(
            decode=decode_address(weight.type),
            matrix=weight.data.data_ptr(),
            row_bytes=weight.type.row_bytes(n_columns),
            n_units=n_units,
            tail_bytes=n_left * decoder.n_bytes // decoder.n_elements,
            n_columns=n_columns,
            ids=ids[0],
            n_ids=ids[1],
            out=out.data_ptr(),
            scratch=memory("row", 4 * TILE_ROWS * (n_columns + UNIT_ELEMENTS)).address,
        )
    )
    return Step(_address(), call.address)


@cache
def _address() -> int:
    digest = SOURCE_DIGEST

    def look_up(call, i_thread):
        _ = digest
        c = _read_call(call)
        for i in range(c.n_ids):
            row = c.matrix + load_i64(c.ids, i) * c.row_bytes
            _call_decode(c.decode, (row, c.row_bytes, 1, 0, c.n_units, c.tail_bytes, c.scratch))
            for k in range(c.n_columns):
                at = k // LANES * LANES * TILE_ROWS + k % LANES
                store_f32(c.out, i * c.n_columns + k, load_f32(c.scratch, at))

    return c_function(look_up, 2)
