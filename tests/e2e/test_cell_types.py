"""Keys and values of half the size: half the memory, nearly the same logits, and decoding agrees with prefill."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.errors import UserError
from overspill.hardware import precision_on
from overspill.options import Options
from overspill.placement.machine import DeviceSpec, Machine
from tests.helpers.plain import DATA

IDS = [(37 * i + 5) % 480 for i in range(60)]
MODELS = ["qwen3moe", "gpt-oss", "deepseek_v3", "llama", "qwen2", "glm4_moe"]


def open_model(name: str, cells: str) -> LLM:
    options = {"devices": "cpu", "n_ctx": 128, "threads": 1, "n_ubatch": 32, "n_wave": 64}
    return LLM(DATA / "models" / f"{name}.gguf", cache_type_k=cells, cache_type_v=cells, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("cells", "relative"), [("f16", 0.003), ("bf16", 0.02)])
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
        assert kv[0] == 2 * kv[1]


def test_gpus_hold_bf16_only() -> None:
    device = DeviceSpec("cuda:0", 1 << 30, 1 << 30, 10.0, 1.0, 0)
    gpu = Machine(host_bytes=1 << 30, devices=(device,), h2d_total_gbps=10.0, peer_gbps=10.0, cpu_gbps=10.0)
    assert precision_on(gpu, Options()).kv == precision_on(gpu, Options(cache_type_k="bf16")).kv == torch.bfloat16
    with pytest.raises(UserError, match="-ctk f16: kernels of GPUs read bf16"):
        precision_on(gpu, Options(cache_type_k="f16"))
