"""Families of models: what all members have in common, so that a shape names only its own sizes.

Arguments that repeat: `heads` are numbers of query heads and of kv heads; `layers` are all layers and the dense ones
among them, which come first; `experts` are how many there are, how many a token uses, and the width of each.
"""

from __future__ import annotations

Value = bool | int | float | str | tuple[int, ...]
Values = dict[str, Value]


def decoder(
    arch: str,
    n_layer: int,
    n_embd: int,
    *,
    heads: tuple[int, int],
    head_dim: int = 128,
    n_ff: int = 0,
    n_vocab: int,
    n_ctx: int,
    rope_base: float,
    rms_eps: float = 1e-6,
    experts: tuple[int, int, int] | None = None,
    more: Values | None = None,
) -> Values:
    """Keys of a plain decoder, and `more` of the architecture's own."""
    keys: Values = {
        "block_count": n_layer,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": heads[0],
        "attention.head_count_kv": heads[1],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": rms_eps,
        "rope.freq_base": rope_base,
        "vocab_size": n_vocab,
    }
    if experts is not None:
        keys |= {"expert_count": experts[0], "expert_used_count": experts[1], "expert_feed_forward_length": experts[2]}
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in (keys | (more or {})).items()}


def yarn(factor: float, n_ctx_orig: int = 4096) -> Values:
    """Keys of a context that YaRN has extended."""
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": n_ctx_orig,
    }


def llama(
    n_layer: int,
    n_embd: int,
    *,
    heads: tuple[int, int],
    n_ff: int,
    n_vocab: int,
    n_ctx: int,
    rope_base: float,
    experts: tuple[int, int, int] | None = None,
) -> Values:
    """Llama, and Mixtral with `experts`."""
    return decoder(
        "llama",
        n_layer,
        n_embd,
        heads=heads,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx=n_ctx,
        rope_base=rope_base,
        rms_eps=1e-5,
        experts=experts,
    )


def qwen2(n_layer: int, n_embd: int, *, heads: tuple[int, int], n_ff: int, n_vocab: int) -> Values:
    """Qwen2.5."""
    return decoder("qwen2", n_layer, n_embd, heads=heads, n_ff=n_ff, n_vocab=n_vocab, n_ctx=32768, rope_base=1e6)


def qwen3(n_layer: int, n_embd: int, *, heads: tuple[int, int], n_ff: int) -> Values:
    """Qwen3, dense."""
    return decoder("qwen3", n_layer, n_embd, heads=heads, n_ff=n_ff, n_vocab=151936, n_ctx=40960, rope_base=1e6)


def qwen3moe(
    n_layer: int, n_embd: int, *, heads: tuple[int, int], n_ff: int, rope_base: float, arch: str = "qwen3moe"
) -> Values:
    """Qwen3 with 128 experts of width `n_ff`, 8 of them used."""
    experts = (128, 8, n_ff)
    return decoder(
        arch, n_layer, n_embd, heads=heads, n_vocab=151936, n_ctx=262144, rope_base=rope_base, experts=experts
    )


def qwen2moe(
    n_layer: int, n_embd: int, *, heads: tuple[int, int], n_ff: int, experts: tuple[int, int, int], n_ff_shared: int
) -> Values:
    """Qwen1.5-MoE and Qwen2-MoE."""
    return decoder(
        "qwen2moe",
        n_layer,
        n_embd,
        heads=heads,
        n_ff=n_ff,
        n_vocab=151936,
        n_ctx=32768,
        rope_base=1e6,
        experts=experts,
        more={"expert_shared_feed_forward_length": n_ff_shared},
    )


def gpt_oss(n_layer: int, *, n_expert: int) -> Values:
    """gpt-oss."""
    return decoder(
        "gpt-oss",
        n_layer,
        2880,
        heads=(64, 8),
        head_dim=64,
        n_ff=2880,
        n_vocab=201088,
        n_ctx=131072,
        rope_base=150000.0,
        rms_eps=1e-5,
        experts=(n_expert, 4, 2880),
        more={"attention.sliding_window": 128, **yarn(32.0)},
    )


