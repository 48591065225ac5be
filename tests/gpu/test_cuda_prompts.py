"""Long and short prompts on GPUs: the same bits whatever the schedule, the devices, late streams or old memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from overspill import LLM
from overspill.bench.families import qwen3moe
from overspill.bench.synth import SyntheticModel
from overspill.device.cuda import CudaStream
from overspill.device.lane import Lane
from overspill.gguf.keys import Keys
from overspill.gguf.types import TensorType

N_VOCAB, N_UBATCH = 512, 4096
LENGTHS = (1, 94, 4097, 8193)
COMMON = {"n_ubatch": N_UBATCH, "n_wave": 3 * N_UBATCH, "n_ctx": 8448, "cpu_moe": True}
LONGEST_DELAY_CYCLES = 1_000_000

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@cache
def model() -> SyntheticModel:
    """Six layers of 16 experts, of which a token uses 8: with 8193 tokens, more pairs than 16 bits count."""
    values = dict(qwen3moe(6, 256, heads=(8, 2), n_ff=128, rope_base=1e6))
    values |= {"qwen3moe.expert_count": 16, "qwen3moe.vocab_size": N_VOCAB}
    return SyntheticModel("six layers", Keys.of(values, "six layers"), TensorType.Q8_0)


def ids_of(n: int, which: int = 0) -> list[int]:
    """One of two prompts of this length."""
    draw = random.Random(n + which * 1_000_003)
    return [draw.randrange(N_VOCAB) for _ in range(n)]


def poison(llm: LLM) -> None:
    """All that a run must write before it reads it becomes NaN, or id -1."""
    llm.runner.synchronize_host()
    for buffers in llm.runner._memory._buffers.values():
        for buffer in buffers:
            buffer.raw_bytes().fill_(0xFF)
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


def run(*, before: Callable[[LLM], None] = poison, **options: object) -> list[torch.Tensor]:
    """Logits of two prompts of each length, one after the other in the same engine.

    Each comes twice, in turn: with `record_prompts` one is issued, one recorded, both are replayed.
    """
    with LLM(model(), **COMMON, **options) as llm:
        results = []
        for n in LENGTHS:
            found = []
            for which in (0, 1, 0, 1):
                before(llm)
                found.append(llm.logits(ids_of(n, which)))
            assert torch.equal(found[0], found[2]), n
            assert torch.equal(found[1], found[3]), n
            assert not torch.equal(found[0], found[1]), n
            results += found[:2]
        return results


@pytest.fixture(scope="module")
def wanted() -> list[torch.Tensor]:
    return run(devices="cuda:0", schedule="breadth-first", policy="all", before=lambda llm: None)


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for n, a, b in zip(np.repeat(LENGTHS, 2), found, wanted, strict=True):
        assert a.isfinite().all(), n
        difference = (a - b).abs().amax(1)
        rows = difference.nonzero().flatten().tolist()
        ends, most = (rows[:1], rows[-1:]), float(difference.max())
        assert not rows, f"{n} tokens: {len(rows)} rows differ, {ends}, by up to {most}"


def test_prompts_against_the_cpu(wanted: list[torch.Tensor]) -> None:
    with LLM(model(), n_ctx=8448, n_ubatch=512, devices="cpu") as llm:
        for n, found in zip(LENGTHS[:3], wanted[::2], strict=False):
            p, q = F.log_softmax(llm.logits(ids_of(n)), -1), F.log_softmax(found, -1)
            assert float((p.exp() * (p - q)).sum(-1).median()) <= 1e-3, n


@pytest.mark.parametrize("schedule", ["serial", "depth-first"])
@pytest.mark.parametrize("policy", ["all", "selected"])
def test_schedules_of_one_gpu(schedule: str, policy: str, wanted: list[torch.Tensor]) -> None:
    assert_same(run(devices="cuda:0", schedule=schedule, policy=policy), wanted)


@needs_two
@pytest.mark.parametrize("schedule", ["serial", "depth-first", "breadth-first"])
@pytest.mark.parametrize("grain", [1, 3])
def test_two_gpus_equal_one(schedule: str, grain: int, wanted: list[torch.Tensor]) -> None:
    found = run(devices="cuda:0,cuda:1", schedule=schedule, grain=grain, policy="all")
    assert_same(found, wanted)


@contextmanager
def late(lane: Lane) -> Iterator[list[int]]:
    """Everything that is given to the streams of a lane starts late, by up to half a millisecond. Yields the delays."""
    draw, delays = random.Random(str(lane)), []

    def delayed(name: str) -> Callable[..., None]:
        real = getattr(CudaStream, name)

        def call(self: CudaStream, *args: object, **named: object) -> None:
            if self.lane is lane:
                delays.append(draw.randrange(LONGEST_DELAY_CYCLES))
                torch.cuda.set_stream(self.cuda)
                torch.cuda._sleep(delays[-1])
            real(self, *args, **named)

        return call

    names = ("launch", "copy", "upload", "replay")
    with patch.multiple(CudaStream, **{name: delayed(name) for name in names}):
        yield delays


@pytest.mark.parametrize("lane", list(Lane))
@pytest.mark.parametrize("schedule", ["depth-first", "breadth-first"])
def test_a_late_stream_changes_no_bit(lane: Lane, schedule: str, wanted: list[torch.Tensor]) -> None:
    devices = ",".join(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))
    with late(lane) as delays:
        found = run(devices=devices, schedule=schedule, grain=1, policy="all")
    assert len(delays) > 0 or (lane is Lane.HAND_OFF and devices == "cuda:0")
    assert_same(found, wanted)


@needs_two
@pytest.mark.parametrize("lane", list(Lane))
def test_a_late_stream_changes_no_bit_of_hand_offs_through_the_host(lane: Lane, wanted: list[torch.Tensor]) -> None:
    options = {"host_stage": "1", "host_stage_tile_mib": 1, "schedule": "breadth-first", "grain": 1, "policy": "all"}
    with late(lane) as delays:
        found = run(devices="cuda:0,cuda:1", **options)
    assert delays
    assert_same(found, wanted)
