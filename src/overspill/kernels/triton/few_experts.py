"""The routed experts of a layer for a few tokens: two launches that read the chosen experts' blocks where they lie.

Every pair (token, rank) is a product of its own: there is next to nothing to share between tokens but the reading of
an expert that several of them chose, and since programs that take the same rows of all pairs run side by side, that
comes from the cache. The first launch writes the hidden values of each pair, the second multiplies them with down and
adds the ranks of a token to its float32 hidden state, one after the other in ascending expert id, starting from what is
there: so cutting the experts into calls, in ascending order, changes no bit. Experts that are not here are skipped.

Which expert lies where is read from a map on the device, so the launches can be recorded before that is known.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from overspill.gpu_memory import FEW_TOKENS
from overspill.kernels.triton.decode import DECODERS, table_of
from overspill.kernels.triton.launch import Kernel, cdiv, follow, power_of_two
from overspill.kernels.triton.norm import Gated
from overspill.kernels.triton.rows import READERS, can_read
from overspill.kernels.triton.tuning import EXPERT_GATE_UP, RowTile, down_tile, tile_of
from overspill.quant.experts import ExpertVectors
from overspill.quant.qtensor import QTensor

_GROUP_OF_SLICES = 4
_TL = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _half(
    x, src, table, slot, expert, scale, bias, first_row, there,
    READ: tl.constexpr, DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    ROW_BYTES: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Rows of one expert's gate or up times x, `[ROWS]`."""
    zero = tl.zeros([1], tl.int32)
    src += slot.to(tl.int64) * STRIDE + first_row.to(tl.int64) * ROW_BYTES
    y = READ(x, zero, None, 0.0, src, table, zero, there, D, 1, ROWS, WIDTH, ROUND, DECODE, N_PARTS, BLOCK_BYTES, False)
    y = tl.reshape(y, [ROWS])
    if scale is not None:
        y *= tl.load(scale + expert)
    if bias is not None:
        y += tl.load(bias + expert.to(tl.int64) * F + first_row + there)
    return y


