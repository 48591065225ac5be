"""Named shapes: the hyper-parameters of models people run, as the metadata keys their files would carry.

Speed depends on shapes, types and routing, not on what the weights say, so a model's speed on a machine can be
measured before its file is downloaded. Values: the models' published configurations.
"""

from __future__ import annotations

from typing import Final

from overspill.bench.families import (
    Value,
    deepseek,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    llama,
    llama4,
    minimax,
    olmoe,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
)
from overspill.bench.hybrids import kimi_linear, qwen35
from overspill.bench.streams import deepseek4, qwen4

SHAPES: Final[dict[str, dict[str, Value]]] = {
    "qwen3-30b-a3b": qwen3moe(48, 2048, heads=(32, 4), n_ff=768, rope_base=1e6),
    "qwen3-235b-a22b": qwen3moe(94, 4096, heads=(64, 4), n_ff=1536, rope_base=5e6),
    "qwen3-vl-30b-a3b": qwen3moe(48, 2048, heads=(32, 4), n_ff=768, rope_base=5e6, arch="qwen3vlmoe"),
    "qwen3-vl-235b-a22b": qwen3moe(94, 4096, heads=(64, 4), n_ff=1536, rope_base=5e6, arch="qwen3vlmoe"),
    "qwen3-next-80b-a3b": qwen35(
        48,
        2048,
        heads=(16, 2),
        n_value_heads=32,
        n_ff=5120,
        experts=(512, 10, 512),
        n_vocab=151936,
        arch="qwen3next",
    ),
    "qwen3.5-35b-a3b": qwen35(40, 2048, heads=(16, 2), n_value_heads=32, experts=(256, 8, 512)),
    "qwen3.5-122b-a10b": qwen35(48, 3072, heads=(32, 2), n_value_heads=64, experts=(256, 8, 1024)),
    "qwen3.5-397b-a17b": qwen35(60, 4096, heads=(32, 2), n_value_heads=64, experts=(512, 10, 1024)),
    "qwen3.5-27b": qwen35(64, 5120, heads=(24, 4), n_value_heads=48, n_ff=17408, arch="qwen35"),
    "qwen1.5-moe-a2.7b": qwen2moe(24, 2048, heads=(16, 16), n_ff=5632, experts=(60, 4, 1408), n_ff_shared=5632),
    "qwen2-57b-a14b": qwen2moe(28, 3584, heads=(28, 4), n_ff=18944, experts=(64, 8, 2560), n_ff_shared=20480),
    "gpt-oss-20b": gpt_oss(24, n_expert=32),
    "gpt-oss-120b": gpt_oss(36, n_expert=128),
    "deepseek-v2-lite": deepseek(
        (27, 1), 2048, n_head=16, n_latent_q=0, n_ff=10944, experts=(64, 6, 1408), n_shared=2, n_vocab=102400
    ),
    "deepseek-v2": deepseek(
        (60, 1), 5120, n_ff=12288, experts=(160, 6, 1536), n_shared=2, n_vocab=102400, groups=(8, 3), scale=16.0
    ),
    "deepseek-v3": deepseek(
        (61, 3),
        7168,
        n_ff=18432,
        experts=(256, 8, 2048),
        n_vocab=129280,
        groups=(8, 4),
        scale=2.5,
        extended=(40.0, 0.1),
    ),
    "kimi-k2": deepseek(
        (61, 1),
        7168,
        n_head=64,
        n_ff=18432,
        experts=(384, 8, 2048),
        n_vocab=163840,
        n_ctx=262144,
        rope_base=5e4,
        scale=2.827,
        extended=(64.0, 0.1),
    ),
    "deepseek-v4-flash": deepseek4(),
    "qwen3.8-flash-next": qwen4(),
    "kimi-linear-48b-a3b": kimi_linear(),
    "glm-4.5-air": glm4((46, 1), 4096, n_ff=10944, experts=(128, 8, 1408), scale=1.0),
    "glm-4.5": glm4((92, 3), 5120, n_ff=12288, experts=(160, 8, 1536), scale=2.5),
    "minimax-m2": minimax(),
    "olmoe-1b-7b": olmoe(),
    "granite-3.1-1b-a400m": granite(24, 1024, heads=(16, 8), n_expert=32),
    "granite-3.1-3b-a800m": granite(32, 1536, heads=(24, 8), n_expert=40),
    "llama-4-scout": llama4(n_expert=16, moe_step=1, n_ctx=10485760),
    "llama-4-maverick": llama4(n_expert=128, moe_step=2, n_ctx=1048576),
    "mixtral-8x7b": llama(
        32, 4096, heads=(32, 8), n_ff=14336, n_vocab=32000, n_ctx=32768, rope_base=1e6, experts=(8, 2, 14336)
    ),
    "mixtral-8x22b": llama(
        56, 6144, heads=(48, 8), n_ff=16384, n_vocab=32768, n_ctx=65536, rope_base=1e6, experts=(8, 2, 16384)
    ),
    "llama-3.1-8b": llama(32, 4096, heads=(32, 8), n_ff=14336, n_vocab=128256, n_ctx=131072, rope_base=5e5),
    "qwen2.5-7b": qwen2(28, 3584, heads=(28, 4), n_ff=18944, n_vocab=152064),
    "qwen3-8b": qwen3(36, 4096, heads=(32, 8), n_ff=12288),
    "gemma-3-27b": gemma3(62, 5376, heads=(32, 16), n_ff=21504),
}
