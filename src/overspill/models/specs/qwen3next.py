"""Qwen3-Next: three of four layers with the gated delta rule, the fourth with gated attention; experts, one shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import expert_tensors, global_tensors, head_norms, shared_gate, shared_tensors
from overspill.models.specs.recurrent import (
    DeltaHParams,
    delta_tensors,
    gated_attention_tensors,
    read_delta,
    read_recurrent_layers,
)

FFN_NORM: Final = "post_attention_norm"


def read_hparams(keys: Keys, *, is_tiled: bool = False) -> DeltaHParams:
    """The width of the shared expert defaults to the dense width. is_tiled: see `read_delta`."""
    hp = require_experts(base.read_hparams(keys))
    a = keys.scoped(hp.arch)
    n_ff_shared = a.u32("expert_shared_feed_forward_length", default=0) or hp.n_ff
    return with_delta(replace(hp, n_ff_shared=n_ff_shared), a, is_tiled=is_tiled)


def with_delta(hp: HParams, a: Keys, *, is_tiled: bool) -> DeltaHParams:
    """What the common keys say, and which layers have the delta rule."""
    delta = read_delta(a, is_tiled=is_tiled)
    return DeltaHParams(**vars(hp), delta=delta, is_recurrent=read_recurrent_layers(a, hp.n_layer))


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    assert isinstance(hp, DeltaHParams)
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        if hp.is_recurrent[i]:
            n_rows = 2 * hp.delta.n_heads
            specs += [*delta_tensors(hp, hp.delta, i), TensorSpec(f"blk.{i}.ssm_ba.weight", (n_rows, hp.n_embd))]
        else:
            specs += gated_attention_tensors(hp, i) + head_norms(hp, i)
        specs += moe_tensors(hp, i)
    return specs


def moe_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Routed experts, and a shared one behind a gate."""
    shared = [*shared_tensors(hp, i_layer), shared_gate(hp, i_layer)]
    return expert_tensors(hp, i_layer, norm=FFN_NORM) + shared
