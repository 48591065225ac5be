"""Qwen1.5-MoE and Qwen2-MoE: biases on query, key and value; a shared expert behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import (
    attention_tensors,
    expert_tensors,
    global_tensors,
    qkv_biases,
    shared_gate,
    shared_tensors,
)


def read_hparams(keys: Keys) -> HParams:
    """Widths of routed and shared experts default to shares of the dense width."""
    hp = require_experts(base.read_hparams(keys, is_normalised=False))
    a = keys.scoped(hp.arch)
    return replace(
        hp,
        n_ff_exp=a.u32("expert_feed_forward_length", default=0) or hp.n_ff // hp.n_expert_used,
        n_ff_shared=a.u32("expert_shared_feed_forward_length", default=0) or hp.n_ff,
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + qkv_biases(hp, i, is_required=True) + expert_tensors(hp, i)
        specs += [*shared_tensors(hp, i), shared_gate(hp, i)]
    return specs
