"""The routed experts of one layer, for any number of tokens, in one compiled call.

First the (token, expert) pairs are grouped by expert. Then threads take tasks: (expert, some rows of gate and up),
which leave the gated activations of every pair in a buffer; and after that (some rows of down), which go through
the experts in ascending order and add to the output. So every output number is made by one thread, in an order
that depends neither on the threads nor on which other experts are there: a layer may be cut into slabs of
ascending experts, run one after the other, and gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import get_num_threads
from torch import Tensor

from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.matmul import padded, rows_per_task
from overspill.kernels.numba.memory import load_f32, load_i32, load_i64, next_number, reader, store_f32, store_i64
from overspill.kernels.numba.native import c_function, caller, run
from overspill.kernels.numba.panel import (
    ADD,
    N_MULTIPLY_ARGS,
    SCRATCH_BYTES,
    SILU,
    STORE,
    Rows,
    describe,
    multiply_address,
)
from overspill.kernels.numba.target import SOURCE_DIGEST, UNIT_ELEMENTS
from overspill.kernels.numba.workspace import WORKSPACE
from overspill.quant.experts import Activation
from overspill.quant.qtensor import QTensor


class _Call(NamedTuple):
    """What the threads read: counts, addresses, strides in bytes; arrays are of int64 unless said otherwise.

    i_task_hidden, i_task_down: the next task of each part. is_wrong: set if an id or a slot was out of range.
    ids, slot_of: int32; slot_of is 0 for "expert e is in slot e". then: what to do with the up products.
    gate, up, down: descriptions of the stacks (`panel.Rows`).
    Groups of pairs with the same expert, ascending: first[g] is the first pair of group g, slots[g] the slot;
    ends[e] is where the next pair of expert e goes. Of every pair, in that order: the rows of input, hidden
    activations and output, and the weight (float32).
    """

    i_task_hidden: int
    i_task_down: int
    is_wrong: int
    n_groups: int
    n_tokens: int
    n_used: int
    n_experts: int
    n_slots: int
    n_hidden: int
    n_model: int
    then: int
    n_threads: int
    ids: int
    weights: int
    slot_of: int
    x: int
    x_stride: int
    out: int
    out_stride: int
    hidden: int
    hidden_stride: int
    multiply: int
    gate: int
    up: int
    down: int
    first: int
    slots: int
    ends: int
    pair_inputs: int
    pair_hidden: int
    pair_outputs: int
    pair_weights: int
    scratch: int


# Hidden activations in memory at once; more tokens are taken in turns.
_MAX_HIDDEN_BYTES = 1 << 26
# What panel.multiply does with the up products, which meet the gate products in the output.
_THEN = {Activation.SILU: SILU}
_N_FIELDS = len(_Call._fields)
_N_ROWS_FIELDS = len(Rows._fields)
_I_TASK_HIDDEN, _I_TASK_DOWN, _IS_WRONG, _N_GROUPS = range(4)
_read_call = reader(_Call)
_read_rows = reader(Rows)
_call_multiply = caller(N_MULTIPLY_ARGS)


def experts(
    x: Tensor,
    w_gate: QTensor,
    w_up: QTensor,
    w_down: QTensor,
    ids: Tensor,
    weights: Tensor,
    slot_of: npt.NDArray[np.int32] | None,
    out: Tensor,
    act: Activation = Activation.SILU,
) -> None:
    """Add the weighted outputs of the routed experts to `out`, in place.

    x float32 [T, D]; w_gate, w_up [S, F, D] and w_down [S, D, F] are stacked over slots, of any types that have a
    kernel. ids int32 or int64 [T, K] and weights float32 [T, K] name the experts of each token. slot_of int32 [E]
    gives the slot of an expert, -1 where it is absent (its contribution is left out); None: expert e is in slot e.
    out float32 [T, D], rows contiguous. A token's contributions are added in ascending order of expert id.
    Raises IndexError for an id that is no expert or a slot that is no slot, ValueError if shapes do not fit.
    """
    stacks = w_gate, w_up, w_down
    _check(x, stacks, ids, weights, out)
    x, ids, weights = padded(x), ids.to(torch.int32).contiguous(), weights.contiguous()
    slots = None if slot_of is None else np.ascontiguousarray(slot_of, dtype=np.int32)
    n_tokens, n_at_once = len(x), max(_MAX_HIDDEN_BYTES // (ids.shape[1] * _hidden_stride(w_gate)), 1)
    if n_tokens <= n_at_once:
        return _run(x, stacks, ids, weights, slots, out, _THEN[act])
    for part in (slice(i, i + n_at_once) for i in range(0, n_tokens, n_at_once)):
        _run(x[part], stacks, ids[part], weights[part], slots, out[part], _THEN[act])
    return None


def _run(
    x: Tensor,
    stacks: tuple[QTensor, QTensor, QTensor],
    ids: Tensor,
    weights: Tensor,
    slot_of: npt.NDArray[np.int32] | None,
    out: Tensor,
    then: int,
) -> None:
    (n_tokens, n_used), (n_slots, n_hidden, n_model) = ids.shape, stacks[0].shape
    n_experts = n_slots if slot_of is None else len(slot_of)
    n_threads, n_pairs, hidden_stride = get_num_threads(), n_tokens * n_used, _hidden_stride(stacks[0])
    # The call block: fields, three descriptions, then arrays of int64.
    call = WORKSPACE.memory("call", 8 * (_N_FIELDS + 3 * _N_ROWS_FIELDS + 3 * n_experts + 1 + 4 * n_pairs))
    gate = call.address + 8 * _N_FIELDS
    first = gate + 8 * 3 * _N_ROWS_FIELDS
    slots = first + 8 * (n_experts + 1)
    pairs = slots + 8 * 2 * n_experts
    fields = _Call(
        i_task_hidden=0,
        i_task_down=0,
        is_wrong=0,
        n_groups=0,
        n_tokens=n_tokens,
        n_used=n_used,
        n_experts=n_experts,
        n_slots=n_slots,
        n_hidden=n_hidden,
        n_model=n_model,
        then=then,
        n_threads=n_threads,
        ids=ids.data_ptr(),
        weights=weights.data_ptr(),
        slot_of=0 if slot_of is None else slot_of.__array_interface__["data"][0],
        x=x.data_ptr(),
        x_stride=4 * x.stride(0),
        out=out.data_ptr(),
        out_stride=4 * out.stride(0),
        hidden=WORKSPACE.memory("hidden", n_pairs * hidden_stride).address,
        hidden_stride=hidden_stride,
        multiply=multiply_address(),
        gate=gate,
        up=gate + 8 * _N_ROWS_FIELDS,
        down=gate + 8 * 2 * _N_ROWS_FIELDS,
        first=first,
        slots=slots,
        ends=slots + 8 * n_experts,
        pair_inputs=pairs,
        pair_hidden=pairs + 8 * n_pairs,
        pair_outputs=pairs + 8 * 2 * n_pairs,
        pair_weights=pairs + 8 * 3 * n_pairs,
        scratch=WORKSPACE.memory("scratch", n_threads * SCRATCH_BYTES).address,
    )
    call.write(fields + describe(stacks[0]) + describe(stacks[1]) + describe(stacks[2]))
    run(_group_address(), _hidden_address(), _down_address(), call.address, n_threads)
    if call.read(_IS_WRONG):
        raise IndexError(f"expert ids must be 0 to {n_experts - 1} and slots at most {n_slots - 1}")


def _hidden_stride(w_gate: QTensor) -> int:
    """Bytes of one pair's hidden activations, padded to whole units."""
    n_hidden = w_gate.shape[1]
    return 4 * (n_hidden + -n_hidden % UNIT_ELEMENTS)


