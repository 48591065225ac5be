"""Qwen3, dense: an RMS norm on each query and key head before rotation."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import attention_tensors, dense_tensors, global_tensors, head_norms


def read_hparams(keys: Keys) -> HParams:
    """Qwen3's keys are the common ones."""
    return base.read_hparams(keys)


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + head_norms(hp, i) + dense_tensors(hp, i)
    return specs
