"""Keys and values of half the size or a quarter: less memory, nearly the same logits, decoding agrees with prefill."""

from __future__ import annotations

import gguf
import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.cache.cells import CellType
from overspill.cache.q8 import decode, encode
from overspill.device.base import MemoryKind
from overspill.errors import UserError
from overspill.hardware import precision_on
from overspill.options import Options
from overspill.placement.machine import DeviceSpec, Machine
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


def test_gpus_hold_bf16_only() -> None:
    device = DeviceSpec("cuda:0", 1 << 30, 1 << 30, 10.0, 1.0, 0)
    gpu = Machine(host_bytes=1 << 30, devices=(device,), h2d_total_gbps=10.0, peer_gbps=10.0, cpu_gbps=10.0)
    assert precision_on(gpu, Options()).kv == precision_on(gpu, Options(cache_type_k="bf16")).kv == torch.bfloat16
    for cells in ("f16", "q8_0"):
        with pytest.raises(UserError, match=f"-ctk {cells}: kernels of GPUs read bf16"):
            precision_on(gpu, Options(cache_type_k=cells))
