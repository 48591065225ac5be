"""Named shapes: the hyper-parameters of models people run, as the metadata keys their files would carry.

Speed depends on shapes, types and routing, not on what the weights say, so a model's speed on a machine can be
measured before its file is downloaded. Values: the models' published configurations.
"""

from __future__ import annotations

from typing import Final

Value = bool | int | float | str


def _decoder(
    arch: str,
    *,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    head_dim: int,
    n_vocab: int,
    n_ctx: int,
    rope_base: float,
    n_ff: int = 0,
    experts: tuple[int, int, int] | None = None,
    rms_eps: float = 1e-6,
) -> dict[str, Value]:
    """Keys of a plain decoder. experts: how many, how many a token uses, width of each."""
    keys: dict[str, Value] = {
        "block_count": n_layer,
        "context_length": n_ctx,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": rms_eps,
        "rope.freq_base": rope_base,
        "vocab_size": n_vocab,
    }
    if experts is not None:
        keys |= {"expert_count": experts[0], "expert_used_count": experts[1], "expert_feed_forward_length": experts[2]}
    return {"general.architecture": arch} | {f"{arch}.{name}": value for name, value in keys.items()}


SHAPES: Final[dict[str, dict[str, Value]]] = {
    "qwen3-30b-a3b": _decoder(
        "qwen3moe",
        n_layer=48,
        n_embd=2048,
        n_head=32,
        n_head_kv=4,
        head_dim=128,
        n_vocab=151936,
        n_ctx=262144,
        rope_base=1e6,
        experts=(128, 8, 768),
    ),
    "qwen3-235b-a22b": _decoder(
        "qwen3moe",
        n_layer=94,
        n_embd=4096,
        n_head=64,
        n_head_kv=4,
        head_dim=128,
        n_vocab=151936,
        n_ctx=262144,
        rope_base=5e6,
        experts=(128, 8, 1536),
    ),
    "mixtral-8x7b": _decoder(
        "llama",
        n_layer=32,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_vocab=32000,
        n_ctx=32768,
        rope_base=1e6,
        n_ff=14336,
        experts=(8, 2, 14336),
        rms_eps=1e-5,
    ),
    "mixtral-8x22b": _decoder(
        "llama",
        n_layer=56,
        n_embd=6144,
        n_head=48,
        n_head_kv=8,
        head_dim=128,
        n_vocab=32768,
        n_ctx=65536,
        rope_base=1e6,
        n_ff=16384,
        experts=(8, 2, 16384),
        rms_eps=1e-5,
    ),
    "llama-3.1-8b": _decoder(
        "llama",
        n_layer=32,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_vocab=128256,
        n_ctx=131072,
        rope_base=5e5,
        n_ff=14336,
        rms_eps=1e-5,
    ),
    "qwen2.5-7b": _decoder(
        "qwen2",
        n_layer=28,
        n_embd=3584,
        n_head=28,
        n_head_kv=4,
        head_dim=128,
        n_vocab=152064,
        n_ctx=32768,
        rope_base=1e6,
        n_ff=18944,
    ),
    "qwen3-8b": _decoder(
        "qwen3",
        n_layer=36,
        n_embd=4096,
        n_head=32,
        n_head_kv=8,
        head_dim=128,
        n_vocab=151936,
        n_ctx=40960,
        rope_base=1e6,
        n_ff=12288,
    ),
}