def deepseek(
    layers: tuple[int, int],
    n_embd: int,
    *,
    n_head: int = 128,
    n_latent_q: int = 1536,
    n_ff: int,
    experts: tuple[int, int, int],
    n_shared: int = 1,
    n_vocab: int,
    n_ctx: int = 163840,
    rope_base: float = 1e4,
    groups: tuple[int, int] = (1, 1),
    scale: float = 1.0,
    extended: tuple[float, float] = (40.0, 0.0707),
) -> Values:
    """DeepSeek-V2 and V3, Kimi-K2. groups: of experts, and those used. extended: YaRN's factor, and log multiplier.

    From V3 on, which has one shared expert, routing is by sigmoid and weights are normalised.
    """
    latent = {"attention.q_lora_rank": n_latent_q} if n_latent_q else {}
    more: Values = {
        **latent,
        "attention.kv_lora_rank": 512,
        "attention.key_length": 576,
        "attention.value_length": 512,
        "attention.key_length_mla": 192,
        "attention.value_length_mla": 128,
        "rope.dimension_count": 64,
        "leading_dense_block_count": layers[1],
        "expert_shared_count": n_shared,
        "expert_group_count": groups[0],
        "expert_group_used_count": groups[1],
        "expert_weights_scale": scale,
        "expert_gating_func": 2 if n_shared == 1 else 1,
        "expert_weights_norm": n_shared == 1,
        **yarn(extended[0]),
        "rope.scaling.yarn_log_multiplier": extended[1],
    }
    return decoder(
        "deepseek2",
        layers[0],
        n_embd,
        heads=(n_head, 1),
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx=n_ctx,
        rope_base=rope_base,
        experts=experts,
        more=more,
    )


def glm4(layers: tuple[int, int], n_embd: int, *, n_ff: int, experts: tuple[int, int, int], scale: float) -> Values:
    """GLM-4.5, without its prediction layer."""
    return decoder(
        "glm4moe",
        layers[0],
        n_embd,
        heads=(96, 8),
        n_ff=n_ff,
        n_vocab=151552,
        n_ctx=131072,
        rope_base=1e6,
        rms_eps=1e-5,
        experts=experts,
        more={
            "rope.dimension_count": 64,
            "leading_dense_block_count": layers[1],
            "expert_shared_count": 1,
            "expert_weights_scale": scale,
        },
    )


def minimax() -> Values:
    """MiniMax-M2."""
    return decoder(
        "minimax-m2",
        62,
        3072,
        heads=(48, 8),
        n_ff=1536,
        n_vocab=200064,
        n_ctx=196608,
        rope_base=5e6,
        experts=(256, 8, 1536),
        more={"rope.dimension_count": 64},
    )


def olmoe() -> Values:
    """OLMoE."""
    return decoder(
        "olmoe",
        16,
        2048,
        heads=(16, 16),
        n_ff=1024,
        n_vocab=50304,
        n_ctx=4096,
        rope_base=1e4,
        rms_eps=1e-5,
        experts=(64, 8, 1024),
    )


def granite(n_layer: int, n_embd: int, *, heads: tuple[int, int], n_expert: int) -> Values:
    """Granite 3.1 MoE."""
    return decoder(
        "granitemoe",
        n_layer,
        n_embd,
        heads=heads,
        head_dim=64,
        n_ff=512,
        n_vocab=49155,
        n_ctx=131072,
        rope_base=1e7,
        experts=(n_expert, 8, 512),
        more={"attention.scale": 0.015625, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 6.0},
    )


def llama4(*, n_expert: int, moe_step: int, n_ctx: int) -> Values:
    """Llama 4, its text."""
    return decoder(
        "llama4",
        48,
        5120,
        heads=(40, 8),
        n_ff=16384,
        n_vocab=202048,
        n_ctx=n_ctx,
        rope_base=5e5,
        rms_eps=1e-5,
        experts=(n_expert, 1, 8192),
        more={"interleave_moe_layer_step": moe_step},
    )


def gemma3(n_layer: int, n_embd: int, *, heads: tuple[int, int], n_ff: int) -> Values:
    """Gemma 3, its text."""
    return decoder(
        "gemma3",
        n_layer,
        n_embd,
        heads=heads,
        n_ff=n_ff,
        n_vocab=262208,
        n_ctx=131072,
        rope_base=1e6,
        more={"attention.sliding_window": 1024, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    )
