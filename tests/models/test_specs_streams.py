"""What files of DeepSeek-V4 and Qwen3.8-Flash-Next may say: defects that must be named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.keys import Keys
from overspill.gguf.types import TensorType
from overspill.models.check import understand
from overspill.models.specs.deepseek4 import DeepSeek4HParams
from overspill.placement.shape import LOOKUP_TABLE
from tests.helpers.edited import Edited
from tests.models.fixtures import fixture

V4, QWEN4 = "deepseek_v4", "qwen4_exp"
FILES = {"deepseek4": V4, "qwen4exp": QWEN4}


def original(name: str) -> Edited:
    return Edited.of(open_gguf(fixture(f"{name}.gguf")))


DEFECTS = [
    ("deepseek4.hyper_connection.count", 1, "must be from 2"),
    ("deepseek4.expert_gating_func", 2, r"expert_gating_func is 2 .*only 4 \(sqrt_softplus\)"),
    ("deepseek4.attention.head_count_kv", 2, "deepseek4 has 2 kv heads"),
    ("deepseek4.attention.output_group_count", 3, "is 3: must divide attention.head_count, 4"),
    ("deepseek4.attention.indexer.key_length", 8, "at least rope.dimension_count, 16"),
    ("deepseek4.attention.sliding_window", 0, "is 0"),
    ("deepseek4.attention.compress_ratios", (0, 4, 128), "has 3 values: expected one for each of 6 layers"),
    ("deepseek4.attention.compress_ratios", (0, 4, 128, 8, 4, 128), "of layer 3 is 8: only 0, 4 and 128"),
    ("deepseek4.hash_layer_count", None, "hash_layer_count is missing|hash_layer_count' is missing"),
    ("qwen4exp.hyper_connection.count", 100, "is 100: must be from 2 to 64"),
    ("qwen4exp.attention.compress_ratios", (0, 0, 0, 7, 0, 0, 0, 8), "of layer 3 is 7"),
    ("qwen4exp.attention.compress_ratios", (8, 0, 0, 8, 0, 0, 0, 8), "of layer 0 is 8"),
    ("qwen4exp.attention.compress_ratios", (0, 0, 0, 8), "is an array of 4 values"),
    ("qwen4exp.ple.layers", (3,), r"is \[3\]: must be one layer, which has a state"),
    ("qwen4exp.ple.layers", (0, 1), "must be one layer"),
    ("qwen4exp.ple.ngram_size", 1, "is 1: must be from 2"),
    ("qwen4exp.ple.conv_kernel", 1, "is 1: must be at least 2"),
    ("qwen4exp.ple.head_offsets", (0, 1), "has 2 values: expected 8"),
    ("qwen4exp.ple.head_vocab_sizes", (0,) * 8, "has a 0"),
    ("qwen4exp.ple.layer_multipliers", (3,), "has 1 values: expected 3"),
    ("qwen4exp.ple.head_offsets", tuple(range(0, 80000, 10000)), rf"tensor {LOOKUP_TABLE}: shape"),
]


@pytest.mark.parametrize(("key", "value", "message"), DEFECTS)
def test_defects_are_named(key: str, value: int | tuple[int, ...] | None, message: str) -> None:
    source = original(FILES[key.split(".")[0]])
    entries = {k: e for k, e in source.keys._entries.items() if k != key}
    if value is not None:
        entries |= Keys.of({key: value}, "edited")._entries
    object.__setattr__(source, "keys", Keys(entries, Path(source.name)))
    with pytest.raises(UserError, match=message) as error:
        understand(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (V4, "blk.0.ffn_gate_tid2eid.weight"),
        (V4, "blk.1.exp_probs_b.bias"),
        (V4, "blk.1.indexer.proj.weight"),
        (V4, "blk.2.attn_compressor_ape.weight"),
        (V4, "output_hc_scale.weight"),
        (QWEN4, LOOKUP_TABLE),
        (QWEN4, "blk.1.ple_conv1d.weight"),
        (QWEN4, "blk.3.indexer.k_norm.weight"),
        (QWEN4, "blk.5.hc_ffn_inject.weight"),
    ],
)
def test_missing_tensors_are_named(name: str, tensor: str) -> None:
    with pytest.raises(UserError, match=rf"tensor {tensor} is missing".replace(".", r"\.")):
        understand(original(name).without([tensor]))


def test_a_table_of_experts_must_hold_whole_numbers() -> None:
    name = "blk.0.ffn_gate_tid2eid.weight"
    source = original(V4).with_array(name, np.zeros((512, 2), np.float32))
    with pytest.raises(UserError, match="is F32, expected I32"):
        understand(source)
    assert original(V4).tensors[name].type is TensorType.I32


def test_rotation_is_scaled_only_where_there_are_blocks() -> None:
    hp = understand(original(V4)).hparams
    assert isinstance(hp, DeepSeek4HParams)
    plain, scaled = hp.rope_of(0), hp.rope_of(1)
    assert (plain.base, plain.scaling, plain.magnitude) == (10000.0, "none", 1.0)
    assert (scaled.base, scaled.scaling, scaled.factor, scaled.magnitude) == (160000.0, "yarn", 8.0, 1.0)


def test_no_limit_stands_as_zero() -> None:
    source = original(V4).with_keys({"deepseek4.swiglu_clamp_exp": 0.0, "deepseek4.swiglu_clamp_shexp": None})
    hp = understand(source).hparams
    assert isinstance(hp, DeepSeek4HParams)
    assert [hp.expert_limit(i) for i in range(6)] == [None] * 6
    assert hp.shared_limits == (None,) * 6
