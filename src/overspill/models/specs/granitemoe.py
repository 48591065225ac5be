"""Granite MoE: Llama's attention, with factors on embeddings, attention, residuals and logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import attention_tensors, expert_tensors, global_tensors, output_bias, shared_tensors
from overspill.models.specs.rope import RopeParams


@dataclass(frozen=True, kw_only=True)
class GraniteHParams(HParams):
    """Factors: embedding_scale and residual_scale multiply, logit_scale divides; attention_scale: of q k^T."""

    embedding_scale: float
    residual_scale: float
    attention_scale: float
    logit_scale: float
    is_rotated: bool

    def rope_of(self, i_layer: int) -> RopeParams | None:
        """The common rotation, unless the model was made without positions."""
        return self.rope if self.is_rotated else None


def read_hparams(keys: Keys) -> GraniteHParams:
    """The common keys and the factors; 0 stands for none. The residual factor also weighs the routed experts."""
    hp = require_experts(base.read_hparams(keys))
    a = keys.scoped(hp.arch)
    residual_scale = a.f32("residual_scale", default=1.0) or 1.0
    logit_scale = a.f32("logit_scale")
    if logit_scale == 0.0:
        raise UserError(f"{a.full_name('logit_scale')} is 0: logits cannot be divided by it")
    assert hp.router is not None
    hp = replace(
        hp,
        router=replace(hp.router, scale=hp.router.scale * residual_scale),
        n_ff_shared=a.u32("expert_shared_feed_forward_length", default=0),
    )
    return GraniteHParams(
        **vars(hp),
        embedding_scale=a.f32("embedding_scale", default=1.0) or 1.0,
        residual_scale=residual_scale,
        attention_scale=a.f32("attention.scale", default=0.0) or hp.head_dim**-0.5,
        logit_scale=logit_scale,
        is_rotated=a.flag("rope.scaling.finetuned", default=True),
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture; some models have a shared expert."""
    specs = [*global_tensors(hp), TensorSpec("rope_freqs.weight", (hp.rope.n_rot // 2,), is_required=False)]
    for i in range(hp.n_layer):
        specs += [*attention_tensors(hp, i), output_bias(hp, i, is_required=False), *expert_tensors(hp, i)]
        specs += shared_tensors(hp, i) if hp.n_ff_shared else []
    return specs
