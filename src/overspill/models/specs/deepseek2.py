"""DeepSeek-V2, V3, R1, Kimi-K2: latent attention, dense first layers, shared experts, experts chosen by groups.

A position is kept as one latent vector and one rotated key for all heads; what makes keys and values of a latent is
applied to queries and outputs instead (arXiv:2405.04434).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from overspill.cache.cells import KvShape
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import dense_tensors, expert_tensors, global_tensors, router_bias, shared_tensors
from overspill.models.specs.router import Gating

_GLM_FLASH = ((47, 48), 154880)  # layers and vocabulary of files that route by sigmoid without saying so


@dataclass(frozen=True, kw_only=True)
class LatentHParams(HParams):
    """n_latent: values of a latent. n_latent_q: of the queries' latent, 0 = none. k_dim: channels of a query head.

    The last `rope.n_rot` of `k_dim` are rotated. v_dim: channels of a value head. attention_scale: of q k^T.
    head_dim and value_dim are those of the cache.
    """

    n_latent: int
    n_latent_q: int
    k_dim: int
    v_dim: int
    attention_scale: float

    @property
    def n_plain(self) -> int:
        """Channels of a query head that are not rotated."""
        return self.k_dim - self.rope.n_rot

    def kv_shape(self, i_layer: int) -> KvShape:
        """One latent and one rotated key for all heads; the latent is the value."""
        return KvShape(1, self.n_latent + self.rope.n_rot, self.n_latent, has_values=False)


def read_hparams(keys: Keys) -> LatentHParams:
    """Newer files give the sizes of heads under `*_length_mla`, older ones under the common names."""
    hp = require_experts(base.read_hparams(keys, is_normalised=False))
    a = keys.scoped(hp.arch)
    if "attention.temperature_scale" in a:
        raise UserError(f"{a.full_name('attention.temperature_scale')}: scaling by position is not supported")
    n_latent = base.at_least_one(a, "attention.kv_lora_rank")
    k_dim = a.u32("attention.key_length_mla", default=hp.head_dim)
    if k_dim <= hp.rope.n_rot:
        raise UserError(
            f"{a.full_name('attention.key_length_mla')} is {k_dim}: must be above rope.dimension_count, {hp.rope.n_rot}"
        )
    v_dim = a.u32("attention.value_length_mla", default=hp.value_dim)
    hp = _with_shared_experts(_with_router(hp, a), a)
    hp, magnitude = _with_magnitude(hp, a)
    return LatentHParams(
        **vars(replace(hp, n_head_kv=1, head_dim=n_latent + hp.rope.n_rot, value_dim=n_latent)),
        n_latent=n_latent,
        n_latent_q=a.u32("attention.q_lora_rank", default=0),
        k_dim=k_dim,
        v_dim=v_dim,
        attention_scale=magnitude**2 / math.sqrt(k_dim),
    )


def _with_router(hp: HParams, a: Keys) -> HParams:
    """V2 takes the best expert of a group for the group's worth, V3 (sigmoid) the best two (arXiv:2412.19437)."""
    assert hp.router is not None
    layers, n_vocab = _GLM_FLASH
    is_unsaid = a.u32("expert_gating_func", default=0) == 0 and hp.n_layer in layers and hp.n_vocab == n_vocab
    gating = Gating.SIGMOID if is_unsaid else hp.router.gating
    return replace(hp, router=replace(hp.router, gating=gating, n_best=1 if gating is Gating.SOFTMAX else 2))


def _with_shared_experts(hp: HParams, a: Keys) -> HParams:
    return replace(hp, n_ff_shared=hp.n_ff_exp * a.u32("expert_shared_count"))


def _with_magnitude(hp: HParams, a: Keys) -> tuple[HParams, float]:
    """YaRN's attention temperature as a factor on queries and on keys, rotated or not, instead of on the rotation.

    `rope.scaling.yarn_log_multiplier` is 0.1 times the original `mscale_all_dim`; without it nothing changes.
    """
    multiplier = a.f32("rope.scaling.yarn_log_multiplier", default=0.0)
    if hp.rope.scaling != "yarn" or multiplier == 0.0:
        return hp, 1.0
    magnitude = hp.rope.attn_factor * (1.0 + multiplier * math.log(hp.rope.factor))
    return replace(hp, rope=replace(hp.rope, attn_factor=1.0, log_multiplier=0.0)), magnitude


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    assert isinstance(hp, LatentHParams)
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += latent_tensors(hp, i)
        if hp.is_moe(i):
            specs += [*expert_tensors(hp, i), router_bias(hp, i), *shared_tensors(hp, i)]
        else:
            specs += dense_tensors(hp, i)
    return specs


def latent_tensors(hp: LatentHParams, i_layer: int) -> list[TensorSpec]:
    """Latent attention and the norm before it."""
    b, D, H, L = f"blk.{i_layer}.", hp.n_embd, hp.n_head, hp.n_latent
    return [
        TensorSpec(b + "attn_norm.weight", (D,)),
        *_queries(hp, b),
        TensorSpec(b + "attn_kv_a_mqa.weight", (L + hp.rope.n_rot, D)),
        TensorSpec(b + "attn_kv_a_norm.weight", (L,)),
        TensorSpec(b + "attn_k_b.weight", (H, L, hp.n_plain)),
        TensorSpec(b + "attn_v_b.weight", (H, hp.v_dim, L)),
        TensorSpec(b + "attn_output.weight", (D, H * hp.v_dim)),
    ]


def _queries(hp: LatentHParams, b: str) -> list[TensorSpec]:
    q_dim = hp.n_head * hp.k_dim
    if not hp.n_latent_q:
        return [TensorSpec(b + "attn_q.weight", (q_dim, hp.n_embd))]
    return [
        TensorSpec(b + "attn_q_a.weight", (hp.n_latent_q, hp.n_embd)),
        TensorSpec(b + "attn_q_a_norm.weight", (hp.n_latent_q,)),
        TensorSpec(b + "attn_q_b.weight", (q_dim, hp.n_latent_q)),
    ]
