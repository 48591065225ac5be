"""Kimi-Linear: Kimi Delta Attention, whose decay is each channel's own, in most layers (arXiv:2510.26692); latent
attention without positions in the others; experts as in DeepSeek-V3."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.deepseek2 import LatentHParams, latent_tensors
from overspill.models.specs.parts import dense_tensors, expert_tensors, global_tensors, router_bias, shared_tensors
from overspill.models.specs.recurrent import DeltaHParams, DeltaParams, read_taps
from overspill.models.specs.rope import RopeParams
from overspill.models.specs.router import Gating


@dataclass(frozen=True, kw_only=True)
class KimiHParams(DeltaHParams, LatentHParams):
    """The delta rule in some layers, latents in the others."""

    def rope_of(self, i_layer: int) -> RopeParams | None:
        """Nothing is rotated: the delta rule tells positions apart."""
        return None


def read_hparams(keys: Keys) -> KimiHParams:
    """Layers with the delta rule are those that have no kv heads."""
    a = keys.scoped(keys.arch)
    hp = require_experts(base.read_hparams(keys, gating=Gating.SIGMOID, n_head_kv=1))
    n_kv = a.per_layer("attention.head_count_kv", a.u32("block_count"))[: hp.n_layer]
    n_latent, k_dim = base.at_least_one(a, "attention.kv_lora_rank"), a.u32("attention.key_length_mla")
    if k_dim <= hp.rope.n_rot:
        raise UserError(
            f"{a.full_name('attention.key_length_mla')} is {k_dim}: must be above rope.dimension_count, {hp.rope.n_rot}"
        )
    n_ff_shared = hp.n_ff_exp * a.u32("expert_shared_count")
    head_dim = n_latent + hp.rope.n_rot
    return KimiHParams(
        **vars(replace(hp, head_dim=head_dim, value_dim=n_latent, n_ff_shared=n_ff_shared)),
        n_latent=n_latent,
        n_latent_q=a.u32("attention.q_lora_rank", default=0),
        k_dim=k_dim,
        v_dim=base.at_least_one(a, "attention.value_length_mla"),
        attention_scale=1.0 / math.sqrt(k_dim),
        delta=DeltaParams(
            n_heads=hp.n_head,
            n_key_heads=hp.n_head,
            head_dim=base.at_least_one(a, "kda.head_dim"),
            n_taps=read_taps(a),
            n_adjacent=1,
        ),
        is_recurrent=tuple(n == 0 for n in n_kv),
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    assert isinstance(hp, KimiHParams)
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += _delta_tensors(hp, i) if hp.is_recurrent[i] else latent_tensors(hp, i)
        if hp.is_moe(i):
            specs += [*expert_tensors(hp, i), router_bias(hp, i), *shared_tensors(hp, i)]
        else:
            specs += dense_tensors(hp, i)
    return specs


def _delta_tensors(hp: KimiHParams, i_layer: int) -> list[TensorSpec]:
    b, D, A, N = f"blk.{i_layer}.", hp.n_embd, hp.delta.head_dim, hp.delta.value_dim
    specs = [TensorSpec(b + "attn_norm.weight", (D,))]
    for part in "qkv":
        specs.append(TensorSpec(f"{b}attn_{part}.weight", (N, D)))
        specs.append(TensorSpec(f"{b}ssm_conv1d_{part}.weight", (N, hp.delta.n_taps)))
    for part in "fg":  # of the decay, of the gate
        specs.append(TensorSpec(f"{b}ssm_{part}_a.weight", (A, D)))
        specs.append(TensorSpec(f"{b}ssm_{part}_b.weight", (N, A)))
    return [
        *specs,
        TensorSpec(b + "ssm_a", (hp.delta.n_heads,)),
        TensorSpec(b + "ssm_dt.bias", (N,)),
        TensorSpec(b + "ssm_beta.weight", (hp.delta.n_heads, D)),
        TensorSpec(b + "ssm_norm.weight", (A,)),
        TensorSpec(b + "attn_output.weight", (D, N)),
    ]
