"""Gemma 3: windows in five of six layers, norms before and after each half of a layer, GELU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overspill.gguf.keys import Keys
from overspill.models.specs import base
from overspill.models.specs.base import HParams, TensorSpec
from overspill.models.specs.parts import attention_tensors, dense_tensors, global_tensors, head_norms
from overspill.models.specs.sliding import SlidingHParams, read_windows, window_rope

_N_LAYER_27B = 62


@dataclass(frozen=True, kw_only=True)
class GemmaHParams(SlidingHParams):
    """attention_scale: of q k^T. softcap: logits are squeezed into (-softcap, softcap), 0 = they are not."""

    attention_scale: float
    softcap: float


def read_hparams(keys: Keys) -> GemmaHParams:
    """Layers with a window rotate with a base of their own and without context extension. Some models have none."""
    hp = base.read_hparams(keys)
    a = keys.scoped(hp.arch)
    has_windows = a.u32("attention.sliding_window", default=0) > 0
    n_window, is_windowed = read_windows(a, hp.n_layer, period=6) if has_windows else (1, (False,) * hp.n_layer)
    scaled_dim = hp.n_embd // hp.n_head if hp.n_layer == _N_LAYER_27B else hp.head_dim
    return GemmaHParams(
        **vars(hp),
        n_window=n_window,
        is_windowed=is_windowed,
        rope_window=replace(window_rope(a, hp.rope, 10000.0), scaling="none", factor=1.0),
        attention_scale=scaled_dim**-0.5,
        softcap=a.f32("final_logit_softcapping", default=0.0),
    )


def tensors(hp: HParams) -> list[TensorSpec]:
    """Every tensor of the architecture."""
    specs = global_tensors(hp)
    for i in range(hp.n_layer):
        specs += attention_tensors(hp, i) + head_norms(hp, i) + dense_tensors(hp, i)
        specs += [
            TensorSpec(f"blk.{i}.{name}.weight", (hp.n_embd,)) for name in ("post_attention_norm", "post_ffw_norm")
        ]
    return specs
