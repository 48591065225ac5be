"""CPU kernels: products with quantised weights, compiled by Numba from vector IR at first use.

Weights are read as they are stored. Types that are bytes with a step (on CPUs that multiply fours of bytes: VNNI) or
four bits with a step (pairs of bytes: AVX2) meet activations as three bytes each, in exact integer sums (`digits`); all
others are decoded to float32 in registers or in the nearest cache. A result depends on its own token and row only: not
on the other tokens of the batch, nor on threads, nor on how a layer's experts were divided into calls.

Threads: see `crew`. Any number of Python threads may call at once.
"""

from __future__ import annotations

from overspill.gguf.types import TensorType
from overspill.kernels.numba.attend import attend_few
from overspill.kernels.numba.crew import use_threads, use_threads_by_default
from overspill.kernels.numba.decode import DECODERS
from overspill.kernels.numba.experts import PreparedExperts, TokenExperts, experts
from overspill.kernels.numba.interleave import interleave
from overspill.kernels.numba.lookup import rows_of
from overspill.kernels.numba.matmul import add_matmul, matmul, matmuls
from overspill.kernels.numba.one_token import TokenRouter
from overspill.kernels.numba.panel import takes_digits
from overspill.kernels.numba.pick import pick_experts
from overspill.kernels.numba.pieces import Pieces
from overspill.kernels.numba.rows import norm_rows, prepare_heads
from overspill.kernels.numba.target import UNIT_ELEMENTS
from overspill.kernels.numba.token_layers import TokenLayers

__all__ = [
    "UNIT_ELEMENTS",
    "Pieces",
    "PreparedExperts",
    "TokenExperts",
    "TokenLayers",
    "TokenRouter",
    "add_matmul",
    "attend_few",
    "experts",
    "has_kernel",
    "interleave",
    "matmul",
    "matmuls",
    "norm_rows",
    "pick_experts",
    "prepare_heads",
    "rows_of",
    "takes_digits",
    "use_threads",
    "use_threads_by_default",
]


def has_kernel(type: TensorType) -> bool:
    """Whether `matmul` and `experts` can read weights of this type."""
    return type in DECODERS
