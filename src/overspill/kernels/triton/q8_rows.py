"""Cells of type q8_0 (see `quant.q8_rows`): how kernels read and write rows, and `Q8Rows` on a GPU.

Rows are passed as int8: their values first, their scales, as float16, from byte SCALES on. Values that were read are
float16 beside tensor cores: a byte times a float16 has more bits than a bfloat16 keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from overspill.kernels.triton.launch import Kernel, Tuning, cdiv, follow, power_of_two
from overspill.kernels.triton.workspace import Workspace

_TILE_VALUES = 4096
_TUNING = Tuning(n_warps=4)
# Added to a number and taken away again, it leaves the nearest whole one, the even one of two.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def read_tile(
    rows, cells, is_cell, FIRST: tl.constexpr, N_VALUES: tl.constexpr, WIDTH: tl.constexpr, CELL: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Values from FIRST on of cells `[N]` behind `rows`, float32 `[N, WIDTH]`; zeros from N_VALUES on."""
    GROUP: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    N_GROUPS: tl.constexpr = WIDTH // GROUP
    groups = tl.arange(0, N_GROUPS)
    at = cells.to(tl.int64)
    channels = FIRST + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = is_cell[:, None, None] & (channels < N_VALUES)[None, :, :]
    values = tl.load(rows + (at * CELL)[:, None, None] + channels[None, :, :], mask=mask, other=0)
    halves = rows.to(tl.pointer_type(tl.float16))
    i_scale = FIRST // 32 + groups
    mask = is_cell[:, None] & (FIRST + groups * GROUP < N_VALUES)[None, :]
    scales = tl.load(halves + (at * (CELL // 2) + SCALES // 2)[:, None] + i_scale[None, :], mask=mask, other=0.0)
    return tl.reshape(values.to(tl.float32) * scales.to(tl.float32)[:, :, None], [cells.shape[0], WIDTH])


@triton.jit
def write_rows(rows, at, x, is_there, N_VALUES: tl.constexpr, WIDTH: tl.constexpr):
    """Encode x `[R, WIDTH]`, zero from N_VALUES on, into the rows that begin `at [R]` bytes behind `rows`."""
    GROUP: tl.constexpr = 32 if WIDTH >= 32 else WIDTH
    N_GROUPS: tl.constexpr = WIDTH // GROUP
    grouped = tl.reshape(x, [x.shape[0], N_GROUPS, GROUP])
    scales = tl.div_rn(tl.max(tl.abs(grouped), axis=2), 127.0)
    inverse = tl.div_rn(1.0, tl.where(scales > 0.0, scales, 1.0))
    values = (grouped * inverse[:, :, None] + _ROUNDER) - _ROUNDER
    groups = tl.arange(0, N_GROUPS)
    channels = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = is_there[:, None, None] & (channels < N_VALUES)[None, :, :]
    tl.store(rows + at[:, None, None] + channels[None, :, :], values.to(tl.int8), mask=mask)
    halves = rows.to(tl.pointer_type(tl.float16))
    mask = is_there[:, None] & (groups * GROUP < N_VALUES)[None, :]
    tl.store(halves + ((at + N_VALUES) // 2)[:, None] + groups[None, :], scales.to(tl.float16), mask=mask)


@triton.jit
def cell_offsets(
    slots, positions, tokens, is_there, SLOT: tl.constexpr, HEAD: tl.constexpr, CELL: tl.constexpr
):  # fmt: skip
    """Where the cells of tokens `[R]` begin: one after the other, or each where its step stands in its ring."""
    if slots is None:
        at = tokens * CELL
    else:
        slot = tl.load(slots + tokens, mask=is_there, other=0).to(tl.int64)
        cell = tl.load(positions + tokens, mask=is_there, other=0) % (HEAD // CELL)
        at = slot * SLOT + cell.to(tl.int64) * CELL
    return at


@triton.jit(do_not_specialize=["n_tokens"])
def _put(
    x, rows, slots, positions, n_tokens,
    A: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, X_TOKEN: tl.constexpr, X_HEAD: tl.constexpr,
    SLOT: tl.constexpr, HEAD: tl.constexpr, CELL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (tokens, head)."""
    follow(IS_CHAINED)
    tokens = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    is_there = tokens < n_tokens
    c = tl.arange(0, WIDTH)
    mask = is_there[:, None] & (c < A)[None, :]
    values = tl.load(x + (tokens * X_TOKEN + g * X_HEAD)[:, None] + c[None, :], mask=mask, other=0.0).to(tl.float32)
    at = cell_offsets(slots, positions, tokens, is_there, SLOT, HEAD, CELL) + g * HEAD
    write_rows(rows, at, values, is_there, A, WIDTH)


@triton.jit(do_not_specialize=["n_cells"])
def _read(
    rows, out, n_cells,
    A: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, HEAD: tl.constexpr, CELL: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Program (cells, head)."""
    cells = (tl.program_id(0) * R + tl.arange(0, R)).to(tl.int64)
    g = tl.program_id(1).to(tl.int64)
    is_cell = cells < n_cells
    values = read_tile(rows + g * HEAD, cells, is_cell, 0, A, WIDTH, CELL, SCALES)
    c = tl.arange(0, WIDTH)
    at = (g * n_cells + cells)[:, None] * A + c[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=is_cell[:, None] & (c < A)[None, :])


_put_kernel = Kernel(_put, is_exact=True, may_chain=True)
_read_kernel = Kernel(_read)


def n_row_values(row_bytes: int) -> int:
    """Values of a row: the inverse of `CellType.row_bytes`."""
    whole, rest = divmod(row_bytes, 34)
    return 32 * whole + max(0, rest - 2)


def reading_dtype(cells: torch.dtype, dtype: torch.dtype) -> torch.dtype:
    """What attention computes in. cells: the dtype that holds them. dtype: of the ops."""
    if cells != torch.uint8:
        return cells
    return torch.float16 if dtype == torch.bfloat16 else dtype


class TritonRows:
    """`Q8Rows` on one device; reads into scratch memory."""

    def __init__(self, workspace: Workspace, dtype: torch.dtype) -> None:
        self._workspace = workspace
        self._dtype = reading_dtype(torch.uint8, dtype)

    def put(self, x_TGA: torch.Tensor, cells_GTR: torch.Tensor) -> None:
        _launch_put(x_TGA, cells_GTR, (None, None), (0, *cells_GTR.stride()[:2]))

    def put_steps(self, x_TGA: torch.Tensor, cells_SGCR: torch.Tensor, slots: torch.Tensor, at: torch.Tensor) -> None:
        _launch_put(x_TGA, cells_SGCR, (slots, at), cells_SGCR.stride()[:3])

    def read(self, cells_GCR: Sequence[torch.Tensor], dims: Sequence[int]) -> list[torch.Tensor]:
        return [self._read(f"cells{i}", *of) for i, of in enumerate(zip(cells_GCR, dims, strict=True))]

    def _read(self, name: str, cells_GCR: torch.Tensor, A: int) -> torch.Tensor:
        (G, C, _), (head, cell, _) = cells_GCR.shape, cells_GCR.stride()
        # All cells of a head follow each other: how many there are at most is reserved at once.
        self._workspace.reserve(name, G * (head // cell) * A * self._dtype.itemsize)
        out = self._workspace.take(name, (G, C, A), self._dtype)
        width = power_of_two(A)
        n_rows = max(1, _TILE_VALUES // width)
        constants = (A, width, n_rows, head, cell, n_row_values(cells_GCR.shape[2]))
        _read_kernel((cdiv(C, n_rows), G), (cells_GCR.view(torch.int8), out, C), constants, _TUNING)
        return out


def _launch_put(
    x_TGA: torch.Tensor,
    rows: torch.Tensor,
    steps: tuple[torch.Tensor | None, torch.Tensor | None],
    strides: tuple[int, ...],
) -> None:
    x = x_TGA if x_TGA.stride(2) == 1 else x_TGA.contiguous()
    T, G, A = x.shape
    width = power_of_two(A)
    n_tokens = 1 if steps[0] is not None else max(1, _TILE_VALUES // width)
    constants = (A, width, n_tokens, x.stride(0), x.stride(1), *strides)
    _put_kernel((cdiv(T, n_tokens), G), (x, rows.view(torch.int8), *steps, T), constants, _TUNING)
