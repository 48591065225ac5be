"""Qwen2 and Qwen2.5, dense: biases on the query, key and value projections."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import attention_tensors, dense_tensors, global_tensors, qkv_biases


def read_hparams(keys: Keys) -> HParams:
    """Qwen2's keys are the common ones."""
    return base.read_hparams(keys)


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = [*global_tensors(hp), TensorSpec("output.bias", (hp.n_vocab,), is_required=False)]
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + qkv_biases(hp, i, is_required=True) + dense_tensors(hp, i)
    return specs
