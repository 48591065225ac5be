"""Ways to compute causal attention on a CUDA device, all of one signature, and which problems each is meant for.

cuDNN builds a plan for every pair of lengths it has not seen, which takes it hundreds of milliseconds; it also knows
only the causal mask that is aligned to the first cell. So it gets a bounded set of problems: whole blocks of queries
against pieces of the past whose lengths are powers of two, without a mask, and against themselves with one; the rest
of the past goes to the kernel of `flash`, and the parts are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from overspill.kernels.triton.flash import Partial, flash, flash_partial
from overspill.kernels.triton.merge import merged

_UNIT_CELLS = 1024
_UNIT_QUERIES = 512


class Attend(Protocol):
    """`kernels.Attention` with neither window nor sinks; q, k and v of one dtype."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor: ...


class Candidate(NamedTuple):
    """suits: whether the numbers of queries and cells are what it is meant for."""

    name: str
    attend: Attend
    suits: Callable[[int, int], bool]


def attend_torch_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Torch's flash attention, whose own causal mask is aligned to the last cell."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(*_batch(q, k, v), 0.0, True, False, scale=scale)[0]
    return _rows(out).flatten(1)


def attend_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float) -> torch.Tensor:
    """cuDNN for whole pieces, `flash` for the rest, see the module."""
    T, C = q.shape[0], k.shape[1]
    n_rest = (C - T) % _UNIT_CELLS
    own = slice(C - T - n_rest, C)
    if n_rest:
        whole = flash_partial(q, k[:, own], v[:, own], scale=scale)
    else:
        whole = _cudnn(q, k[:, own], v[:, own], is_causal=True, scale=scale)
    for piece in past_pieces(C - T - n_rest):
        whole = merged(whole, _cudnn(q, k[:, piece], v[:, piece], is_causal=False, scale=scale))
    return whole.out.flatten(1)


def past_pieces(n_cells: int) -> Iterator[slice]:
    """Cut a number of cells, a multiple of the unit, into powers of two of them, the largest first."""
    first = 0
    while first < n_cells:
        n = _UNIT_CELLS << ((n_cells - first) // _UNIT_CELLS).bit_length() - 1
        yield slice(first, first + n)
        first += n


CANDIDATES = (
    Candidate("cudnn", attend_cudnn, lambda n_queries, n_cells: n_queries > 0 and n_queries % _UNIT_QUERIES == 0),
    Candidate("torch_flash", attend_torch_flash, lambda n_queries, n_cells: True),
    Candidate("triton", flash, lambda n_queries, n_cells: True),
)


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float) -> Partial:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(*_batch(q, k, v), None, True, 0.0, is_causal, False, scale=scale)[:2]
    return Partial(_rows(out), lse.reshape(q.shape[1], q.shape[0]))


def _batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`[1, heads, positions, channels]`, views."""
    return q.transpose(0, 1)[None], k[None], v[None]


def _rows(out: torch.Tensor) -> torch.Tensor:
    """`[1, H, T, B]` as `[T, H, B]`."""
    return out[0].transpose(0, 1)