def _check(x: Tensor, stacks: tuple[QTensor, QTensor, QTensor], ids: Tensor, weights: Tensor, out: Tensor) -> None:
    """Compiled code follows addresses: what does not fit must not get there."""
    gate, up, down = (w.shape for w in stacks)
    if up != gate or down != (gate[0], gate[2], gate[1]):
        raise ValueError(f"expert shapes do not fit: gate {gate}, up {up}, down {down}")
    if x.shape[1] != gate[2] or out.shape != x.shape or out.stride(1) != 1:
        raise ValueError(f"activations {tuple(x.shape)} or output {tuple(out.shape)} do not fit {gate}")
    if ids.shape != weights.shape or len(ids) != len(x):
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} do not fit {len(x)} tokens")
    if not x.dtype == weights.dtype == out.dtype == torch.float32:
        raise ValueError(f"activations, weights and output must be float32: {x.dtype}, {weights.dtype}, {out.dtype}")


@cache
def _group_address() -> int:
    digest = SOURCE_DIGEST

    def group_experts(call, i_thread):
        """Counting sort of the pairs by expert; within one, tokens ascend."""
        _ = digest
        c = _read_call(call)
        for e in range(c.n_experts):
            store_i64(c.ends, e, 0)
        for pair in range(c.n_tokens * c.n_used):
            expert = load_i32(c.ids, pair)
            slot = _slot(expert, c)
            if slot == -2:
                store_i64(call, _IS_WRONG, 1)
                return
            if slot >= 0:
                store_i64(c.ends, expert, load_i64(c.ends, expert) + 1)
        store_i64(call, _N_GROUPS, _place_groups(c))
        for pair in range(c.n_tokens * c.n_used):
            expert = load_i32(c.ids, pair)
            if _slot(expert, c) >= 0:
                i = load_i64(c.ends, expert)
                store_i64(c.ends, expert, i + 1)
                _place_pair(pair, i, c)

    return c_function(group_experts, 2)


