"""Keys and values of half the size or a quarter: less memory, nearly the same logits, decoding agrees with prefill."""

from __future__ import annotations

import gguf
import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.cache.cells import CellType
from overspill.device.base import MemoryKind
from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.hardware import precision_on
from overspill.models.check import understand
from overspill.needs import needs_on, shape_for
from overspill.options import Options
from overspill.placement.machine import DeviceSpec, Machine
from overspill.quant.q8_rows import decode, encode
from tests.helpers.plain import DATA, SHARED
from tests.models.fixtures import fixture

TRAINED = SHARED / "trained" / "tinycode-moe-Q4_0.gguf"
IDS = [(37 * i + 5) % 480 for i in range(60)]
HYBRIDS = ["qwen35", "qwen3next-mtp", "kimi_linear"]
MODELS = ["qwen3moe", "gpt-oss", "deepseek_v3", "llama", "qwen2", "glm4_moe"]


def open_model(name: str, cells: str) -> LLM:
    options = {"devices": "cpu", "n_ctx": 128, "threads": 1, "n_ubatch": 32, "n_wave": 64}
    return LLM(fixture(f"{name}.gguf"), cache_type_k=cells, cache_type_v=cells, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("cells", "relative"), [("f16", 0.003), ("bf16", 0.02), ("q8_0", 0.03)])
def test_logits_are_nearly_those_of_float32(name: str, cells: str, relative: float) -> None:
    with open_model(name, "auto") as wide, open_model(name, cells) as narrow:
        want, got = wide.logits(IDS), narrow.logits(IDS)
        errors = (got - want).norm(dim=1) / want.norm(dim=1)
        # Where a router's choice is close, a rounding picks another expert, and all that follows sees it.
        assert errors.quantile(0.25) < relative
        assert not torch.equal(got, want)
        tokens = narrow.generate(IDS, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)).tokens
        again = narrow.logits([*IDS, *tokens])[len(IDS) - 1 : -1]
        best = again.max(dim=1).values
        assert bool((best - again[torch.arange(20), torch.tensor(tokens)] < 0.05).all())
        kv = [sum(b.kv_bytes for b in llm.plan.placement.budgets) for llm in (wide, narrow)]
        assert kv[1] / kv[0] == pytest.approx(34 / 128 if cells == "q8_0" else 0.5, rel=0.08 if cells == "q8_0" else 0)
        assert narrow.devices.host.allocated_bytes[MemoryKind.KV] == kv[1]


