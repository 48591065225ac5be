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
