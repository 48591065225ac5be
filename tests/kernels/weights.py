"""Random weights of any tensor type: random bytes with sane scales, so that products stay finite."""

from __future__ import annotations

import numpy as np
import torch

from overspill.gguf.types import TensorType
from overspill.quant.qtensor import QTensor

_T = TensorType
# Byte offsets of the f16 scales in a block.
_SCALES = {
    _T.Q4_0: (0,),
    _T.Q4_1: (0, 2),
    _T.Q5_0: (0,),
    _T.Q5_1: (0, 2),
    _T.Q8_0: (0,),
    _T.IQ4_NL: (0,),
    _T.Q2_K: (80, 82),
    _T.Q3_K: (108,),
    _T.Q4_K: (0, 2),
    _T.Q5_K: (0, 2),
    _T.Q6_K: (208,),
    _T.IQ4_XS: (0,),
    _T.Q1_0: (0,),
    _T.Q2_0: (0,),
    _T.TQ1_0: (52,),
    _T.TQ2_0: (64,),
    _T.IQ2_XXS: (0,),
    _T.IQ2_XS: (0,),
    _T.IQ2_S: (0,),
    _T.IQ3_XXS: (0,),
    _T.IQ3_S: (0,),
    _T.IQ1_S: (0,),
}


def random_weight(type: TensorType, shape: tuple[int, ...], *, seed: int = 0) -> QTensor:
    """A weight of `shape`; plain floats are normal, block types have random quants and scales of about 1e-3."""
    random = np.random.default_rng(seed)
    n_values = int(np.prod(shape))
    if type in (_T.F32, _T.F16, _T.BF16):
        dtype = {_T.F32: torch.float32, _T.F16: torch.float16, _T.BF16: torch.bfloat16}[type]
        values = torch.from_numpy(random.standard_normal(n_values).astype(np.float32))
        return QTensor.from_bytes(values.to(dtype).view(torch.uint8), type, shape)
    n_blocks = n_values // type.block.n_elements
    blocks = random.integers(0, 256, size=(n_blocks, type.block.n_bytes), dtype=np.uint8)
    for at in _SCALES.get(type, ()):
        scales = random.uniform(0.0005, 0.002, size=(n_blocks, 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if type == _T.MXFP4:
        blocks[:, 0] = random.integers(118, 122, size=n_blocks)
    if type == _T.NVFP4:
        blocks[:, :4] = random.integers(0, 48, size=(n_blocks, 4))
    if type == _T.IQ1_M:  # the top nibbles of the last two scale words are those of the f16 scale
        blocks[:, 53] = blocks[:, 53] & 15 | 0x40
        blocks[:, 55] = blocks[:, 55] & 15 | 0x10
    return QTensor.from_bytes(torch.from_numpy(blocks.reshape(-1)), type, shape)
