"""Llama 4, its text: chunked attention with rotation in three of four layers, full without it in the fourth; one expert
of many for each token, and a shared one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec, require_experts
from overspill.models.specs.parts import (
    attention_tensors,
    dense_tensors,
    expert_tensors,
    global_tensors,
    shared_tensors,
)
from overspill.models.specs.rope import RopeParams
from overspill.models.specs.router import Gating

_PERIOD = 4
_CHUNK = 8192
_N_EXPERT_NOT_NORMED = 128


@dataclass(frozen=True, kw_only=True)
class Llama4HParams(HParams):
    """moe_step: every so many layers, the last has experts. n_chunk: positions of a chunk, None = no chunks.

    Layers without rotation see all positions. is_normed: whether rotated heads are normed.
    """

    moe_step: int
    n_chunk: int | None
    is_normed: bool

    def is_moe(self, i_layer: int) -> bool:
        """Whether the layer has routed experts."""
        return (i_layer + 1) % self.moe_step == 0

    def is_rotated(self, i_layer: int) -> bool:
        """Whether the layer rotates queries and keys."""
        return self.n_chunk is None or (i_layer + 1) % _PERIOD != 0

    def rope_of(self, i_layer: int) -> RopeParams | None:
        """The common rotation, in three of four layers."""
        return self.rope if self.is_rotated(i_layer) else None

    def chunk(self, i_layer: int) -> int | None:
        """A token sees those before it in its own chunk of so many positions; None: all."""
        return self.n_chunk if self.is_rotated(i_layer) else None

    def reach(self, i_layer: int) -> int | None:
        """The last of a chunk sees all of it."""
        return self.chunk(i_layer)


def read_hparams(keys: Keys) -> Llama4HParams:
    """Chunks and temperature are not in the files; `attention.sliding_window` = 0 means there are none."""
    hp = require_experts(base.read_hparams(keys, gating=Gating.SIGMOID, is_normalised=False))
    a = keys.scoped(hp.arch)
    if hp.n_expert_used != 1:
        name = a.full_name("expert_used_count")
        raise UserError(f"{name} is {hp.n_expert_used}: only 1 is supported, as in all models of this architecture")
    return Llama4HParams(
        **vars(replace(hp, n_ff_shared=hp.n_ff_exp)),
        moe_step=base.at_least_one(a, "interleave_moe_layer_step"),
        n_chunk=None if a.u32("attention.sliding_window", default=_CHUNK) == 0 else _CHUNK,
        is_normed=hp.n_expert != _N_EXPERT_NOT_NORMED,
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = [*global_tensors(hp), TensorSpec("rope_freqs.weight", (hp.rope.n_rot // 2,), is_required=False)]
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i)
        specs += [*expert_tensors(hp, i), *shared_tensors(hp, i)] if hp.is_moe(i) else dense_tensors(hp, i)
    return specs
