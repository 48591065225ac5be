"""The upcycled file: same weights, stacked; same metadata plus the expert keys; a live, seeded router."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from overspill.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from upcycle import upcycle  # noqa: E402

DENSE = ROOT / "tests" / "data" / "models" / "llama.gguf"
N_LAYERS, D, F = 4, 64, 160
FFN_SHAPES = {"gate": (F, D), "up": (F, D), "down": (D, F)}


def tensors(path: Path) -> dict[str, ReaderTensor]:
    return {tensor.name: tensor for tensor in GGUFReader(path).tensors}


def fields(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}


def values(tensor: ReaderTensor) -> np.ndarray:
    return dequantize(tensor.data, tensor.tensor_type)


def shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upcycle") / "kept.gguf"
    upcycle(DENSE, path, n_experts=3, n_used=2, type="keep", seed=5)
    return path


def test_every_expert_is_the_dense_block(kept: Path) -> None:
    dense, moe = tensors(DENSE), tensors(kept)
    for layer in range(N_LAYERS):
        for part, dense_shape in FFN_SHAPES.items():
            stacked = moe[f"blk.{layer}.ffn_{part}_exps.weight"]
            assert shape(stacked) == (3, *dense_shape)
            for expert in stacked.data:
                np.testing.assert_array_equal(expert, dense[f"blk.{layer}.ffn_{part}.weight"].data)
            assert f"blk.{layer}.ffn_{part}.weight" not in moe


def test_other_tensors_keep_their_bytes(kept: Path) -> None:
    dense, moe = tensors(DENSE), tensors(kept)
    others = {name for name in dense if not name.endswith(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"))}
    assert len(others) == 28
    for name in others:
        assert moe[name].tensor_type == dense[name].tensor_type
        np.testing.assert_array_equal(moe[name].data, dense[name].data)
    assert len(moe) == len(others) + 4 * N_LAYERS


def test_metadata_is_kept_but_for_the_expert_keys_and_the_name(kept: Path) -> None:
    expected = fields(DENSE)
    expected["general.name"] = "tiny-random llama (upcycled: 3 experts, top-2)"
    expected["llama.expert_count"] = 3
    expected["llama.expert_used_count"] = 2
    assert fields(kept) == expected


def test_router_is_random_per_layer_and_scaled_to_its_norm(kept: Path, tmp_path: Path) -> None:
    moe = tensors(kept)
    routers = [values(moe[f"blk.{layer}.ffn_gate_inp.weight"]) for layer in range(N_LAYERS)]
    assert all(router.shape == (3, D) and router.dtype == np.float32 for router in routers)
    norms = [moe[f"blk.{layer}.ffn_norm.weight"].data for layer in range(N_LAYERS)]
    assert 0.9 < np.std(routers) * np.sqrt(D * np.mean(np.square(norms))) / 2 < 1.1
    assert not np.array_equal(routers[0], routers[1])
    other = tmp_path / "seed6.gguf"
    upcycle(DENSE, other, n_experts=3, n_used=2, type="keep", seed=6)
    assert not np.array_equal(values(tensors(other)["blk.0.ffn_gate_inp.weight"]), routers[0])


def test_same_seed_gives_the_same_file(kept: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    upcycle(DENSE, again, n_experts=3, n_used=2, type="keep", seed=5)
    assert again.read_bytes() == kept.read_bytes()


def test_dense_twin_kept_is_the_same_file(tmp_path: Path) -> None:
    upcycle(DENSE, tmp_path / "dense.gguf", n_experts=0, type="keep")
    assert fields(tmp_path / "dense.gguf") == fields(DENSE)
    assert (tmp_path / "dense.gguf").read_bytes() == DENSE.read_bytes()


@pytest.mark.parametrize(("type", "file_type", "step"), [("Q8_0", 7, 1 / 127), ("Q4_1", 3, 1 / 15)])
def test_types(tmp_path: Path, type: str, file_type: int, step: float) -> None:
    """All matrices have the type (the two ends Q8_0), both twins the same bytes, values within half a step."""
    upcycle(DENSE, tmp_path / "moe.gguf", n_experts=2, n_used=1, type=type)
    upcycle(DENSE, tmp_path / "twin.gguf", n_experts=0, type=type)
    dense, twin, moe = tensors(DENSE), tensors(tmp_path / "twin.gguf"), tensors(tmp_path / "moe.gguf")
    assert fields(tmp_path / "moe.gguf")["general.file_type"] == file_type
    for name in ("token_embd.weight", "output.weight"):
        assert moe[name].tensor_type.name == twin[name].tensor_type.name == "Q8_0"
    for name in ("blk.1.attn_q.weight", "blk.1.ffn_down.weight"):
        stacked = moe[name.replace("ffn_down", "ffn_down_exps")]
        assert stacked.tensor_type.name == twin[name].tensor_type.name == type
        assert all(np.array_equal(part, twin[name].data) for part in stacked.data.reshape(-1, *twin[name].data.shape))
        original = values(dense[name])
        spread = np.ptp(original.reshape(-1, 32), axis=1).max()
        assert np.abs(values(twin[name]) - original).max() < 0.51 * step * spread
    assert moe["blk.1.attn_norm.weight"].tensor_type.name == "F32"
    assert moe["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_dequantised_twin_holds_the_values_of_the_quantised_one(tmp_path: Path) -> None:
    upcycle(DENSE, tmp_path / "q4_1.gguf", n_experts=0, type="Q4_1")
    upcycle(tmp_path / "q4_1.gguf", tmp_path / "f32.gguf", n_experts=0, type="F32")
    quantised, floats = tensors(tmp_path / "q4_1.gguf"), tensors(tmp_path / "f32.gguf")
    assert {tensor.tensor_type.name for tensor in floats.values()} == {"F32"}
    for name, tensor in quantised.items():
        np.testing.assert_array_equal(floats[name].data, values(tensor))
    assert fields(tmp_path / "f32.gguf") == fields(DENSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "Q3_K"}, "--type Q3_K"),
        ({"n_experts": 1}, "--experts 1"),
        ({"n_experts": -1}, "--experts -1"),
        ({"n_experts": 4, "n_used": 5}, "--top-k 5"),
        ({"n_used": 0}, "--top-k 0"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        upcycle(DENSE, tmp_path / "out.gguf", **options)
    assert list(tmp_path.iterdir()) == []


def test_bad_sources_are_refused(tmp_path: Path, kept: Path) -> None:
    (tmp_path / "text.gguf").write_text("no model at all, but long enough for a header")
    with pytest.raises(UserError, match=r"missing\.gguf: cannot be read"):
        upcycle(tmp_path / "missing.gguf", tmp_path / "out.gguf")
    with pytest.raises(UserError, match=r"text\.gguf: not a readable GGUF"):
        upcycle(tmp_path / "text.gguf", tmp_path / "out.gguf")
    with pytest.raises(UserError, match="only dense 'llama' files"):
        upcycle(kept, tmp_path / "out.gguf")
    with pytest.raises(UserError, match="is the input file"):
        upcycle(kept, kept)


def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "upcycle.py"), str(DENSE), str(tmp_path / "out.gguf")]
    subprocess.run([*command, "--experts", "4", "--top-k", "1", "--type", "keep"], check=True)
    assert fields(tmp_path / "out.gguf")["llama.expert_count"] == 4
    refused = subprocess.run([*command, "--experts", "1"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "--experts 1" in refused.stderr
