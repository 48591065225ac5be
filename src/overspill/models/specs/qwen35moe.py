"""Qwen3.5 with experts, one of them shared."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import qwen3next
from overspill.models.specs.qwen35 import tensors
from overspill.models.specs.recurrent import DeltaHParams

__all__ = ["read_hparams", "tensors"]


def read_hparams(keys: Keys) -> DeltaHParams:
    """Qwen3-Next's keys; value heads lie in Qwen3.5's order."""
    return qwen3next.read_hparams(keys, is_tiled=True)
