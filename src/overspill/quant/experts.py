"""The one seam through which a model sees its routed experts.

Resident, staged and cached experts differ only in where the stacked parts lie and which experts they hold; a kernel
takes an `ExpertWeights` and adds the contribution of the experts that are present, in ascending expert id, so the
sum of a token does not depend on how its experts were cut into slabs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from overspill.quant.qtensor import QTensor

GATE: Final = 0
UP: Final = 1
DOWN: Final = 2
Vectors = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
_NO_VECTORS: Vectors = (None, None, None)
NO_LIMIT: Final = float(np.finfo(np.float32).max)


class Activation(StrEnum):
    """What stands between the two halves of a gated feed-forward."""

    SILU = "silu"
    SWIGLU_OAI = "swiglu_oai"


@dataclass(frozen=True, eq=False)
class ExpertVectors:
    """What a layer's products with expert matrices are multiplied by, and then added to; of all its experts, by id.

    Each of gate, up and down; None where the file has none. biases: float32 `[E, F]`, `[E, F]`, `[E, D]`.
    scales: float32 `[E]`. They are small, so they lie wherever their layer's experts are computed.
    limit: before the activation `SILU`, gates are at most so large, and their other halves within it either way.
    """

    biases: Vectors = _NO_VECTORS
    scales: Vectors = _NO_VECTORS
    limit: float = NO_LIMIT

    @property
    def is_empty(self) -> bool:
        """Whether the experts are their matrices alone."""
        return all(vector is None for vector in (*self.biases, *self.scales))


NO_VECTORS: Final = ExpertVectors()


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Stacked expert matrices of one layer, or of a part of its experts.

    gate, up: `[E', F, D]`. down: `[E', D, F]`. slot_of: int32 `[E]`, the row of each expert of the layer in the
    stack or -1 when it is not here; None when the stack holds all experts in order. A tensor on the device where the
    host does not know it.
    n_slices: how many equal slices of the hidden width an expert consists of. With more than one, each has a slot of
    its own: slice i of expert e is what `slot_of` calls `e n_slices + i`, and F is a slice's. Only without vectors.
    """

    gate: QTensor
    up: QTensor
    down: QTensor
    slot_of: npt.NDArray[np.int32] | torch.Tensor | None = None
    vectors: ExpertVectors = NO_VECTORS
    n_slices: int = 1

    @property
    def parts(self) -> tuple[QTensor, QTensor, QTensor]:
        """The three stacks in the order of `GATE`, `UP`, `DOWN`."""
        return self.gate, self.up, self.down


def sliced(ids: torch.Tensor, mix: torch.Tensor, n_slices: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights `[T, K n_slices]` of the slices of experts, for kernels to which each is an expert."""
    if n_slices == 1:
        return ids, mix
    slices = torch.arange(n_slices, dtype=ids.dtype, device=ids.device)
    ids = (ids[:, :, None] * n_slices + slices).flatten(1)
    return ids, mix.repeat_interleave(n_slices, dim=1)
