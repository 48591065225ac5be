"""From an architecture's tensors to what placement wants to know: bytes, roles, and FLOPs per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from overspill.gguf.tensors import TensorInfo
from overspill.models.specs.base import HParams, TensorSpec
from overspill.placement.shape import ModelShape, Role, role_of, sized_tensors

KV_VALUE_BYTES = 4


def model_shape(name: str, hp: HParams, specs: Sequence[TensorSpec], tensors: Mapping[str, TensorInfo]) -> ModelShape:
    """Sizes and costs of a model from the tensors it loads.

    A product of a `[N, K]` weight with one token takes 2 N K FLOP; of routed experts a token meets K of E. Keys and
    values are float32.
    """
    flops = [0.0] * hp.n_layer
    for spec in specs:
        role, i_layer = role_of(spec.name)
        if i_layer is not None and len(spec.shape) > 1:
            share = hp.n_expert_used / hp.n_expert if role is Role.EXPERT else 1.0
            flops[i_layer] += 2.0 * prod(spec.shape) * share
    sizes = ((spec.name, tensors[spec.name].n_bytes) for spec in specs)
    return ModelShape(
        name=name,
        arch=hp.arch,
        n_layer=hp.n_layer,
        n_embd=hp.n_embd,
        n_vocab=hp.n_vocab,
        n_expert=hp.n_expert,
        n_expert_used=hp.n_expert_used,
        n_ctx_train=hp.n_ctx_train,
        tensors=sized_tensors(sizes, n_layer=hp.n_layer),
        kv_bytes_per_cell=(2 * hp.kv_dim * KV_VALUE_BYTES,) * hp.n_layer,
        state_bytes=(0,) * hp.n_layer,
        flops_per_token=tuple(flops),
        attention_flops=(4.0 * hp.n_head * hp.head_dim,) * hp.n_layer,
        output_flops=2.0 * hp.n_vocab * hp.n_embd,
    )
