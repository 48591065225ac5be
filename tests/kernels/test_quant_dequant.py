"""`dequantize` against values that others computed (gguf-py, stored and live) and blocks worked out by hand."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from overspill.errors import UserError
from overspill.gguf.types import TensorType
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor

DATA = Path(__file__).parents[1] / "data" / "quants"
HAND_MADE = (TensorType.Q1_0, TensorType.Q2_0)  # gguf-py has no decoder for these two
NOT_STORED = (TensorType.Q8_1, TensorType.Q8_K)
FLOATS = [t for t in TensorType if not t.is_integer and t not in NOT_STORED]


def as_weight(raw: np.ndarray, type: TensorType, shape: tuple[int, ...]) -> QTensor:
    return QTensor.from_bytes(torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)), type, shape)


def stored_cases() -> list[tuple[str, str]]:
    return [(f, n[4:]) for f in ("random", "real") for n in np.load(DATA / f"blocks-{f}.npz") if n.startswith("raw_")]


@pytest.mark.parametrize(("file", "name"), stored_cases())
def test_equals_stored_values(file: str, name: str) -> None:
    arrays = np.load(DATA / f"blocks-{file}.npz")
    expected = arrays[f"deq_{name}"]
    got = dequantize(as_weight(arrays[f"raw_{name}"], TensorType[name], expected.shape)).numpy()
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected)
    same = got.view(np.int32) == expected.view(np.int32)
    assert (same | np.isnan(expected)).all()


@pytest.mark.parametrize("type", [t for t in FLOATS if t not in HAND_MADE], ids=lambda t: t.name)
def test_equals_gguf_py_on_random_bytes(type: TensorType) -> None:
    rng = np.random.default_rng(type)
    n_elements = 2 * 256
    raw = rng.integers(0, 256, size=(3, 5, type.row_bytes(n_elements)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type)) if type != TensorType.F64 else None
        expected = raw.view(np.float64).astype(np.float32) if expected is None else expected
    got = dequantize(as_weight(raw, type, (3, 5, n_elements)))
    assert got.shape == (3, 5, n_elements)
    np.testing.assert_array_equal(got.numpy(), expected.astype(np.float32))


def test_q1_0_by_hand() -> None:
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([0.5], np.float16).view(np.uint8)
    raw[2], raw[17] = 0b00000101, 0b10000000
    expected = np.full(128, -0.5, np.float32)
    expected[[0, 2, 127]] = 0.5
    np.testing.assert_array_equal(dequantize(as_weight(raw, TensorType.Q1_0, (1, 128))).numpy()[0], expected)


def test_q2_0_by_hand() -> None:
    raw = np.zeros(18, np.uint8)
    raw[:2] = np.array([0.5], np.float16).view(np.uint8)
    raw[2], raw[17] = 0b11100100, 0b01000000
    expected = np.full(64, -0.5, np.float32)
    expected[:4] = -0.5, 0.0, 0.5, 1.0
    expected[63] = 0.0
    np.testing.assert_array_equal(dequantize(as_weight(raw, TensorType.Q2_0, (1, 64))).numpy()[0], expected)


def test_a_view_of_one_expert_decodes_like_the_whole() -> None:
    raw = np.random.default_rng(0).integers(0, 256, size=(4, 3, TensorType.MXFP4.row_bytes(64)), dtype=np.uint8)
    experts = as_weight(raw, TensorType.MXFP4, (4, 3, 64))
    assert torch.equal(dequantize(experts[2]), dequantize(experts)[2])
    assert torch.equal(dequantize(experts.rows(1, 3)), dequantize(experts)[1:3])


def test_parts_of_a_big_tensor_join_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = np.random.default_rng(0).integers(0, 256, size=(7, TensorType.Q6_K.row_bytes(512)), dtype=np.uint8)
    weight = as_weight(raw, TensorType.Q6_K, (7, 512))
    whole = dequantize(weight)
    monkeypatch.setattr("overspill.quant.dequant._MAX_PART_ELEMENTS", 1024)
    torch.testing.assert_close(dequantize(weight), whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("type", [t for t in TensorType if t.is_integer or t in NOT_STORED], ids=lambda t: t.name)
def test_refuses_types_that_hold_no_weights(type: TensorType) -> None:
    n_elements = type.block.n_elements
    weight = as_weight(np.zeros(type.row_bytes(n_elements), np.uint8), type, (1, n_elements))
    with pytest.raises(UserError, match=type.name):
        dequantize(weight)
