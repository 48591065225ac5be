"""`-ctk f16` and `-ctk q8_0` on GPUs: near the CPU's cells of that kind, the same bits replayed as issued, and on two
GPUs as on one; half the memory, as planned.

Models are those of `test_models_gpu`, one for each way in which cells are read: grouped heads, sinks and windows,
chunks, latent keys, blocks of keys, and states between.
"""

from __future__ import annotations

import pytest
import torch

from overspill import LLM, SamplingParams
from overspill.cache.cells import CellType
from overspill.device.base import MemoryKind
from overspill.pipeline.memory import Precision
from tests.gpu.test_models_gpu import ONE, TWO, Note, check_rounded, divergence, in_float32, issued, opened, replayed
from tests.helpers.decoding import N_CELLS, N_SLOTS, N_UBATCH, decoded
from tests.helpers.plain import plain_logits, plain_model
from tests.helpers.reference import Reference
from tests.helpers.rounded import BF16_OPS, rounded_experts
from tests.models.fixtures import Case, fixture

CELLS = [CellType.F16, CellType.Q8_0]
GROUPED = ["qwen3moe", "qwen2", "gpt-oss", "gemma3", "llama4"]
CASES = [Case(name) for name in (*GROUPED, "deepseek_v3", "qwen35", "deepseek_v4", "qwen4_exp")]
CHOOSY = ("deepseek_v4", "llama4")  # a choice of experts or blocks tips over, as it does with bf16 on the CPU


def expected(case: Case, cells: CellType, *, is_rounded: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt, and of the steps, by the plain model with such cells."""
    model = plain_model(case.source, BF16_OPS) if is_rounded else case.model
    prompt = plain_logits(model, case.expected("input_ids_1").tolist(), N_UBATCH, cells)
    return prompt, decoded(Reference(model, n_slots=N_SLOTS, n_cells=N_CELLS, cells=cells).run, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_but_for_bytes(case: Case, monkeypatch: pytest.MonkeyPatch, record_property: Note) -> None:
    """Rounding aside, the GPU's cells of q8_0 are the CPU's."""
    wanted = expected(case, CellType.Q8_0)
    with in_float32():
        monkeypatch.setattr("overspill.llm.precision_on", lambda machine, options: Precision(kv=torch.uint8))
        with opened(fixture(f"{case.name}.gguf"), ONE, cache_type_k="q8_0") as llm:
            found = llm.logits(case.expected("input_ids_1").tolist()), replayed(llm, case)
    for name, a, b in zip(("prompt", "steps"), wanted, found, strict=True):
        kl = divergence(a, b)
        record_property(name, f"KL median {float(kl.median()):.1e} max {float(kl.max()):.1e}")
        assert float(kl.median()) <= 1e-5
        assert case.name in CHOOSY or float(kl.mean()) <= 1e-4


@pytest.mark.parametrize("cells", CELLS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_the_engine_runs(case: Case, cells: CellType, record_property: Note) -> None:
    """As near to the CPU's cells of that kind as bfloat16 elsewhere lets it be; one GPU, two, and no recordings."""
    ids, path, options = case.expected("input_ids_1").tolist(), fixture(f"{case.name}.gguf"), {"cache_type_k": cells}
    with opened(path, ONE, **options) as llm:
        (budget, _), (gpu,) = llm.plan.placement.budgets, llm.devices.accelerators
        assert gpu.allocated_bytes[MemoryKind.KV] == budget.kv_bytes
        prompt, steps = llm.logits(ids), replayed(llm, case)
        with issued():
            again = replayed(llm, case)
    with rounded_experts():
        rounded = expected(case, cells, is_rounded=True)
    for name, *rows in zip(("prompt", "steps"), expected(case, cells), (prompt, steps), rounded, strict=True):
        check_rounded(name, *rows, record_property)
    assert torch.equal(steps, again), "replayed steps are not those that are issued"
    if torch.cuda.device_count() > 1:
        with opened(path, TWO, **options) as llm:
            assert torch.equal(llm.logits(ids), prompt), "two GPUs do not give the bits of one"
            assert torch.equal(replayed(llm, case), steps), "two GPUs do not give the steps of one"


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek_v3"])
def test_smaller_cells_take_less_memory(name: str) -> None:
    kv = {}
    for cells in ("auto", "f16", "q8_0"):
        with opened(fixture(f"{name}.gguf"), ONE, cache_type_k=cells) as llm:
            kv[cells] = llm.devices.accelerators[0].allocated_bytes[MemoryKind.KV]
    assert kv["f16"] == kv["auto"]
    assert 0.5 < kv["q8_0"] / kv["auto"] < 0.6


@pytest.mark.parametrize("cells", CELLS, ids=str)
def test_text_goes_on_from_kept_cells(cells: CellType) -> None:
    """A prompt that begins like one that was answered, and one whose slot was saved to host RAM in between."""
    ids = [(37 * i + 5) % 480 for i in range(80)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sizes = {"n_ctx": 128, "n_ubatch": 16, "n_wave": 64, "cache_ram_mib": 8, "prefix_reuse": "whole-ubatches"}
    with LLM(fixture("qwen3moe.gguf"), devices=ONE, cache_type_k=cells, **sizes) as llm:
        first = llm.generate(ids, greedy)
        again = llm.generate(ids, greedy)
        llm.generate(ids[::-1], greedy)
        restored = llm.generate(ids, greedy)
        assert llm.status.images.n_loaded == 1
    assert first.tokens == again.tokens == restored.tokens
