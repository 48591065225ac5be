"""OLMoE: queries and keys normed over all heads at once; weights of experts are not made to sum to 1."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import attention_tensors, expert_tensors, global_tensors, whole_norms


def read_hparams(keys: Keys) -> HParams:
    """The common keys; experts are required."""
    return require_experts(base.read_hparams(keys, is_normalised=False))


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp, is_tied=False)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + whole_norms(hp, i) + expert_tensors(hp, i)
    return specs