@triton.jit
def _gate_up(
    x, gate, up, gate_table, up_table, ids, mix, slot_of, gate_scale, up_scale, gate_bias, up_bias, hidden, slots,
    experts, weights,
    READ_G: tl.constexpr, DECODE_G: tl.constexpr, PARTS_G: tl.constexpr, BLOCK_G: tl.constexpr, ROW_G: tl.constexpr,
    STRIDE_G: tl.constexpr,
    READ_U: tl.constexpr, DECODE_U: tl.constexpr, PARTS_U: tl.constexpr, BLOCK_U: tl.constexpr, ROW_U: tl.constexpr,
    STRIDE_U: tl.constexpr,
    ACTIVATE: tl.constexpr, LIMIT: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, D: tl.constexpr,
    F: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, ROUND: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (pair, i): hidden values i ROWS ... of a pair; pairs of a token are written in ascending expert id.

    K: pairs of a token, SLICES of each expert that it picked; from here on every slice is an expert of its own.
    """
    follow(IS_CHAINED)
    pair = tl.program_id(0)
    t = pair // K
    ranks = tl.arange(0, K_PAD)
    expert = tl.load(ids + pair // SLICES) * SLICES + pair % SLICES
    slot = tl.load(slot_of + expert)
    others = tl.load(ids + (t * K + ranks) // SLICES, mask=ranks < K, other=0) * SLICES + ranks % SLICES
    row = t * K + tl.sum(((others < expert) & (ranks < K)).to(tl.int32))
    if tl.program_id(1) == 0:
        tl.store(slots + row, slot)
        tl.store(experts + row, expert)
        tl.store(weights + row, tl.load(mix + pair // SLICES))
    if slot < 0:
        return
    first_row = tl.program_id(1) * ROWS
    r = tl.arange(0, ROWS)
    there = r
    if F % ROWS != 0:
        there = tl.minimum(r, F - first_row - 1)
    x += t.to(tl.int64) * D
    g = _half(
        x, gate, gate_table, slot, expert, gate_scale, gate_bias, first_row, there, READ_G, DECODE_G, PARTS_G, BLOCK_G,
        ROW_G, STRIDE_G, D, F, ROWS, WIDTH, ROUND
    )  # fmt: skip
    u = _half(
        x, up, up_table, slot, expert, up_scale, up_bias, first_row, there, READ_U, DECODE_U, PARTS_U, BLOCK_U,
        ROW_U, STRIDE_U, D, F, ROWS, WIDTH, ROUND
    )  # fmt: skip
    values = ACTIVATE(g, u, LIMIT).to(hidden.dtype.element_ty)
    tl.store(hidden + row.to(tl.int64) * F + first_row + r, values, mask=first_row + r < F)


@triton.jit
def _down(
    hidden, down, table, slots, experts, weights, scale, bias, out,
    READ: tl.constexpr, DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, ROUND: tl.constexpr, OUT_STRIDE: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (t, i): values i ROWS ... of token t, from all its experts, which are sorted, GROUP at a time."""
    follow(IS_CHAINED)
    t = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    rows = tl.minimum(first_row + tl.arange(0, ROWS), D - 1)
    total = tl.load(out + t * OUT_STRIDE + rows)
    for first in tl.static_range(0, K_PAD, GROUP):
        ranks = first + tl.arange(0, GROUP)
        there = tl.load(slots + t * K + ranks, mask=ranks < K, other=-1)
        if tl.max(there) >= 0:
            y = _down_of_ranks(
                hidden, down, table, there, t * K, ranks, first_row, rows, READ, DECODE, N_PARTS, BLOCK_BYTES, K, GROUP,
                D, F, ROWS, WIDTH, ROUND
            )  # fmt: skip
            if scale is not None:
                known = tl.load(experts + t * K + ranks, mask=ranks < K, other=0)
                y *= tl.load(scale + known)[:, None]
            if bias is not None:
                known = tl.load(experts + t * K + ranks, mask=ranks < K, other=0)
                y += tl.load(bias + known.to(tl.int64)[:, None] * D + rows[None, :])
            # -0 is what changes no number when it is added.
            mix = tl.load(weights + t * K + ranks, mask=ranks < K, other=0.0)
            said = tl.where((there >= 0)[:, None], y * mix[:, None], -0.0)
            for k in tl.static_range(GROUP):
                total += tl.sum(tl.where((ranks == first + k)[:, None], said, -0.0), axis=0)
    tl.store(out + t * OUT_STRIDE + rows, total, mask=first_row + tl.arange(0, ROWS) < D)


@triton.jit
def _down_of_ranks(
    hidden, down, table, slots, first_pair, ranks, first_row, rows,
    READ: tl.constexpr, DECODE: tl.constexpr, N_PARTS: tl.constexpr, BLOCK_BYTES: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Products `[GROUP, ROWS]` of some of a token's experts."""
    # Ranks that are not here read what the first rows of the stack say, which is not used and costs no memory access.
    base = tl.where(slots >= 0, slots.to(tl.int64) * D + first_row, 0)
    at = (first_pair + tl.minimum(ranks, K - 1)) * F
    return READ(
        hidden, at, None, 0.0, down, table, base, rows - first_row, F, GROUP, ROWS, WIDTH, ROUND, DECODE, N_PARTS,
        BLOCK_BYTES, False
    )  # fmt: skip


_gate_up_kernel = Kernel(_gate_up, may_chain=True)
_down_kernel = Kernel(_down, may_chain=True)


class Pairs(NamedTuple):
    """ids: int32 `[T, K]`, distinct in a row; mix: float32 `[T, K]`; slot_of: int32 `[E n_slices]` on the device, -1:
    absent. n_slices: see `ExpertWeights`.
    """

    ids: torch.Tensor
    mix: torch.Tensor
    slot_of: torch.Tensor
    n_slices: int = 1


Parts = tuple[QTensor, QTensor, QTensor]


def can_add(n_tokens: int, parts: Parts) -> bool:
    """Whether `add_experts` takes and suits these."""
    if not 0 < n_tokens <= FEW_TOKENS or not parts[0].shape[0]:
        return False
    is_whole = parts[2].data.is_contiguous() and all(q.data[0].is_contiguous() for q in parts[:2])
    return is_whole and all(map(can_read, parts))


def add_experts(
    x: torch.Tensor,
    pairs: Pairs,
    parts: Parts,
    vectors: ExpertVectors,
    activate: Gated,
    out: torch.Tensor,
    *,
    dtype: torch.dtype,
    tiles: tuple[RowTile, RowTile] | None = None,
) -> None:
    """out += the weighted outputs of the experts that are here, see `kernels.Experts`.

    x: `[T, D]` of any float, rounded to `dtype`, which hidden values have. parts: gate, up `[E', F, D]` and down
    `[E', D, F]`. out: float32 `[T, D]`, each row contiguous.
    """
    gate, up, down = parts
    assert pairs.n_slices == 1 or vectors.is_empty, "vectors are of whole experts"
    n_pairs, K = pairs.ids.numel() * pairs.n_slices, pairs.ids.shape[1] * pairs.n_slices
    _, F, D = gate.shape
    x, ids, mix = x.contiguous(), pairs.ids.contiguous(), pairs.mix.contiguous()
    first, second = tiles or (tile_of(EXPERT_GATE_UP, gate.type), down_tile(down.type, len(x), pairs.n_slices))
    hidden = torch.empty((n_pairs, F), dtype=dtype, device=x.device)
    in_order = tuple(torch.empty(n_pairs, dtype=t, device=x.device) for t in (torch.int32, torch.int32, torch.float32))
    tables = [table_of(DECODERS[q.type], x.device) for q in parts]
    stacks = [(*READERS[q.type], q.data.shape[2], q.data.stride(0)) for q in (gate, up)]
    widths = (K, power_of_two(K), D, F)
    args = (x, gate.data, up.data, *tables[:2], ids, mix, pairs.slot_of, *vectors.scales[:2], *vectors.biases[:2])
    cut = (pairs.n_slices, first.n_rows, first.width_for(D), _TL[dtype])
    constants = (*stacks[0], *stacks[1], *activate, *widths, *cut)
    _gate_up_kernel((n_pairs, cdiv(F, first.n_rows)), (*args, hidden, *in_order), constants, first.tuning)
    rest = (vectors.scales[2], vectors.biases[2], out)
    # Of slices most lie elsewhere; those that are here have ranks one behind the other.
    group = widths[1] if pairs.n_slices == 1 else min(widths[1], _GROUP_OF_SLICES)
    shape = (*widths[:2], group, *widths[2:], second.n_rows, second.width_for(F), _TL[dtype], out.stride(0))
    grid = (len(x), cdiv(D, second.n_rows))
    _down_kernel(grid, (hidden, down.data, tables[2], *in_order, *rest), (*READERS[down.type], *shape), second.tuning)
