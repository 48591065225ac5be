"""Random blocks decode to the wanted distribution; a whole file has the names, shapes and keys of its architecture."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from overspill.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import synth_gguf  # noqa: E402

TINY = replace(
    synth_gguf.SHAPES["qwen3-30b-a3b"],
    n_layers=3,
    d_model=256,
    n_heads=4,
    n_kv_heads=2,
    d_head=64,
    n_experts=4,
    n_used=2,
    d_expert=512,
    n_vocab=300,
)


@pytest.mark.parametrize("type", synth_gguf.BLOCK_MAKERS)
def test_blocks_have_the_wanted_mean_and_deviation(type: str) -> None:
    blocks = synth_gguf.BLOCK_MAKERS[type](np.random.default_rng(3), 2000, 0.02)
    values = dequantize(blocks, GGMLQuantizationType[type])
    assert abs(values.mean()) < 0.0005
    assert 0.0195 < values.std() < 0.0208
    assert np.abs(values).max() < 0.06


@pytest.mark.parametrize("type", synth_gguf.BLOCK_MAKERS)
def test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str) -> None:
    monkeypatch.setitem(synth_gguf.SHAPES, "tiny", TINY)
    synth_gguf.synthesize(tmp_path / "a.gguf", shape="tiny", type=type, n_layers=1, seed=4)
    reader = GGUFReader(tmp_path / "a.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 3 + 12
    assert tensors["blk.0.ffn_down_exps.weight"].shape.tolist() == [512, 256, 4]
    assert tensors["blk.0.attn_k.weight"].shape.tolist() == [256, 128]
    assert {tensor.tensor_type.name for tensor in tensors.values()} == {type, "F32"}
    assert tensors["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"
    for name, gain in (("attn_output", 1.15), ("ffn_down_exps", 1.3), ("ffn_gate_inp", 1.5)):
        tensor = tensors[f"blk.0.{name}.weight"]
        std = dequantize(tensor.data, tensor.tensor_type).std() * np.sqrt(float(tensor.shape[0]))
        assert std == pytest.approx(gain, rel=0.06), name
    assert reader.fields["qwen3moe.block_count"].contents() == 1
    assert reader.fields["qwen3moe.expert_used_count"].contents() == 2
    assert len(set(reader.fields["tokenizer.ggml.tokens"].contents())) == 300


def test_seed_decides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synth_gguf.SHAPES, "tiny", TINY)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synth_gguf.synthesize(tmp_path / name, shape="tiny", type="Q8_0", seed=seed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--shape qwen9"):
        synth_gguf.synthesize(tmp_path / "a", shape="qwen9", type="Q8_0")
    with pytest.raises(UserError, match="--type Q3_K"):
        synth_gguf.synthesize(tmp_path / "a", shape="qwen3-30b-a3b", type="Q3_K")
    with pytest.raises(UserError, match="--layers 0"):
        synth_gguf.synthesize(tmp_path / "a", shape="qwen3-30b-a3b", type="Q8_0", n_layers=0)
