"""Measuring: prompt processing, generation, both together, at a depth; llama-bench's tests and definitions.

pp: a prompt of random ids (or of a text) through the pipeline, from the first token to the logits of the last. tg:
tokens one by one, no sampling, each waited for. pg: both in one timed region. A test at depth d first fills d cells,
outside the clock. Each test is warmed up by a whole run of its own shape, by two where the second is recorded. Rates
are the mean over repetitions of tokens / seconds, with the sample standard deviation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from overspill.cache.cells import Segment
from overspill.errors import UserError
from overspill.gguf.source import ModelSource
from overspill.llm import LLM
from overspill.options import options_from
from overspill.pipeline.simulate import WaveShape
from overspill.pipeline.wave import Ubatch, Wave


@dataclass(frozen=True)
class Test:
    """One line of a benchmark: `n_prompt` tokens at once, then `n_gen` one by one, after `n_depth` others."""

    n_prompt: int
    n_gen: int
    n_depth: int

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, pp512 @ d4096."""
        parts = [f"pp{self.n_prompt}"] * (self.n_prompt > 0) + [f"tg{self.n_gen}"] * (self.n_gen > 0)
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_gen


@dataclass(frozen=True)
class BenchRequest:
    """What to measure."""

    tests: tuple[Test, ...]
    schedules: tuple[str, ...]
    repetitions: int

    @classmethod
    def parse(
        cls, *, n_prompt: str, n_gen: str, pairs: Sequence[str], depths: str, schedules: str, repetitions: int
    ) -> BenchRequest:
        """From flag texts; a length of 0 leaves that kind out. `UserError` names the flag."""
        if repetitions < 1:
            raise UserError(f"-r {repetitions}: give at least 1")
        tests = []
        for depth in parse_numbers("-d", depths):
            tests += [Test(n, 0, depth) for n in parse_numbers("-p", n_prompt) if n]
            tests += [Test(0, n, depth) for n in parse_numbers("-n", n_gen) if n]
            tests += [Test(*parse_pair(pair), depth) for pair in pairs]
        if not tests:
            raise UserError("nothing to measure: give -p, -n or -pg a number above 0")
        for schedule in schedules.split(","):
            options_from({"schedule": schedule})
        return cls(tuple(tests), tuple(schedules.split(",")), repetitions)

    @property
    def n_ctx(self) -> int:
        """Cells the longest test needs."""
        return max(test.n_tokens + test.n_depth for test in self.tests)


@dataclass(frozen=True)
class Result:
    """One measured test. Times in ns per repetition; counters of the last repetition."""

    test: Test
    llm: dict[str, Any]
    samples_ns: tuple[int, ...]
    counters: Mapping[str, Any]
    predicted_ts: float
    test_time: str

    @property
    def samples_ts(self) -> tuple[float, ...]:
        return tuple(1e9 * self.test.n_tokens / ns for ns in self.samples_ns)

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return statistics.stdev(self.samples_ts) if len(self.samples_ts) > 1 else 0.0

    @property
    def avg_ns(self) -> int:
        return sum(self.samples_ns) // len(self.samples_ns)

    @property
    def stddev_ns(self) -> int:
        return int(statistics.stdev(self.samples_ns)) if len(self.samples_ns) > 1 else 0


def bench_all(
    source: ModelSource, request: BenchRequest, options: Mapping[str, Any], *, text: str | None = None
) -> Iterator[Result]:
    """Load once per schedule, measure every test."""
    for schedule in request.schedules:
        chosen = {"n_ctx": str(request.n_ctx), **options, "schedule": schedule}
        with LLM(source, **chosen) as llm:
            ids = _text_ids(llm, text) if text is not None else None
            for test in request.tests:
                yield measure(llm, test, request.repetitions, ids)