def kl(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Of each row, in nats."""
    p, q = want.double().log_softmax(-1), got.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("name", [*HYBRIDS, "deepseek_v4", "qwen4_exp", "gemma3", "llama4", "qwen2"])
def test_q8_0_is_close_to_f16_in_every_kind_of_attention(name: str) -> None:
    """Latent keys, windows, chunks, blocks of keys, recurrent layers between; KL to float16 cells in nats."""
    with open_model(name, "f16") as half, open_model(name, "q8_0") as narrow:
        divergence = kl(half.logits(IDS), narrow.logits(IDS))
    assert 0 < float(divergence.median()) < 1e-2
    if name not in ("deepseek_v4", "llama4"):  # where a choice of experts or blocks tips over, as it does with bf16
        assert float(divergence.mean()) < 2e-3


@pytest.mark.slow
@pytest.mark.skipif(not TRAINED.is_file(), reason="the trained model is not here: 30 MB, not in the project")
def test_q8_0_on_a_model_that_was_trained() -> None:
    """Text of its own kind, 512 tokens: the distribution hardly moves, and the best token stays."""
    with LLM(TRAINED, devices="cpu", n_ctx=512, cache_type_k="f16") as half:
        ids = half.tokenizer.encode(TRAINED.with_name("tinycode-moe.txt").read_text())[:500]
        want = half.logits(ids)
    with LLM(TRAINED, devices="cpu", n_ctx=512, cache_type_k="q8_0") as narrow:
        got = narrow.logits(ids)
    assert float(kl(want, got).mean()) < 1e-3
    assert float((want.argmax(-1) == got.argmax(-1)).float().mean()) > 0.97


@pytest.mark.parametrize("devices", ["none", "virtual:2"])
def test_what_attention_decodes_is_in_the_plan(devices: str) -> None:
    """Cells of one sequence of one layer in float32, on every device that computes layers."""
    path = DATA / "models" / "qwen3moe.gguf"
    compute = []
    for cells in ("f32", "q8_0"):
        with LLM(path, devices=devices, n_ctx=128, n_parallel=2, n_ubatch=32, n_wave=64, cache_type_k=cells) as llm:
            compute.append([budget.compute_bytes for budget in llm.plan.placement.budgets])
    more = [b - a for a, b in zip(*compute, strict=True)]
    n_bytes = 64 * 2 * (32 + 32) * 4
    assert more == ([n_bytes] if devices == "none" else [n_bytes, n_bytes, 0])


@pytest.mark.parametrize("n_values", [2, 32, 48, 64, 100])
def test_rows_of_q8_0_are_those_of_the_format(n_values: int) -> None:
    """By the gguf package, where the row is whole groups; each value within half a step of its group otherwise."""
    x = torch.randn(3, 5, n_values, generator=torch.Generator().manual_seed(n_values)) * 10
    x[1, 2] = 0
    rows = encode(x)
    assert rows.shape == (3, 5, CellType.Q8_0.row_bytes(n_values))
    back = decode(rows, n_values)
    groups = range(0, n_values, 32)
    for first in groups:
        part = slice(first, min(first + 32, n_values))
        step = x[..., part].abs().amax(-1, keepdim=True) / 127
        assert bool(((back - x)[..., part].abs() <= step * 0.51 + x[..., part].abs() * 2e-3).all())
    if n_values % 32 == 0:
        raw = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
        torch.testing.assert_close(back, torch.from_numpy(expected), rtol=0, atol=0)


def gpu_machine() -> Machine:
    device = DeviceSpec("cuda:0", 1 << 34, 1 << 34, 10.0, 1.0, 0)
    return Machine(host_bytes=1 << 34, devices=(device,), h2d_total_gbps=10.0, peer_gbps=10.0, cpu_gbps=10.0)


def test_gpus_hold_what_the_user_says() -> None:
    gpu = gpu_machine()
    kinds = {"auto": torch.bfloat16, "bf16": torch.bfloat16, "f16": torch.float16, "q8_0": torch.uint8}
    for asked, dtype in kinds.items():
        assert precision_on(gpu, Options(cache_type_k=asked)).kv == dtype
    with pytest.raises(UserError, match="-ctk f32: kernels of GPUs read f16, bf16 and q8_0"):
        precision_on(gpu, Options(cache_type_k="f32"))


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek_v3"])
def test_a_plan_for_gpus_counts_smaller_cells_and_what_prompts_read(name: str) -> None:
    """q8_0 has a byte for each value and two for 32; prompts read float16, of one sequence and one layer."""
    gpu = gpu_machine()
    _, hp, specs, source = understand(open_gguf(fixture(f"{name}.gguf")))
    shapes = [hp.kv_shape(i) for i in range(hp.n_layer)]
    dims = [[s.key_dim, s.value_dim] if s.has_values else [s.key_dim] for s in shapes]
    wide = [s.n_heads * sum(n) for s, n in zip(shapes, dims, strict=True)]
    narrow = [s.n_heads * sum(n + 2 * -(-n // 32) for n in d) for s, d in zip(shapes, dims, strict=True)]
    sizes = {}
    for cells in ("bf16", "f16", "q8_0"):
        options = Options(cache_type_k=cells, cache_type_v=cells)
        shape = shape_for(gpu, options, source, hp, specs)
        sizes[cells] = shape.kv_bytes_per_cell, needs_on(gpu, options, hp, specs)(512)
    assert sizes["f16"][0] == sizes["bf16"][0] == tuple(2 * n for n in wide)
    assert sizes["q8_0"][0] == tuple(narrow)
    assert sizes["q8_0"][1].read_cell_bytes == 2 * max(wide)
    assert sizes["f16"][1].read_cell_bytes == sizes["bf16"][1].read_cell_bytes == 0
