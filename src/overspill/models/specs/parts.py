"""Tensor lists that architectures are put together from."""

from __future__ import annotations

from overspill.models.specs.base import HParams, TensorSpec


def global_tensors(hp: HParams, *, is_tied: bool = True) -> list[TensorSpec]:
    """Embedding, final norm and head; where the architecture allows it, a file without a head means the embedding."""
    return [
        TensorSpec("token_embd.weight", (hp.n_vocab, hp.n_embd)),
        TensorSpec("output_norm.weight", (hp.n_embd,)),
        TensorSpec("output.weight", (hp.n_vocab, hp.n_embd), is_required=not is_tied),
    ]


def attention_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Norm and the four projections of a layer."""
    b, D = f"blk.{i_layer}.", hp.n_embd
    return [
        TensorSpec(b + "attn_norm.weight", (D,)),
        TensorSpec(b + "attn_q.weight", (hp.n_head * hp.head_dim, D)),
        TensorSpec(b + "attn_k.weight", (hp.n_head_kv * hp.head_dim, D)),
        TensorSpec(b + "attn_v.weight", (hp.n_head_kv * hp.value_dim, D)),
        TensorSpec(b + "attn_output.weight", (D, hp.n_head * hp.value_dim)),
    ]


def qkv_biases(hp: HParams, i_layer: int, *, is_required: bool) -> list[TensorSpec]:
    """Biases of the three input projections."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "attn_q.bias", (hp.n_head * hp.head_dim,), is_required),
        TensorSpec(b + "attn_k.bias", (hp.n_head_kv * hp.head_dim,), is_required),
        TensorSpec(b + "attn_v.bias", (hp.n_head_kv * hp.value_dim,), is_required),
    ]


def output_bias(hp: HParams, i_layer: int, *, is_required: bool) -> TensorSpec:
    """Bias of attention's output projection."""
    return TensorSpec(f"blk.{i_layer}.attn_output.bias", (hp.n_embd,), is_required)


def head_norms(hp: HParams, i_layer: int, *, is_required: bool = True) -> list[TensorSpec]:
    """Norms of each query and key head."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "attn_q_norm.weight", (hp.head_dim,), is_required),
        TensorSpec(b + "attn_k_norm.weight", (hp.head_dim,), is_required),
    ]


def whole_norms(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Norms of all query heads together, and of all key heads."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "attn_q_norm.weight", (hp.n_head * hp.head_dim,)),
        TensorSpec(b + "attn_k_norm.weight", (hp.n_head_kv * hp.head_dim,)),
    ]


def dense_tensors(hp: HParams, i_layer: int, *, norm: str = "ffn_norm") -> list[TensorSpec]:
    """A gated feed-forward and the norm before it, which has several names."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(f"{b}{norm}.weight", (hp.n_embd,)),
        TensorSpec(b + "ffn_gate.weight", (hp.n_ff, hp.n_embd)),
        TensorSpec(b + "ffn_up.weight", (hp.n_ff, hp.n_embd)),
        TensorSpec(b + "ffn_down.weight", (hp.n_embd, hp.n_ff)),
    ]


def dense_biases(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """Biases of a gated feed-forward."""
    b = f"blk.{i_layer}."
    return [
        TensorSpec(b + "ffn_gate.bias", (hp.n_ff,), is_required=False),
        TensorSpec(b + "ffn_up.bias", (hp.n_ff,), is_required=False),
        TensorSpec(b + "ffn_down.bias", (hp.n_embd,), is_required=False),
    ]


def expert_tensors(hp: HParams, i_layer: int, *, norm: str = "ffn_norm") -> list[TensorSpec]:
    """Router and stacked experts, and the norm before them."""
    b, E = f"blk.{i_layer}.", hp.n_expert
    return [
        TensorSpec(f"{b}{norm}.weight", (hp.n_embd,)),
        TensorSpec(b + "ffn_gate_inp.weight", (E, hp.n_embd)),
        TensorSpec(b + "ffn_gate_exps.weight", (E, hp.n_ff_exp, hp.n_embd)),
        TensorSpec(b + "ffn_up_exps.weight", (E, hp.n_ff_exp, hp.n_embd)),
        TensorSpec(b + "ffn_down_exps.weight", (E, hp.n_embd, hp.n_ff_exp)),
    ]


def router_bias(hp: HParams, i_layer: int) -> TensorSpec:
    """What is added to a router's scores for the choice of experts alone."""
    return TensorSpec(f"blk.{i_layer}.exp_probs_b.bias", (hp.n_expert,), is_required=False)


def shared_tensors(hp: HParams, i_layer: int) -> list[TensorSpec]:
    """The experts that every token uses, side by side in one feed-forward."""
    b, F = f"blk.{i_layer}.", hp.n_ff_shared
    return [
        TensorSpec(b + "ffn_gate_shexp.weight", (F, hp.n_embd)),
        TensorSpec(b + "ffn_up_shexp.weight", (F, hp.n_embd)),
        TensorSpec(b + "ffn_down_shexp.weight", (hp.n_embd, F)),
    ]


def shared_gate(hp: HParams, i_layer: int) -> TensorSpec:
    """What decides, for each token, how much the shared experts count."""
    return TensorSpec(f"blk.{i_layer}.ffn_gate_inp_shexp.weight", (hp.n_embd,))
