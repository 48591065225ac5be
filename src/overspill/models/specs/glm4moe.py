"""GLM-4.5 and its kin: dense first layers, sigmoid routing with a bias for the choice, one or more shared experts."""

from __future__ import annotations

from dataclasses import replace

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import (
    attention_tensors,
    dense_tensors,
    expert_tensors,
    global_tensors,
    head_norms,
    qkv_biases,
    router_bias,
    shared_tensors,
)
from overspill.models.specs.router import Gating

FFN_NORM = "post_attention_norm"


def read_hparams(keys: Keys) -> HParams:
    """Shared experts are counted, each as wide as a routed one."""
    hp = require_experts(base.read_hparams(keys, gating=Gating.SIGMOID))
    return replace(hp, n_ff_shared=hp.n_ff_exp * keys.scoped(hp.arch).u32("expert_shared_count"))


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture; the larger models norm their heads."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + qkv_biases(hp, i, is_required=False)
        specs += head_norms(hp, i, is_required=False)
        if hp.is_moe(i):
            specs += [*expert_tensors(hp, i, norm=FFN_NORM), router_bias(hp, i), *shared_tensors(hp, i)]
        else:
            specs += dense_tensors(hp, i, norm=FFN_NORM)
    return specs
