"""Roles from names, and bytes by role."""

from __future__ import annotations

import pytest

from overspill.placement.shape import ModelShape, Role, role_of, sized_tensors
from tests.pure.placement_models import make_shape


@pytest.mark.parametrize(
    ("name", "role", "layer"),
    [
        ("blk.3.ffn_gate_exps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_up_exps.weight", Role.EXPERT, 3),
        ("blk.12.ffn_down_exps.weight", Role.EXPERT, 12),
        ("blk.3.ffn_gate_up_exps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_up_chexps.weight", Role.EXPERT, 3),
        ("blk.3.ffn_gate.7.weight", Role.EXPERT, 3),
        ("blk.3.ffn_down.12.weight", Role.EXPERT, 3),
        ("blk.3.ffn_gate_exps.bias", Role.LAYER, 3),
        ("blk.3.ffn_down_exps.scale", Role.LAYER, 3),
        ("blk.3.ffn_gate_inp.weight", Role.LAYER, 3),
        ("blk.3.exp_probs_b.bias", Role.LAYER, 3),
        ("blk.3.ffn_gate_shexp.weight", Role.LAYER, 3),
        ("blk.3.ffn_gate_inp_shexp.weight", Role.LAYER, 3),
        ("blk.3.ffn_gate.weight", Role.LAYER, 3),
        ("blk.3.attn_output.weight", Role.LAYER, 3),
        ("blk.3.ffn_gate_tid2eid.weight", Role.LAYER, 3),
        ("token_embd.weight", Role.EMBED, None),
        ("token_embd_norm.weight", Role.EMBED, None),
        ("per_layer_token_embd.weight", Role.LOOKUP, None),
        ("rope_freqs.weight", Role.EMBED, None),
        ("output.weight", Role.OUTPUT, None),
        ("output_norm.weight", Role.OUTPUT, None),
        ("output_hc_fn.weight", Role.OUTPUT, None),
    ],
)
def test_role_of(name: str, role: Role, layer: int | None) -> None:
    assert role_of(name) == (role, layer)


def test_prediction_layers_are_left_out() -> None:
    sizes = [("blk.0.attn_q.weight", 5), ("blk.1.attn_q.weight", 6), ("blk.2.nextn.eh_proj.weight", 7)]
    assert [t.name for t in sized_tensors(sizes, n_layer=2)] == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"]


def test_bytes_by_role() -> None:
    shape = make_shape(3, dense_bytes=101, expert_bytes=1000, n_lead=1, output_bytes=70, n_embd=8)
    assert (shape.layer_bytes(0), shape.expert_bytes(0)) == (101, 0)
    assert (shape.layer_bytes(2), shape.expert_bytes(2)) == (101, 1000)
    assert shape.embed_bytes == 70
    assert shape.output_bytes == 70 + 32
    assert shape.tied_bytes == 0
    assert shape.total_bytes == 3 * 101 + 2 * 1000 + 2 * 70 + 32


def test_tied_output_needs_the_embedding_too() -> None:
    shape = make_shape(2, output_bytes=70, n_embd=8, is_tied=True)
    assert shape.tied_bytes == 70
    assert shape.output_bytes == 70 + 32


def test_mismatched_layers_are_a_fault_of_the_maker() -> None:
    shape = make_shape(2)
    with pytest.raises(AssertionError):
        ModelShape(**{**vars(shape), "kv_bytes_per_cell": (1,)})
