"""Families of models in which most layers keep a state: see `bench.families`."""

from __future__ import annotations

from overspill.bench.families import Values, decoder


def qwen35(
    n_layer: int,
    n_embd: int,
    *,
    heads: tuple[int, int],
    n_value_heads: int,
    n_ff: int = 0,
    experts: tuple[int, int, int] | None = None,
    n_vocab: int = 248320,
    arch: str = "qwen35moe",
) -> Values:
    """Qwen3.5, and Qwen3-Next: attention in every fourth layer; the shared expert is as wide as a routed one.

    n_value_heads: of the delta rule, which has 16 key heads; heads of both have 128 channels.
    """
    more = delta_rule(n_value_heads)
    if experts is not None:
        more["expert_shared_feed_forward_length"] = experts[2]
    return decoder(
        arch,
        n_layer,
        n_embd,
        heads=heads,
        head_dim=256,
        n_ff=n_ff,
        n_vocab=n_vocab,
        n_ctx=262144,
        rope_base=1e7,
        experts=experts,
        more=more,
    )


def delta_rule(n_value_heads: int) -> Values:
    """The delta rule with 16 key heads, and attention in every fourth layer."""
    return {
        "rope.dimension_count": 64,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": n_value_heads,
        "ssm.inner_size": n_value_heads * 128,
    }


def kimi_linear() -> Values:
    """Kimi-Linear: latent attention in every fourth layer and the last, 32 heads of 128 channels in all."""
    n_layer = 27
    is_attention = [i % 4 == 3 or i == n_layer - 1 for i in range(n_layer)]
    values = decoder(
        "kimi-linear",
        n_layer,
        2304,
        heads=(32, 0),
        head_dim=576,
        n_ff=9216,
        n_vocab=163840,
        n_ctx=1048576,
        rope_base=1e4,
        rms_eps=1e-5,
        experts=(256, 8, 1024),
        more={
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "rope.dimension_count": 64,
            "leading_dense_block_count": 1,
            "expert_shared_count": 1,
            "expert_weights_scale": 2.446,
            "expert_gating_func": 2,
            "ssm.conv_kernel": 4,
            "kda.head_dim": 128,
        },
    )
    return values | {"kimi-linear.attention.head_count_kv": tuple(map(int, is_attention))}
