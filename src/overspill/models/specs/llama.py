"""Llama and Mixtral: interleaved rotary pairs, dense or softmax-routed experts, optional Llama 3 frequency factors."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import (
    attention_tensors,
    dense_biases,
    dense_tensors,
    expert_tensors,
    global_tensors,
    output_bias,
    qkv_biases,
)


def read_hparams(keys: Keys) -> HParams:
    """Llama's keys are the common ones."""
    return base.read_hparams(keys)


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = [*global_tensors(hp), TensorSpec("rope_freqs.weight", (hp.rope.n_rot // 2,), is_required=False)]
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + qkv_biases(hp, i, is_required=False)
        specs.append(output_bias(hp, i, is_required=False))
        specs += expert_tensors(hp, i) if hp.is_moe(i) else dense_tensors(hp, i) + dense_biases(hp, i)
    return specs
