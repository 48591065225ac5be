"""CPU kernels: products with quantised weights, compiled by Numba from vector IR at first use.

Weights are read as they are stored. Where the CPU multiplies bytes (VNNI), types that are bytes with a step meet
activations as three bytes each, in exact integer sums (`digits`); all others, and everything on other CPUs, are decoded
to float32 in registers or in the nearest cache. A result depends on its own token and row only: not on the other tokens
of the batch, nor on threads, nor on how a layer's experts were divided into calls.

Threads: a call uses `numba.get_num_threads()` threads of the OpenMP layer, and any number of Python threads may
call at once (Numba's other built-in layer, workqueue, would not allow that).
"""

from __future__ import annotations

from numba import set_num_threads

from overspill.gguf.types import TensorType
from overspill.kernels.numba.attend import attend_few
from overspill.kernels.numba.decode import DECODERS
from overspill.kernels.numba.experts import PreparedExperts, TokenExperts, experts
from overspill.kernels.numba.jit import config
from overspill.kernels.numba.matmul import add_matmul, matmul, matmuls
from overspill.kernels.numba.one_token import TokenAttention, TokenRouter
from overspill.kernels.numba.pick import pick_experts
from overspill.kernels.numba.rows import norm_rows, prepare_heads
from overspill.kernels.numba.target import UNIT_ELEMENTS

if config.THREADING_LAYER == "default":
    config.THREADING_LAYER = "omp"

__all__ = [
    "UNIT_ELEMENTS",
    "PreparedExperts",
    "TokenAttention",
    "TokenExperts",
    "TokenRouter",
    "add_matmul",
    "attend_few",
    "experts",
    "has_kernel",
    "matmul",
    "matmuls",
    "norm_rows",
    "pick_experts",
    "prepare_heads",
    "use_threads",
]


def has_kernel(type: TensorType) -> bool:
    """Whether `matmul` and `experts` can read weights of this type."""
    return type in DECODERS


def use_threads(n_threads: int) -> None:
    """Threads that calls from the calling thread use; at most as many as Numba was started with."""
    set_num_threads(min(n_threads, config.NUMBA_NUM_THREADS))
