"""Families of models with several residual streams: see `bench.families`."""

from __future__ import annotations

from itertools import accumulate

from overspill.bench.families import Values, decoder, yarn
from overspill.bench.hybrids import delta_rule

_TABLE_ROWS = (  # of each hash: the first primes above twenty million
    20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
    20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161, 20000171,
)  # fmt: skip


def deepseek4() -> Values:
    """DeepSeek-V4-Flash: two layers that see a window only, then blocks of 4 and of 128 positions in turn."""
    n_layer = 43
    more: Values = {
        "attention.q_lora_rank": 1024,
        "attention.sliding_window": 128,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 1024,
        "attention.compress_ratios": (0, 0, *((4, 128) * n_layer)[: n_layer - 2]),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512,
        "rope.dimension_count": 64,
        "expert_shared_count": 1,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": 10.0,
        "hash_layer_count": 3,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        **yarn(16.0, 65536),
    }
    return decoder(
        "deepseek4",
        n_layer,
        4096,
        heads=(64, 1),
        head_dim=512,
        n_vocab=129280,
        n_ctx=1048576,
        rope_base=1e4,
        experts=(256, 6, 2048),
        more=more,
    )


def qwen4() -> Values:
    """Qwen3.8-Flash-Next, with its table of 320 million rows."""
    n_layer = 48
    more: Values = {
        **delta_rule(48),
        "expert_shared_feed_forward_length": 640,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 2048,
        "attention.compress_ratios": (0, 0, 0, 4) * (n_layer // 4),
        "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320,
        "embedding_length_per_layer_input": 160,
        "ple.layers": (1,),
        "ple.ngram_size": 3,
        "ple.heads_per_ngram": 8,
        "ple.conv_kernel": 4,
        "ple.eos_token_id": 248044,
        "ple.layer_multipliers": (23703573157769, 20109073645365, 8052911324071),
        "ple.head_vocab_sizes": _TABLE_ROWS,
        "ple.head_offsets": (0, *accumulate(_TABLE_ROWS[:-1])),
    }
    return decoder(
        "qwen4exp",
        n_layer,
        2560,
        heads=(24, 2),
        head_dim=256,
        n_vocab=248320,
        n_ctx=262144,
        rope_base=1e7,
        experts=(512, 10, 640),
        more=more,
    )
