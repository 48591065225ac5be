"""Where the token of a step is: told to the calls of all layers by compiled code, since positions change every time."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from overspill.kernels.numba.attend import AttentionCall
from overspill.kernels.numba.memory import load_i64, reader, store_i64
from overspill.kernels.numba.native import c_function
from overspill.kernels.numba.rows import Heads, Rotation
from overspill.kernels.numba.target import SOURCE_DIGEST


class LayerCells(NamedTuple):
    """One layer's cells: addresses of the first, bytes from one sequence to the next and from cell to cell.

    n_ring: cells of a sequence; that of a position is its remainder. window: of positions. heads, attention: addresses
    of the calls that are told, see `rows.prepare_heads_address` and `AttentionCall`. i_angles: of those of the token.
    """

    k: int
    k_slot_bytes: int
    k_cell_bytes: int
    v: int
    v_slot_bytes: int
    v_cell_bytes: int
    n_ring: int
    window: int
    heads: int
    attention: int
    i_angles: int


# A call: slot, position, token, address of the addresses of cosines and sines, number of layers; then those.
TOKEN_AT = 2
_ANGLES_AT, _N_LAYERS_AT, _LAYERS_AT = 3, 4, 5
_N_FIELDS = len(LayerCells._fields)
_read_layer = reader(LayerCells)
_K_OUT = len(Heads._fields) + Heads._fields.index("out")
_V_OUT = len(Heads._fields) + _K_OUT
_COS = 3 * len(Heads._fields) + Rotation._fields.index("cos")
_SIN = 3 * len(Heads._fields) + Rotation._fields.index("sin")
_K, _V, _N_CELLS, _N_RUN, _NEXT_TASK = (
    AttentionCall._fields.index(name) for name in ("k", "v", "n_cells", "n_run", "next_task")
)


def cells_bytes(n_layers: int) -> int:
    """Size of a call."""
    return 8 * (_LAYERS_AT + _N_FIELDS * n_layers)


@cache
def find_cells_address() -> int:
    """(call, i) for a `Step`."""
    digest = SOURCE_DIGEST

    def find_cells(call, i_thread):
        _ = digest
        slot, position, angles = load_i64(call, 0), load_i64(call, 1), load_i64(call, _ANGLES_AT)
        for i in range(load_i64(call, _N_LAYERS_AT)):
            c = _read_layer(call + 8 * (_LAYERS_AT + _N_FIELDS * i))
            first = max(0, position - c.window + 1)
            own, n_cells = position % c.n_ring, position + 1 - first
            first %= c.n_ring
            k, v = c.k + slot * c.k_slot_bytes, c.v + slot * c.v_slot_bytes
            store_i64(c.heads, _COS, load_i64(angles, 2 * c.i_angles))
            store_i64(c.heads, _SIN, load_i64(angles, 2 * c.i_angles + 1))
            store_i64(c.heads, _K_OUT, k + own * c.k_cell_bytes)
            store_i64(c.heads, _V_OUT, v + own * c.v_cell_bytes)
            store_i64(c.attention, _K, k + first * c.k_cell_bytes)
            store_i64(c.attention, _V, v + first * c.v_cell_bytes)
            store_i64(c.attention, _N_CELLS, n_cells)
            store_i64(c.attention, _N_RUN, c.n_ring - first)
            store_i64(c.attention, _NEXT_TASK, 0)

    return c_function(find_cells, 2)
