"""The compiled parts of `experts`: grouping, gate and up, down.

First the (token, expert) pairs are grouped by expert. Then threads take tasks: (expert, some rows of gate and up),
which leave the gated activations of every pair in a buffer (as digits too, where down wants them); and after that (some
rows of down), which go through the experts in ascending order and add to the output. So every output number is made by
one thread, in an order that depends neither on the threads nor on which other experts are there: a layer may be cut
into slabs of ascending experts, run one after the other, and gives the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from overspill.kernels.numba.digits import digitise
from overspill.kernels.numba.jit import inner
from overspill.kernels.numba.matmul import rows_per_task
from overspill.kernels.numba.memory import load_f32, load_i32, load_i64, next_number, reader, store_f32, store_i64
from overspill.kernels.numba.native import c_function, caller
from overspill.kernels.numba.panel import ADD, N_MULTIPLY_ARGS, SCRATCH_BYTES, STORE, Rows
from overspill.kernels.numba.target import SOURCE_DIGEST


class Call(NamedTuple):
    """What the threads read: counts, addresses, strides in bytes; arrays are of int64 unless said otherwise.

    i_task_x, i_task_hidden, i_task_digits, i_task_down: the next task of each part. is_wrong: set if an id or a slot
    was out of range.
    ids, slot_of: int32; slot_of is 0 for "expert e is in slot e". then: what to do with the up products.
    gate, up, down: descriptions of the stacks (`panel.Rows`).
    scales, biases: float32, one of each or one row of each per expert of the layer, or 0.
    Groups of pairs with the same expert, ascending: first[g] is the first pair of group g, slots[g] the slot,
    members[g] the expert; ends[e] is where the next pair of expert e goes. Of every pair, in that order: the rows
    of input, hidden activations and output, the weight, and the limit (float32). limit: one float32, in the low half.
    x_digits: of all tokens, by pair; hidden_digits: of all pairs; 0 where no matrix takes digits. gate_inputs,
    up_inputs, down_inputs: the rows that each takes.
    """

    i_task_x: int
    i_task_hidden: int
    i_task_digits: int
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
    x_elements: int
    out: int
    out_stride: int
    hidden: int
    hidden_stride: int
    multiply: int
    gate: int
    up: int
    down: int
    gate_scales: int
    up_scales: int
    down_scales: int
    gate_biases: int
    up_biases: int
    down_biases: int
    first: int
    slots: int
    members: int
    ends: int
    pair_inputs: int
    pair_hidden: int
    pair_outputs: int
    pair_weights: int
    pair_limits: int
    limit: int
    x_digits: int
    x_digits_stride: int
    hidden_digits: int
    hidden_digits_stride: int
    pair_x_digits: int
    pair_hidden_digits: int
    gate_inputs: int
    up_inputs: int
    down_inputs: int
    scratch: int


_I_TASK_X, _I_TASK_HIDDEN, _I_TASK_DIGITS, _I_TASK_DOWN, IS_WRONG, _N_GROUPS = range(6)
_LIMIT = Call._fields.index("limit")
_read_call = reader(Call)
_read_rows = reader(Rows)
_call_multiply = caller(N_MULTIPLY_ARGS)


@cache
def group_address() -> int:
    digest = SOURCE_DIGEST

    def group_experts(call, i_thread):
        """Counting sort of the pairs by expert; within one, tokens ascend."""
        _ = digest
        c = _read_call(call)
        for i in range(_N_GROUPS + 1):
            store_i64(call, i, 0)
        store_i64(c.first, 0, 0)
        for e in range(c.n_experts):
            store_i64(c.ends, e, 0)
        for pair in range(c.n_tokens * c.n_used):
            expert = load_i32(c.ids, pair)
            slot = _slot(expert, c)
            if slot == -2:
                store_i64(call, IS_WRONG, 1)
                return
            if slot >= 0:
                store_i64(c.ends, expert, load_i64(c.ends, expert) + 1)
        store_i64(call, _N_GROUPS, _place_groups(c))
        for pair in range(c.n_tokens * c.n_used):
            expert = load_i32(c.ids, pair)
            if _slot(expert, c) >= 0:
                i = load_i64(c.ends, expert)
                store_i64(c.ends, expert, i + 1)
                _place_pair(pair, i, c, load_f32(call, 2 * _LIMIT))

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
            store_i64(c.members, n_groups, e)
            n_groups += 1
            n_placed += n
    store_i64(c.first, n_groups, n_placed)
    return n_groups


@inner
def _place_pair(pair, i, c, limit):
    token = pair // c.n_used
    hidden = c.hidden + i * c.hidden_stride
    store_i64(c.pair_inputs, i, c.x + token * c.x_stride)
    store_i64(c.pair_x_digits, i, c.x_digits + token * c.x_digits_stride)
    store_i64(c.pair_hidden_digits, i, c.hidden_digits + i * c.hidden_digits_stride)
    store_i64(c.pair_hidden, i, hidden)
    store_i64(c.pair_outputs, i, c.out + token * c.out_stride)
    store_f32(c.pair_weights, i, load_f32(c.weights, pair))
    store_f32(c.pair_limits, i, limit)
    for element in range(c.n_hidden, c.hidden_stride // 4):
        store_f32(hidden, element, np.float32(0))


@inner
def _of_expert(address, index, n):
    """Address of entry or row `index` of float32 arrays, 0 if there are none."""
    return address + 4 * index * n if address != 0 else 0


@cache
def digitise_x_address() -> int:
    digest = SOURCE_DIGEST

    def digitise_tokens(call, i_thread):
        _ = digest
        c = _read_call(call)
        while True:
            i = next_number(call + 8 * _I_TASK_X)
            if i >= c.n_tokens:
                break
            digitise(c.x + i * c.x_stride, c.x_elements, c.x_digits + i * c.x_digits_stride)

    return c_function(digitise_tokens, 2)


@cache
def digitise_hidden_address() -> int:
    digest = SOURCE_DIGEST

    def digitise_pairs(call, i_thread):
        _ = digest
        c = _read_call(call)
        while True:
            i = next_number(call + 8 * _I_TASK_DIGITS)
            if i >= load_i64(c.first, c.n_groups):
                break
            digitise(load_i64(c.pair_hidden, i), c.hidden_stride // 4, load_i64(c.pair_hidden_digits, i))

    return c_function(digitise_pairs, 2)


@cache
def hidden_address() -> int:
    digest = SOURCE_DIGEST

    def hidden_of_experts(call, i_thread):
        """Gate and up rows of one expert after the other: the gated activations of every pair."""
        _ = digest
        c = _read_call(call)
        gate, up = _read_rows(c.gate), _read_rows(c.up)
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        n_per_task = rows_per_task(c.n_hidden, max(c.n_groups, 1), c.n_threads)
        n_parts = (c.n_hidden + n_per_task - 1) // n_per_task
        task = next_number(call + 8 * _I_TASK_HIDDEN)
        while task < c.n_groups * n_parts:
            following = next_number(call + 8 * _I_TASK_HIDDEN)
            group, row = task // n_parts, task % n_parts * n_per_task
            n_rows = min(n_per_task, c.n_hidden - row)
            first, i_row = load_i64(c.first, group), load_i64(c.slots, group) * c.n_hidden
            n, hidden = load_i64(c.first, group + 1) - first, c.pair_hidden + 8 * first
            up_row, e = up.address + (i_row + row) * up.row_bytes, load_i64(c.members, group)
            next_read = 0
            if following < c.n_groups * n_parts:
                next_row = load_i64(c.slots, following // n_parts) * c.n_hidden + following % n_parts * n_per_task
                next_read = gate.address + next_row * gate.row_bytes
            tokens = (n, c.gate_inputs + 8 * first, hidden, c.pair_limits + 4 * first)
            part = (c.gate, i_row * gate.row_bytes, row, n_rows, up_row)
            adjust = (_of_expert(c.gate_scales, e, 1), _of_expert(c.gate_biases, e, c.n_hidden))
            _call_multiply(c.multiply, (*part, *adjust, *tokens, STORE, scratch))
            tokens = (n, c.up_inputs + 8 * first, hidden, c.pair_limits + 4 * first)
            part = (c.up, i_row * up.row_bytes, row, n_rows, next_read)
            adjust = (_of_expert(c.up_scales, e, 1), _of_expert(c.up_biases, e, c.n_hidden))
            _call_multiply(c.multiply, (*part, *adjust, *tokens, c.then, scratch))
            task = following

    return c_function(hidden_of_experts, 2)


@cache
def down_address() -> int:
    digest = SOURCE_DIGEST

    def down_of_experts(call, i_thread):
        """Some rows of every expert's down matrix, experts ascending, added to the output."""
        _ = digest
        c = _read_call(call)
        down = _read_rows(c.down)
        scratch = c.scratch + i_thread * SCRATCH_BYTES
        n_per_task = rows_per_task(c.n_model, 1, c.n_threads)
        row = next_number(call + 8 * _I_TASK_DOWN) * n_per_task
        while row < c.n_model:
            following = next_number(call + 8 * _I_TASK_DOWN) * n_per_task
            n_rows = min(n_per_task, c.n_model - row)
            for group in range(c.n_groups):
                first, i_row = load_i64(c.first, group), load_i64(c.slots, group) * c.n_model
                n, weights = load_i64(c.first, group + 1) - first, c.pair_weights + 4 * first
                next_read = 0
                if group + 1 < c.n_groups:
                    next_read = down.address + (load_i64(c.slots, group + 1) * c.n_model + row) * down.row_bytes
                elif following < c.n_model:
                    next_read = down.address + (load_i64(c.slots, 0) * c.n_model + following) * down.row_bytes
                part, e = (c.down, i_row * down.row_bytes, row, n_rows, next_read), load_i64(c.members, group)
                adjust = (_of_expert(c.down_scales, e, 1), _of_expert(c.down_biases, e, c.n_model))
                tokens = (n, c.down_inputs + 8 * first, c.pair_outputs + 8 * first, weights)
                _call_multiply(c.multiply, (*part, *adjust, *tokens, ADD, scratch))
            row = following

    return c_function(down_of_experts, 2)
