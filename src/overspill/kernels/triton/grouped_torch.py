"""Grouped products through torch's own kernel, which is fast on sm_90: it wants its rows gathered.

Rows that belong to no expert here come last; torch leaves their results undefined and nothing reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, power_of_two
from overspill.kernels.triton.norm import Gated
from overspill.kernels.triton.sort import Sorted

_ROWS = 4
_MAX_BLOCK = 1024
_TUNING = Tuning(n_warps=4)


@triton.jit(do_not_specialize=["n_slots"])
def _gather(
    x, out, order, offsets, n_slots, K: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < tl.load(offsets + n_slots)
    mask = is_row[:, None] & (cols < D)[None, :]
    tokens = tl.load(order + rows, mask=is_row, other=0) // K
    values = tl.load(x + tokens.to(tl.int64)[:, None] * D + cols[None, :], mask=mask, other=0.0)
    tl.store(out + rows.to(tl.int64)[:, None] * D + cols[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["n_slots"])
def _activate(
    gate_up, out, offsets, n_slots,
    F: tl.constexpr, ACTIVATE: tl.constexpr, LIMIT: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < tl.load(offsets + n_slots))[:, None] & (cols < F)[None, :]
    at = rows.to(tl.int64)[:, None] * F + cols[None, :]
    there = gate_up + rows.to(tl.int64)[:, None] * (2 * F) + cols[None, :]
    gate = tl.load(there, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(there + F, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, ACTIVATE(gate, up, LIMIT).to(out.dtype.element_ty), mask=mask)


_gather_kernel = Kernel(_gather)
_activate_kernel = Kernel(_activate)


def gather(x: torch.Tensor, rows: Sorted, n_used: int, out: torch.Tensor) -> None:
    """out[r] = x[order[r] // n_used]. x: `[T, D]`; out: `[T K, D]`."""
    D = x.shape[1]
    block = min(_MAX_BLOCK, power_of_two(D))
    args = (x, out, rows.order, rows.offsets, rows.offsets.shape[0] - 1)
    _gather_kernel((cdiv(out.shape[0], _ROWS), cdiv(D, block)), args, (n_used, D, _ROWS, block), _TUNING)


def activate(gate_up: torch.Tensor, rows: Sorted, function: Gated, out: torch.Tensor) -> None:
    """out = function(gate, up). gate_up: `[T K, 2 F]`; out: `[T K, F]`."""
    F = out.shape[1]
    block = min(_MAX_BLOCK, power_of_two(F))
    args = (gate_up, out, rows.offsets, rows.offsets.shape[0] - 1)
    _activate_kernel((cdiv(out.shape[0], _ROWS), cdiv(F, block)), args, (F, *function, _ROWS, block), _TUNING)


def products(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: Sorted,
    n_used: int,
    function: Gated,
    gathered: torch.Tensor,
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Both products of all rows: returns `[T K, D]`. gathered `[T K, D]` and hidden `[T K, F]` are scratch."""
    ends = rows.offsets[1:]
    gather(x, rows, n_used, gathered)
    activate(torch._grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends), rows, function, hidden)
    out: torch.Tensor = torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends)
    return out
