"""What files may say about architectures with the delta rule: variants that must load, defects that must be named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from overspill.cache.cells import CellType, KvShape
from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.source import ModelSource
from overspill.models.check import understand
from overspill.models.describe import model_shape
from overspill.models.specs.kimi_linear import KimiHParams
from overspill.models.specs.recurrent import DeltaHParams
from tests.helpers.edited import Edited
from tests.helpers.plain import plain_logits, plain_model
from tests.models.fixtures import fixture

IDS = [(11 * i + 5) % 500 for i in range(20)]


def original(name: str) -> Edited:
    return Edited.of(open_gguf(fixture(f"{name}.gguf")))


def logits(source: ModelSource) -> torch.Tensor:
    return plain_logits(plain_model(source), IDS, 16)


def hparams(source: ModelSource) -> DeltaHParams:
    return cast(DeltaHParams, understand(source).hparams)


def test_prediction_layers_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    source = original("qwen3next-mtp")
    n_behind = sum(name.startswith("blk.4.") for name in source.tensors)
    with caplog.at_level(logging.INFO):
        hp = hparams(source)
    assert (hp.n_layer, hp.is_recurrent) == (4, (True, True, True, False))
    assert [r.getMessage() for r in caplog.records] == [f"{n_behind} tensor(s) of prediction layers are not loaded"]
    without = source.without([name for name in source.tensors if name.startswith("blk.4.")])
    assert torch.equal(logits(source), logits(without))


@pytest.mark.parametrize("name", ["qwen3next-mtp", "qwen35"])
def test_recurrent_layers_by_flags_or_by_period(name: str) -> None:
    source = original(name)
    arch = source.keys.arch
    flags, period = f"{arch}.attention.recurrent_layers", f"{arch}.full_attention_interval"
    expected = logits(source)
    assert torch.equal(logits(source.with_keys({period: None})), expected)
    assert torch.equal(logits(source.with_keys({flags: None})), expected)
    assert torch.equal(logits(source.with_keys({flags: None, period: None})), expected)
    every_other = source.with_keys({flags: None, period: 2})
    with pytest.raises(UserError, match=r"tensor blk\.1\.attn_qkv\.weight: shape"):
        understand(every_other)


def test_inputs_of_the_delta_rule_in_one_tensor() -> None:
    """Of each key head: query, key, values, gates."""
    source, n_key_heads, dim = original("qwen3next-mtp"), 2, 32
    old = source
    for i in range(3):
        qkv, z = source.array(f"blk.{i}.attn_qkv.weight"), source.array(f"blk.{i}.attn_gate.weight")
        q, k, v = np.split(qkv, [n_key_heads * dim, 2 * n_key_heads * dim])
        heads = [part.reshape(n_key_heads, -1, qkv.shape[1]) for part in (q, k, v, z)]
        old = old.without([f"blk.{i}.attn_qkv.weight", f"blk.{i}.attn_gate.weight"])
        old = old.with_array(f"blk.{i}.ssm_in.weight", np.concatenate(heads, 1).reshape(-1, qkv.shape[1]))
    assert torch.equal(logits(old), logits(source))
    short = old.with_array("blk.1.ssm_in.weight", old.array("blk.1.ssm_in.weight")[:-1])
    with pytest.raises(UserError, match=r"tensor blk\.1\.ssm_in\.weight: shape \{64, 383\}, expected \{64, 384\}"):
        understand(short)


def test_two_orders_of_value_heads() -> None:
    """Qwen3-Next's file is one of Qwen3.5 when value heads stand in the order of h % 2, and two products apart."""
    source, dim, order = original("qwen3next-mtp"), 32, [0, 2, 1, 3]
    other = source.with_arch("qwen35moe")

    def sorted_heads(values: np.ndarray, n_before: int = 0) -> np.ndarray:
        heads = values[n_before:].reshape(4, -1, *values.shape[1:])[order]
        return np.concatenate([values[:n_before], heads.reshape(-1, *values.shape[1:])])

    for i in range(3):
        b = f"blk.{i}."
        for name, n_before in (("attn_qkv.weight", 128), ("attn_gate.weight", 0), ("ssm_conv1d.weight", 128)):
            other = other.with_array(b + name, sorted_heads(source.array(b + name), n_before))
        for name in ("ssm_a", "ssm_dt.bias"):
            other = other.with_array(b + name, sorted_heads(source.array(b + name)))
        out = source.array(b + "ssm_out.weight")
        other = other.with_array(b + "ssm_out.weight", sorted_heads(out.T).T)
        beta, alpha = np.split(source.array(b + "ssm_ba.weight").reshape(2, 4, -1), 2, 1)
        other = other.without([b + "ssm_ba.weight"])
        other = other.with_array(b + "ssm_beta.weight", sorted_heads(beta.reshape(4, -1)))
        other = other.with_array(b + "ssm_alpha.weight", sorted_heads(alpha.reshape(4, -1)))
    assert hparams(other).delta.head_dim == dim
    torch.testing.assert_close(logits(other), logits(source), rtol=0, atol=1e-3)


