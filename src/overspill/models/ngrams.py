"""Rows of a table of n-grams for tokens: hashes of a token and those before it.

Computed on the host, where the table is: only the rows that are asked for are read.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.models.specs.qwen4exp import NGramParams

U64 = NDArray[np.uint64]


def table_rows(ids: torch.Tensor, before: torch.Tensor, p: NGramParams) -> torch.Tensor:
    """Rows of each token `[T, hashes]`, int64. ids: `[T]`; before: `[T, n - 1]`, the nearest first, -1 for none.

    The hash of an n-gram is the exclusive or of its tokens, each times the multiplier of its place, modulo 2^64.
    Looking back stops at the end of a text: that token, and whatever is before it, counts as the end of a text.
    """
    grams = torch.cat([ids[:, None], before], 1).numpy().astype(np.int64)
    is_end = (grams[:, 1:] == p.eos) | (grams[:, 1:] < 0)
    grams[:, 1:][np.logical_or.accumulate(is_end, 1)] = p.eos
    products: U64 = grams.astype(np.uint64) * np.array(p.multipliers, np.uint64)
    mixed: U64 = np.bitwise_xor.accumulate(products, 1)[:, 1:]  # of the 2-gram, the 3-gram ..
    sizes, offsets = (np.array(values, np.uint64).reshape(p.n_tokens - 1, -1) for values in (p.sizes, p.offsets))
    rows: U64 = mixed[:, :, None] % sizes + offsets
    return torch.from_numpy(rows.reshape(len(grams), -1).astype(np.int64))
