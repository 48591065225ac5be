"""Tensor lists that architectures are put together from."""

from __future__ import annotations

from overspill.models.specs.base import HParams, TensorSpec


def global_tensors(hp: HParams) -> list[TensorSpec]:
    """Embedding, final norm and head; a file without a head ties it to the embedding."""
    return [
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec("output_norm.weight", (hp.n_embd,)),
        TensorSpec("output.weight", (hp.n_vocab, hp.n_embd), is_required=False),
    ]


def attention_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Norm and the four projections of a layer."""
    b, q_dim = f"blk.{i_layer}.", hp.n_head * hp.head_dim
    return [
        TensorSpec(b + "attn_norm.weight", (hp.n_embd,)),
        TensorSpec(b + "attn_q.weight", (q_dim, hp.n_embd)),
        TensorSpec(b + "attn_k.weight", (hp.kv_dim, hp.n_embd)),
        TensorSpec(b + "attn_v.weight", (hp.kv_dim, hp.n_embd)),
        TensorSpec(b + "attn_output.weight", (hp.n_embd, q_dim)),
    ]


def qkv_biases(hp: HParams, i_layer: int, *, is_required: bool) -> list[TensorSpec]:
    """Biases of the three input projections."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "attn_q.bias", (hp.n_head * hp.head_dim,), is_required),
        TensorSpec(b + "attn_k.bias", (hp.kv_dim,), is_required),
        TensorSpec(b + "attn_v.bias", (hp.kv_dim,), is_required),
    ]


def head_norms(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Norms of each query and key head."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "attn_q_norm.weight", (hp.head_dim,)),
        TensorSpec(b + "attn_k_norm.weight", (hp.head_dim,)),
    ]


def dense_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """A gated feed-forward."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "ffn_norm.weight", (hp.n_embd,)),
        TensorSpec(b + "ffn_gate.weight", (hp.n_ff, hp.n_embd)),
        TensorSpec(b + "ffn_up.weight", (hp.n_ff, hp.n_embd)),
        TensorSpec(b + "ffn_down.weight", (hp.n_embd, hp.n_ff)),
    ]


def expert_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Router and stacked experts."""
    b, E = f"blk.{i_layer}.", hp.n_expert
    return [
        TensorSpec(b + "ffn_norm.weight", (hp.n_embd,)),
        TensorSpec(b + "ffn_gate_inp.weight", (E, hp.n_embd)),
        TensorSpec(b + "ffn_gate_exps.weight", (E, hp.n_ff_exp, hp.n_embd)),
        TensorSpec(b + "ffn_up_exps.weight", (E, hp.n_ff_exp, hp.n_embd)),
        TensorSpec(b + "ffn_down_exps.weight", (E, hp.n_embd, hp.n_ff_exp)),
    ]
