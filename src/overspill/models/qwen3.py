"""Qwen3, dense: an RMS norm on each query and key head before rotation."""

from __future__ import annotations

import torch

from overspill.gguf.keys import Keys
from overspill.models import base
from overspill.models.base import Block, HParams, TensorSpec
from overspill.models.transformer import Transformer, attention_tensors, dense_tensors, global_tensors, head_norms


def read_hparams(keys: Keys) -> HParams:
    """Qwen3's keys are the common ones."""
    return base.read_hparams(keys)


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + head_norms(hp, i) + dense_tensors(hp, i)
    return specs


class Model(Transformer):
    """The plain decoder with normed heads."""

    def norm_heads(self, block: Block, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.hparams.rms_eps
        return (
            block.ops.rms_norm(q, block.vector("attn_q_norm"), eps),
            block.ops.rms_norm(k, block.vector("attn_k_norm"), eps),
        )
