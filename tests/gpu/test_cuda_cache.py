"""Decoding with experts kept on GPUs: the numbers of decoding without them, and experts found there; and prompts that
find them there, with the bits of prompts that upload all."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.cache.cells import Segment
from overspill.pipeline.wave import Ubatch, Wave
from tests.gpu.test_cuda_prompts import COMMON, ids_of, model
from tests.helpers.plain import DATA

N_PROMPT, N_STEPS = 8, 40
LENGTHS = (4200, 8192)


def step_logits(devices: str, moe_cache_mib: str, n_sequences: int) -> tuple[torch.Tensor, dict[str, object]]:
    """Logits of steps with tokens that are given."""
    ids = torch.randint(0, 200, (n_sequences, N_PROMPT + N_STEPS), generator=torch.Generator().manual_seed(1)).tolist()
    sizes = {"n_ctx": 64 * n_sequences, "n_parallel": n_sequences, "n_ubatch": 32, "n_wave": 32}
    options = {"devices": devices, "cpu_moe": True, "moe_cache_mib": moe_cache_mib, "policy": "spread"}
    rows = []
    with LLM(DATA / "models" / "qwen3moe.gguf", **options, **sizes) as llm:
        assert any(llm.plan.placement.n_cached) == (moe_cache_mib != "0")
        for s, known in enumerate(ids):
            llm.run_wave(Wave((Ubatch(tuple(known[:N_PROMPT]), (Segment(s, 0, N_PROMPT),)),)))
        llm.reset_counters()
        for i in range(N_PROMPT, N_PROMPT + N_STEPS):
            segments = tuple(Segment(s, i, 1) for s in range(n_sequences))
            tokens = tuple(known[i] for known in ids)
            rows += llm.run_wave(Wave((Ubatch(tokens, segments, tuple(range(n_sequences))),)))
        counters = llm.counters()
    return torch.cat(rows), counters["experts"]


@pytest.mark.parametrize("n_sequences", [1, 3])
@pytest.mark.parametrize("n_devices", [1, 2])
def test_kept_experts_give_the_same_numbers(n_devices: int, n_sequences: int) -> None:
    if torch.cuda.device_count() < n_devices:
        pytest.skip("needs more GPUs")
    devices = ",".join(f"cuda:{i}" for i in range(n_devices))
    wanted, without = step_logits(devices, "0", n_sequences)
    got, counted = step_logits(devices, "auto", n_sequences)
    error = (got - wanted).norm() / wanted.norm()
    assert error < 2e-2
    assert without["hits"] == 0
    assert counted["hits"] > 0.5 * without["misses"]  # all experts have slots, and steps name them again and again
    assert counted["hits"] + counted["misses"] == without["misses"]


def devices_of(n_devices: int) -> str:
    if torch.cuda.device_count() < n_devices:
        pytest.skip("needs more GPUs")
    return ",".join(f"cuda:{i}" for i in range(n_devices))


def steps(llm: LLM, n: int) -> None:
    """Tokens that leave experts in slots."""
    for i, token in enumerate(ids_of(n)):
        llm.run_wave(Wave((Ubatch((token,), (Segment(0, i, 1),), (0,)),)))


def spoil_staging(llm: LLM) -> None:
    """What a prompt must write before it reads it becomes NaN."""
    llm.runner.synchronize_host()
    for (name, *_), buffers in llm.runner._memory._buffers.items():
        for buffer in buffers if name in ("slot", "wide") else ():
            buffer.raw_bytes().fill_(0xFF)
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


@pytest.fixture(scope="module")
def wanted() -> dict[int, torch.Tensor]:
    """Of all experts in host RAM, without a cache."""
    with LLM(model(), **COMMON, devices="cuda:0", schedule="breadth-first") as llm:
        return {n: llm.logits(ids_of(n)) for n in LENGTHS}


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.isfinite().all()
    assert torch.equal(found, wanted), f"{int((found != wanted).any(1).sum())} of {len(found)} rows differ"


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("schedule", ["depth-first", "breadth-first"])
@pytest.mark.parametrize("moe_cache_mib", ["6", "auto"])
def test_prompts_find_what_steps_have_left(
    n_devices: int, schedule: str, moe_cache_mib: str, wanted: dict[int, torch.Tensor]
) -> None:
    """Before all steps, after a few, and after more. 6 MiB: about ten of 16 experts; auto: all."""
    options = {"devices": devices_of(n_devices), "schedule": schedule, "grain": 1 if n_devices > 1 else 6}
    n_placed = []
    with LLM(model(), **COMMON, **options, moe_cache_mib=moe_cache_mib) as llm:
        assert any(llm.plan.placement.n_cached)
        for n_steps in (0, 3, 40):
            steps(llm, n_steps)
            for n in LENGTHS:
                spoil_staging(llm)
                llm.reset_counters()
                assert_same(llm.logits(ids_of(n)), wanted[n])
                counters = llm.counters()
                n_passes = -(-n // llm.sizes.n_ubatch) if schedule == "depth-first" else counters["waves"]
                all_bytes = n_passes * llm.host_expert_bytes
                assert counters["uploaded_bytes"] + counters["placed_bytes"] == all_bytes
                n_placed.append(counters["placed_bytes"] / all_bytes)
                assert counters["device_allocations_after_warmup"] == counters["device_syncs_after_warmup"] == 0
    assert n_placed[:2] == [0, 0]
    assert n_placed[-1] == n_placed[-2] > 0.4


@pytest.mark.parametrize("n_devices", [1, 2])
def test_prompts_of_resident_experts_have_the_same_bits(n_devices: int, wanted: dict[int, torch.Tensor]) -> None:
    with LLM(model(), **COMMON | {"cpu_moe": False}, devices=devices_of(n_devices)) as llm:
        assert llm.host_expert_bytes == 0
        for n in LENGTHS:
            assert_same(llm.logits(ids_of(n)), wanted[n])
