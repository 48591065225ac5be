"""What the kernels are shaped for: the vector width and tile sizes of the CPU that runs them.

Everything here is a constant of the process, read from the same feature list that Numba compiles for (so that
NUMBA_CPU_FEATURES and NUMBA_CPU_NAME steer the kernels as well). The code is right for any width on any CPU, as
LLVM splits vectors that are too wide; a wrong width only costs speed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import llvmlite.binding as llvm

from overspill.kernels.numba.jit import config


def _features() -> frozenset[str]:
    text = config.CPU_FEATURES
    if text is None:
        return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)
    return frozenset(item[1:] for item in text.split(",") if item.startswith("+"))


def _source_digest() -> int:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


FEATURES = _features()
HAS_AVX512 = "avx512f" in FEATURES
HAS_AVX2 = "avx2" in FEATURES
# Products of bytes, four to a lane and instruction (VNNI): types of weights that are bytes with a step go this way.
HAS_BYTE_PRODUCTS = {"avx512vnni", "avx512bw", "avx512vl"} <= FEATURES
# Products of bytes in pairs, a few of which can be added up in 16 bits: the same types go this way, but for Q8_0, whose
# sums do not fit: with one token it would be a fifth faster so, with many a third slower than in float32.
HAS_PAIR_PRODUCTS = {"avx2", "f16c"} <= FEATURES and not HAS_AVX512
# float32 lanes of a vector: one AVX-512 register, one AVX2 register, two NEON or SSE registers.
LANES = 16 if HAS_AVX512 else 8
# Register tiles: 8 x 3 of 32 registers, or 4 x 3 of 16, hold the sums; the rest holds the operands.
TILE_ROWS = 8 if HAS_AVX512 else 4
TILE_TOKENS = 3
# The same for blocks decoded in registers: how many tokens share one decoding, and of how many rows at a time.
DOT_TOKENS = (1, 2, 4, 8) if HAS_AVX512 else (1, 2, 4, 4)
DOT_ROWS = (4, 4, 4, 2) if HAS_AVX512 else (2, 2, 2, 2)
# Up to this many tokens, decoding in registers beats decoding into a scratch (measured; much the same for all types).
MAX_DOT_TOKENS = 20 if HAS_AVX512 else 8
# Tokens that share one pass over unpacked rows: three sums each, in 32 registers; 16 have room for those of one.
DIGIT_TOKENS = (1, 2, 4, 8) if HAS_BYTE_PRODUCTS else (1, 1, 1, 1)
# Tokens whose digits meet sixteen rows after sixteen rows: those of 2048 columns should fit in the second-level cache.
DIGIT_BLOCK_TOKENS = 96 if HAS_BYTE_PRODUCTS else 32
# What a thread takes of a matrix is a multiple of so many rows: whole tiles of every kernel.
TASK_ROWS = 16
# Rows of activations must be a multiple of this long: the smallest unit that a decoder handles.
UNIT_ELEMENTS = 32
# Numba's disk cache looks at one source file only: kernels close over this number, so that a change in any file
# of this package compiles them anew.
SOURCE_DIGEST = _source_digest()