def test_experts_of_gate_and_up_in_one_tensor() -> None:
    source = original("qwen3next-mtp")
    fused = source
    for i in range(4):
        gate, up = (source.array(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up"))
        fused = fused.without([f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up")])
        fused = fused.with_array(f"blk.{i}.ffn_gate_up_exps.weight", np.concatenate([gate, up], 1))
    assert torch.equal(logits(fused), logits(source))


def test_what_hybrids_keep() -> None:
    source = original("qwen35")
    _, hp, specs, source_ = understand(source)
    assert isinstance(hp, DeltaHParams)
    state = KvShape.of_state((3, 256), (4, 32, 32))
    assert [hp.kv_shape(i) for i in range(4)] == [state] * 3 + [KvShape(2, 32, 32)]
    assert [hp.rope_of(i) is None for i in range(4)] == [True] * 3 + [False]
    assert hp.has_states
    shape = model_shape("qwen35", hp, specs, source_.tensors, cells=CellType.F16)
    assert shape.state_bytes == (4 * (3 * 256 + 4 * 32 * 32),) * 3 + (0,) + shape.state_bytes[4:]
    assert shape.kv_bytes_per_cell[:4] == (0, 0, 0, 2 * 2 * 64)
    assert not understand(original("qwen3moe")).hparams.has_states


def test_kimi_layers() -> None:
    hp = cast(KimiHParams, hparams(original("kimi_linear")))
    assert hp.is_recurrent == (True, True, True, False) * 2
    assert [hp.is_moe(i) for i in range(8)] == [False] + [True] * 7
    assert hp.kv_shape(0) == KvShape.of_state((3, 384), (4, 32, 32))
    assert hp.kv_shape(3) == KvShape(1, 48, 32, has_values=False)
    assert all(hp.rope_of(i) is None for i in range(8))


def test_dimensions_of_one_may_be_dropped() -> None:
    source = original("kimi_linear")
    other = source
    for i in (0, 1, 2, 4, 5, 6):
        for part in "qkv":
            name = f"blk.{i}.ssm_conv1d_{part}.weight"
            assert source.tensors[name].shape == (1, 128, 1, 4)
            other = other.with_array(name, source.array(name).reshape((128, 1, 4) if part == "q" else (128, 4)))
        other = other.with_array(f"blk.{i}.ssm_a", source.array(f"blk.{i}.ssm_a").reshape(4, 1))
    assert torch.equal(logits(other), logits(source))


def test_kimi_keys_and_values_of_latents_in_one_tensor() -> None:
    source = original("kimi_linear")
    old = source
    for i in (3, 7):
        k, v = source.array(f"blk.{i}.attn_k_b.weight"), source.array(f"blk.{i}.attn_v_b.weight")
        old = old.without([f"blk.{i}.attn_k_b.weight", f"blk.{i}.attn_v_b.weight"])
        old = old.with_array(f"blk.{i}.attn_kv_b.weight", np.concatenate([k.transpose(0, 2, 1), v], 1).reshape(-1, 32))
    torch.testing.assert_close(logits(old), logits(source), rtol=0, atol=1e-5)


DEFECTS: list[tuple[str, Callable[[Edited], Edited], str]] = [
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.state_size": None}), r"qwen35\.ssm\.state_size is missing"),
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.state_size": 0}), r"qwen35\.ssm\.state_size is 0"),
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.group_count": 3}), r"group_count is 3: must divide .*rank, 4"),
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.inner_size": 64}), r"inner_size is 64: must be .* 128"),
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.conv_kernel": 1}), r"conv_kernel is 1: must be at least 2"),
    ("qwen35", lambda s: s.with_keys({"qwen35.ssm.conv_kernel": 5}), r"ssm_conv1d\.weight: shape \{4, 256\}"),
    (
        "qwen35",
        lambda s: s.with_flags("qwen35.attention.recurrent_layers", [True] * 3),
        r"recurrent_layers is an array of 3 values, expected .* 8 layers",
    ),
    (
        "qwen35",
        lambda s: s.with_keys({"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 0}),
        r"full_attention_interval is 0",
    ),
    ("qwen35", lambda s: s.without(["blk.0.ssm_a"]), r"tensor blk\.0\.ssm_a is missing"),
    ("qwen35", lambda s: s.without(["blk.0.ssm_alpha.weight"]), r"tensor blk\.0\.ssm_alpha\.weight is missing"),
    ("qwen3next-mtp", lambda s: s.with_keys({"qwen3next.expert_count": 0}), r"qwen3next\.expert_count is 0"),
    ("qwen3next-mtp", lambda s: s.without(["blk.1.ssm_ba.weight"]), r"tensor blk\.1\.ssm_ba\.weight is missing"),
    ("kimi_linear", lambda s: s.with_keys({"kimi-linear.kda.head_dim": None}), r"kimi-linear\.kda\.head_dim is miss"),
    (
        "kimi_linear",
        lambda s: s.with_keys({"kimi-linear.attention.key_length_mla": 16}),
        r"key_length_mla is 16: must be above rope\.dimension_count, 16",
    ),
    ("kimi_linear", lambda s: s.without(["blk.0.ssm_f_b.weight"]), r"tensor blk\.0\.ssm_f_b\.weight is missing"),
]


@pytest.mark.parametrize(("name", "edit", "message"), DEFECTS)
def test_defects_are_named(name: str, edit: Callable[[Edited], Edited], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        understand(edit(original(name)))
    assert "\n" not in str(error.value)
