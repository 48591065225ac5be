"""Qwen3.5, dense: Qwen3-Next's layers with a plain feed-forward; decay and strength have matrices of their own.

For text all axes of the rotation have one position, so it is the common one.
"""

from __future__ import annotations

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import dense_tensors, global_tensors, head_norms
from overspill.models.specs.qwen3next import FFN_NORM, moe_tensors, with_delta
from overspill.models.specs.recurrent import DeltaHParams, delta_tensors, gated_attention_tensors


def read_hparams(keys: Keys) -> DeltaHParams:
    """The common keys, and which layers have the delta rule."""
    hp = base.read_hparams(keys)
    return with_delta(hp, keys.scoped(hp.arch), is_tiled=True)


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture, with experts or without."""
    assert isinstance(hp, DeltaHParams)
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        if hp.is_recurrent[i]:
            specs += delta_tensors(hp, hp.delta, i)
            specs += [
                TensorSpec(f"blk.{i}.{name}.weight", (hp.delta.n_heads, hp.n_embd))
                for name in ("ssm_alpha", "ssm_beta")
            ]
        else:
            specs += gated_attention_tensors(hp, i) + head_norms(hp, i)
        specs += moe_tensors(hp, i) if hp.is_moe(i) else dense_tensors(hp, i, norm=FFN_NORM)
    return specs
