"""The one seam through which a model sees its routed experts.

Resident, staged and cached experts differ only in where the stacked parts lie and which experts they hold; a kernel
takes an `ExpertWeights` and adds the contribution of the experts that are present, in ascending expert id, so the
sum of a token does not depend on how its experts were cut into slabs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from overspill.quant.qtensor import QTensor


class Activation(StrEnum):
    """What stands between the two halves of a gated feed-forward."""

    SILU = "silu"


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Stacked expert matrices of one layer, or of a part of its experts.

    gate, up: `[E', F, D]`. down: `[E', D, F]`. slot_of: int32 `[E]`, the row of each expert of the layer in the
    stack or -1 when it is not here; None when the stack holds all experts in order.
    """

    gate: QTensor
    up: QTensor
    down: QTensor
    slot_of: npt.NDArray[np.int32] | None = None