@inner
def _slot(expert, c):
    """Slot of an expert, -1 if absent, -2 if there is no such expert or slot."""
    if expert < 0 or expert >= c.n_experts:
        return -2
    if c.slot_of == 0:
        return expert
    slot = load_i32(c.slot_of, expert)
    return slot if slot < c.n_slots else -2


@inner
def _place_groups(c):
    """From the number of pairs in ends[e] to the groups; ends[e] becomes the first pair. Returns their number."""
    n_groups, n_placed = 0, 0
    for e in range(c.n_experts):
        n = load_i64(c.ends, e)
        store_i64(c.ends, e, n_placed)
        if n:
            store_i64(c.first, n_groups, n_placed)
            store_i64(c.slots, n_groups, _slot(e, c))
            n_groups += 1
            n_placed += n
    store_i64(c.first, n_groups, n_placed)
    return n_groups


@inner
def _place_pair(pair, i, c):
    token = pair // c.n_used
    hidden = c.hidden + i * c.hidden_stride
    store_i64(c.pair_inputs, i, c.x + token * c.x_stride)
    store_i64(c.pair_hidden, i, hidden)
    store_i64(c.pair_outputs, i, c.out + token * c.out_stride)
    store_f32(c.pair_weights, i, load_f32(c.weights, pair))
    for element in range(c.n_hidden, c.hidden_stride // 4):
        store_f32(hidden, element, np.float32(0))


@cache
def _hidden_address() -> int:
    digest = SOURCE_DIGEST

    def hidden_of_experts(call, i_thread):
        """Gate and up rows of one expert after the other: the gated activations of every pair."""
        _ = digest
        c = _read_call(call)
        gate, up = _read_rows(c.gate), _read_rows(c.up)
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        n_per_task = rows_per_task(c.n_hidden, max(c.n_groups, 1), c.n_threads)
        n_parts = (c.n_hidden + n_per_task - 1) // n_per_task
        while True:
            task = next_number(call + 8 * _I_TASK_HIDDEN)
            if task >= c.n_groups * n_parts:
                break
            group, row = task // n_parts, task % n_parts * n_per_task
            n_rows = min(n_per_task, c.n_hidden - row)
            first, i_row = load_i64(c.first, group), load_i64(c.slots, group) * c.n_hidden
            n, inputs = load_i64(c.first, group + 1) - first, c.pair_inputs + 8 * first
            hidden = c.pair_hidden + 8 * first
            up_row = up.address + (i_row + row) * up.row_bytes
            gate_part = (c.gate, i_row * gate.row_bytes, row, n_rows, up_row)
            up_part = (c.up, i_row * up.row_bytes, row, n_rows, 0)
            _call_multiply(c.multiply, (*gate_part, n, inputs, hidden, 0, STORE, scratch))
            _call_multiply(c.multiply, (*up_part, n, inputs, hidden, 0, c.then, scratch))

    return c_function(hidden_of_experts, 2)


@cache
def _down_address() -> int:
    digest = SOURCE_DIGEST

    def down_of_experts(call, i_thread):
        """Some rows of every expert's down matrix, experts ascending, added to the output."""
        _ = digest
        c = _read_call(call)
        down = _read_rows(c.down)
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        n_per_task = rows_per_task(c.n_model, 1, c.n_threads)
        while True:
            row = next_number(call + 8 * _I_TASK_DOWN) * n_per_task
            if row >= c.n_model:
                break
            n_rows = min(n_per_task, c.n_model - row)
            for group in range(c.n_groups):
                first, i_row = load_i64(c.first, group), load_i64(c.slots, group) * c.n_model
                n, weights = load_i64(c.first, group + 1) - first, c.pair_weights + 4 * first
                next_read = 0
                if group + 1 < c.n_groups:
                    next_read = down.address + (load_i64(c.slots, group + 1) * c.n_model + row) * down.row_bytes
                part = (c.down, i_row * down.row_bytes, row, n_rows, next_read)
                hidden, outputs = c.pair_hidden + 8 * first, c.pair_outputs + 8 * first
                _call_multiply(c.multiply, (*part, n, hidden, outputs, weights, ADD, scratch))

    return c_function(down_of_experts, 2)
