"""Qwen3.5 with experts, one of them shared."""

from __future__ import annotations

from overspill.models.specs.qwen3next import read_hparams
from overspill.models.specs.qwen35 import tensors

__all__ = ["read_hparams", "tensors"]
