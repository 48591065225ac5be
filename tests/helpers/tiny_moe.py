"""A very small random mixture-of-experts model, for tests that run thousands of waves.

Every tensor differs from every other, so weights of a wrong layer or expert change the logits. One expert's matrices
take 720 bytes each, which no alignment divides. All weights are values of bfloat16 too: dequantised slabs are exact.
"""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from overspill.gguf import GgufFile, open_gguf
from overspill.models.base import Model
from tests.helpers.plain import plain_model

N_LAYER, N_EXPERT, N_USED, N_VOCAB = 4, 4, 2, 40
_D, _F, _H, _G, _A = 20, 9, 2, 1, 8


@cache
def tiny_source() -> GgufFile:
    """The model as an open file (architecture qwen3moe, float32) that is there until the process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    _write(Path(folder.name) / "tiny-moe.gguf")
    return open_gguf(Path(folder.name) / "tiny-moe.gguf")


@cache
def tiny_model() -> Model:
    """The model in place on the CPU."""
    return plain_model(tiny_source())


def _write(path: Path) -> None:
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(256)
    writer.add_embedding_length(_D)
    writer.add_head_count(_H)
    writer.add_head_count_kv(_G)
    writer.add_key_length(_A)
    writer.add_value_length(_A)
    writer.add_expert_count(N_EXPERT)
    writer.add_expert_used_count(N_USED)
    writer.add_expert_feed_forward_length(_F)
    writer.add_vocab_size(N_VOCAB)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    rng = np.random.default_rng(1)
    for name, shape in _shapes():
        values = rng.normal(1.0, 0.25, shape) if len(shape) == 1 else rng.normal(0.0, 1.5 / shape[-1] ** 0.5, shape)
        writer.add_tensor(name, _rounded(values.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rounded(values: np.ndarray) -> np.ndarray:
    """The nearest smaller values that bfloat16 has."""
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def _shapes() -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (N_VOCAB, _D)),
        ("output_norm.weight", (_D,)),
        ("output.weight", (N_VOCAB, _D)),
    ]
    for i in range(N_LAYER):
        shapes += [
            (f"blk.{i}.attn_norm.weight", (_D,)),
            (f"blk.{i}.attn_q.weight", (_H * _A, _D)),
            (f"blk.{i}.attn_k.weight", (_G * _A, _D)),
            (f"blk.{i}.attn_v.weight", (_G * _A, _D)),
            (f"blk.{i}.attn_output.weight", (_D, _H * _A)),
            (f"blk.{i}.attn_q_norm.weight", (_A,)),
            (f"blk.{i}.attn_k_norm.weight", (_A,)),
            (f"blk.{i}.ffn_norm.weight", (_D,)),
            (f"blk.{i}.ffn_gate_inp.weight", (N_EXPERT, _D)),
            (f"blk.{i}.ffn_gate_exps.weight", (N_EXPERT, _F, _D)),
            (f"blk.{i}.ffn_up_exps.weight", (N_EXPERT, _F, _D)),
            (f"blk.{i}.ffn_down_exps.weight", (N_EXPERT, _D, _F)),
        ]
    return shapes
