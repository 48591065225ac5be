"""Qwen3-MoE: Qwen3's attention, every layer with softmax-routed experts whose weights are renormalised."""

from __future__ import annotations

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models import base, qwen3
from overspill.models.base import HParams, TensorSpec
from overspill.models.transformer import attention_tensors, expert_tensors, global_tensors, head_norms


def read_hparams(keys: Keys) -> HParams:
    """The common keys; experts are required."""
    hp = base.read_hparams(keys)
    if hp.n_expert == 0:
        raise UserError(f"{hp.arch}.expert_count is 0 or missing: this architecture has experts in every layer")
    return hp


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + head_norms(hp, i) + expert_tensors(hp, i)
    return specs


class Model(qwen3.Model):
    """Qwen3 with experts."""