def measure(llm: LLM, test: Test, repetitions: int, ids: Sequence[int] | None = None) -> Result:
    """One test: warm up, then the repetitions. ids: take prompts from these instead of random."""
    if test.n_tokens + test.n_depth > llm.sizes.n_cells:
        raise UserError(f"{test.name} needs {test.n_tokens + test.n_depth} cells, the context has {llm.sizes.n_cells}")
    started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    is_recorded = llm.plan.schedule.is_recorded or llm.plan.takes_steps
    samples, n_warm_ups = [], 2 if is_recorded else 1
    for i in range(repetitions + n_warm_ups):
        prompt = _ids(llm, test, ids, i)
        _run_prompt(llm, prompt[: test.n_depth], first_pos=0)
        llm.runner.synchronize_host()
        llm.reset_counters()
        begin = time.perf_counter_ns()
        _run_prompt(llm, prompt[test.n_depth : test.n_depth + test.n_prompt], first_pos=test.n_depth)
        _generate(llm, prompt[test.n_depth + test.n_prompt :], first_pos=test.n_depth + test.n_prompt)
        if i >= n_warm_ups:
            samples.append(time.perf_counter_ns() - begin)
    return Result(test, _facts(llm), tuple(samples), llm.counters(), _predict(llm, test), started)


def _ids(llm: LLM, test: Test, ids: Sequence[int] | None, repetition: int) -> list[int]:
    """Other random ones in each repetition, so that none finds what the one before has left in a cache."""
    n = test.n_depth + test.n_tokens
    if ids is None:
        return [int(t) for t in np.random.default_rng(repetition).integers(0, llm.hparams.n_vocab, n)]
    return [ids[i % len(ids)] for i in range(n)]


def _text_ids(llm: LLM, text: str) -> list[int]:
    ids = llm.tokenizer.encode(text)
    if not ids:
        raise UserError("--text: the text has no tokens")
    return ids


def _run_prompt(llm: LLM, ids: Sequence[int], *, first_pos: int) -> None:
    n, last = llm.sizes.n_ubatch, len(ids) - 1
    ubatches = []
    for i in range(0, len(ids), n):
        piece = tuple(ids[i : i + n])
        wanted = (last - i,) if i + len(piece) > last else ()
        ubatches.append(Ubatch(piece, (Segment(0, first_pos + i, len(piece)),), wanted))
    k = llm.sizes.n_ubatches
    for i in range(0, len(ubatches), k):
        llm.run_wave(Wave(tuple(ubatches[i : i + k])))


def _generate(llm: LLM, ids: Sequence[int], *, first_pos: int) -> None:
    for i, token in enumerate(ids):
        llm.run_wave(Wave((Ubatch((token,), (Segment(0, first_pos + i, 1),), (0,)),)))


def _predict(llm: LLM, test: Test) -> float:
    n_us = llm.plan.prompt_us(test.n_prompt, test.n_depth)
    if test.n_gen:
        middle = test.n_depth + test.n_prompt + test.n_gen // 2
        n_us += test.n_gen * llm.plan.predict(WaveShape.of_step(1, middle)).wave_us
    return 1e6 * test.n_tokens / n_us


def _facts(llm: LLM) -> dict[str, Any]:
    placed = llm.plan.placement
    return {
        "model_filename": llm.source.name,
        "model_type": llm.hparams.arch,
        "model_size": llm.plan.shape.total_bytes,
        "model_n_params": sum(int(np.prod(info.shape)) for info in llm.source.tensors.values()),
        "backends": ",".join(sorted({d.name.split(":")[0] for d in llm.devices.all})),
        "devices": "/".join(d.name for d in llm.devices.accelerators) or "cpu",
        "n_threads": llm.n_threads,
        "n_batch": placed.n_wave,
        "n_ubatch": placed.n_ubatch,
        "n_gpu_layers": sum(1 for d in placed.layer_device if d != placed.host_index),
        "n_cpu_moe": sum(1 for slabs in llm.plan.layout.slabs if slabs),
        "schedule": llm.plan.schedule.order.value,
        "grain": placed.grain,
        "n_wave": placed.n_wave,
    }


def parse_numbers(flag: str, text: str) -> list[int]:
    """Whole numbers, none below 0, of a flag's text."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text}: give whole numbers separated by ','") from None
    if min(numbers) < 0:
        raise UserError(f"{flag} {text}: give numbers of at least 0")
    return numbers


def parse_pair(text: str) -> tuple[int, int]:
    """The two lengths of -pg."""
    numbers = parse_numbers("-pg", text)
    if len(numbers) != 2 or sum(numbers) == 0:
        raise UserError(f"-pg {text}: give two numbers, prompt and generated, as in 512,128")
    return numbers[0], numbers[1]
