"""Named shapes have the sizes of the models they are named after, and every one can be planned for."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from overspill.bench.shapes import SHAPES
from overspill.bench.synth import synthetic
from overspill.cache.cells import CellType
from overspill.commands.plan import make_plan
from overspill.models.check import understand
from overspill.models.describe import model_shape

# Billions of parameters, in all and used by a token (with the head, without the embedding). The first number is the
# published one, less vision and prediction layers, and plus a head where the model ties it to the embedding.
# Published of DeepSeek-V4-Flash: 284 and 13; of Qwen3.8-Flash-Next: 125 and a table of 51.2, and 6 without the head.
PUBLISHED = {
    "qwen3-30b-a3b": (30.5, 3.0),
    "qwen3-235b-a22b": (235.1, 21.6),
    "qwen3-vl-30b-a3b": (30.5, 3.0),
    "qwen3-vl-235b-a22b": (235.1, 21.6),
    "qwen3-next-80b-a3b": (79.7, 3.56),
    "qwen3.5-35b-a3b": (34.7, 2.95),
    "qwen3.5-122b-a10b": (122.1, 9.0),
    "qwen3.5-397b-a17b": (396.3, 16.3),
    "qwen3.5-27b": (26.9, 25.6),
    "qwen1.5-moe-a2.7b": (14.3, 2.4),
    "qwen2-57b-a14b": (57.4, 13.7),
    "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v2": (235.7, 20.9),
    "deepseek-v3": (671.0, 36.6),
    "kimi-k2": (1026.4, 31.7),
    "deepseek-v4-flash": (284.3, 13.3),
    "qwen3.8-flash-next": (176.9, 6.7),
    "kimi-linear-48b-a3b": (49.1, 3.1),
    "glm-4.5-air": (106.9, 12.8),
    "glm-4.5": (352.8, 32.8),
    "minimax-m2": (228.7, 10.4),
    "olmoe-1b-7b": (6.9, 1.2),
    "granite-3.1-1b-a400m": (1.4, 0.4),
    "granite-3.1-3b-a800m": (3.4, 0.9),
    "llama-4-scout": (107.8, 16.1),
    "llama-4-maverick": (400.7, 16.1),
    "mixtral-8x7b": (46.7, 12.7),
    "mixtral-8x22b": (140.6, 39.0),
    "llama-3.1-8b": (8.0, 7.5),
    "qwen2.5-7b": (7.6, 7.1),
    "qwen3-8b": (8.2, 7.6),
    "gemma-3-27b": (28.4, 27.0),
}
N_LATENT_CHANNELS = 512 + 64


def test_all_shapes_are_checked() -> None:
    assert PUBLISHED.keys() == SHAPES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    _, hp, specs, source = understand(synthetic(name, quant="Q8_0"))
    shape = model_shape(name, hp, specs, source.tensors)
    n_params = sum(prod(info.shape) for info in source.tensors.values())
    n_active = (sum(shape.flops_per_token) + shape.output_flops - 8 * sum(shape.state_bytes) / 4) / 2
    assert (round(n_params / 1e9, 1), n_active / 1e9) == pytest.approx(PUBLISHED[name], abs=0.06)


def test_latent_attention_keeps_one_key_for_all_heads() -> None:
    _, hp, specs, source = understand(synthetic("deepseek-v3", quant="Q8_0"))
    shape = model_shape("v3", hp, specs, source.tensors, cells=CellType.F16)
    assert shape.kv_bytes_per_cell == (2 * N_LATENT_CHANNELS,) * 61
    assert shape.attention_flops == (2.0 * 128 * (N_LATENT_CHANNELS + 512),) * 61


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan(name: str, tmp_path: Path) -> None:
    """Four devices, which hold a part of the experts of a large model, and a host for the rest."""
    device = {"total_bytes": 80 << 30, "free_bytes": 79 << 30, "h2d_gbps": 25.0, "tflops": 300.0}
    machine = {
        "host_bytes": 2 << 40,
        "devices": [{"name": f"CUDA{i}", **device} for i in range(4)],
        "h2d_total_gbps": 80.0,
        "peer_gbps": 50.0,
        "cpu_gbps": 200.0,
        "cpu_gflops": 2000.0,
    }
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine))
    made = make_plan(synthetic(name, quant="Q8_0"), path, {"n_ctx": 32768, "n_ubatch": 2048})
    is_large = made.plan.shape.total_bytes > 4 * device["total_bytes"]
    assert made.plan.has_host_experts == is_large
    assert made.plan.layout.n_layer == made.plan.shape.n_layer
    assert made.plan.predicted_tokens_per_second > 100
    assert made.decode_per_second > 1
