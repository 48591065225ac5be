"""gpt-oss: sliding windows in every other layer, attention sinks, biases everywhere, a clamped activation."""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import attention_tensors, expert_tensors, global_tensors, output_bias, qkv_biases
from overspill.models.specs.router import Gating
from overspill.models.specs.sliding import SlidingHParams, read_windows, window_rope

FFN_NORM = "post_attention_norm"


def read_hparams(keys: Keys) -> SlidingHParams:
    """The first of two layers has a window; both kinds rotate alike unless the file has a base for the windows."""
    hp = require_experts(base.read_hparams(keys, gating=Gating.SOFTMAX_OF_CHOSEN, is_normalised=False))
    a = keys.scoped(hp.arch)
    n_window, is_windowed = read_windows(a, hp.n_layer, period=2)
    return SlidingHParams(
        **vars(hp), n_window=n_window, is_windowed=is_windowed, rope_window=window_rope(a, hp.rope, hp.rope.base)
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp, is_tied=False)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + qkv_biases(hp, i, is_required=True)
        specs += [output_bias(hp, i, is_required=True), TensorSpec(f"blk.{i}.attn_sinks.weight", (hp.n_head,))]
        specs += expert_tensors(hp, i, norm=FFN_NORM) + _expert_biases(hp, i)
    return specs


def _expert_biases(hp: HParams, i_layer: int) -> list[TensorSpec]:
    b, E, F = f"blk.{i_layer}.", hp.n_expert, hp.n_ff_exp
    return [
        TensorSpec(b + "ffn_gate_inp.bias", (E,)),
        TensorSpec(b + "ffn_gate_exps.bias", (E, F)),
        TensorSpec(b + "ffn_up_exps.bias", (E, F)),
        TensorSpec(b + "ffn_down_exps.bias", (E, hp.n_embd)),
    ]
