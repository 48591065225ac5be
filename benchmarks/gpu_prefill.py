"""Prefill of a Qwen3-30B-A3B-shaped model (random weights) on one and two GPUs, experts in host RAM and resident.

    python benchmarks/gpu_prefill.py [--layers 48] [--only NAME ...] [--repetitions 2] [--out FILE]

Needs 40 GB of free host RAM; about five minutes. Rows: long prompts per setup; short ones on one loaded model: the
first of their lengths, the plan's choice, and each policy; prompts after steps that have filled a cache of half the
experts, which go without those, and on the same model prompts that do not; then memory per GPU as projected and as the
driver gave it away. `met` is the share of a layer's experts that a prompt's ids name: what `selected` uploads of them.
A line of JSON each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from json_lines import note

from overspill import LLM
from overspill.bench.bench import Test, measure
from overspill.bench.synth import synthetic
from overspill.cache.cells import Segment
from overspill.pipeline.schedule import Policy
from overspill.pipeline.wave import Ubatch, Wave

LONG, SHORT = (8192, 53248), (17, 32, 64, 128, 512, 2048)
CACHED, N_STEPS = 8192, 200
_EXPERTS_MIB = 612  # of a layer: 128 experts of 3 x 768 x 2048 weights in Q8_0
Row = dict[str, Any]


def row(llm: LLM, n_prompt: int, repetitions: int) -> Row:
    """One prompt's figures."""
    result = measure(llm, Test(n_prompt, 0, 0), repetitions)
    found = result.counters
    return {
        "pp": n_prompt,
        "tokens_per_second": [round(x) for x in result.samples_ts],
        "predicted": round(result.predicted_ts),
        "uploaded_gb": round(found["uploaded_bytes"] / 1e9, 2),
        "placed_gb": round(found["placed_bytes"] / 1e9, 2),
        "busy": {name: round(share, 3) for name, share in found["busy"].items()},
        "allocations": found["device_allocations_after_warmup"],
        "syncs": found["device_syncs_after_warmup"],
    }


def used_bytes() -> list[int]:
    """What the driver has given away of each GPU: to torch, for recordings, and for loaded kernels."""
    spaces = [torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]
    return [total - free for free, total in spaces]


def memory(llm: LLM, used_before: list[int]) -> Row:
    """Bytes per GPU, after the longest prompt. torch keeps what it was given, so this is the most there was."""
    budgets = llm.plan.placement.budgets[:-1]
    found = [after - before for after, before in zip(used_bytes(), used_before, strict=True)]
    return {
        "projected_gb": [round(b.used_bytes / 1e9, 2) for b in budgets],
        "measured_gb": [round(n / 1e9, 2) for n in found[: len(budgets)]],
        "projected_by_measured": [round(b.used_bytes / n, 3) for b, n in zip(budgets, found, strict=False)],
    }


def long_prompts(llm: LLM, repetitions: int) -> Iterator[Row]:
    for n in LONG:
        yield row(llm, n, repetitions)


def cached_prompts(llm: LLM, repetitions: int) -> Iterator[Row]:
    """Before steps, after them, and as if there were no cache."""
    plan = llm.plan
    yield {"cache": "empty", **row(llm, CACHED, repetitions)}
    for i in range(N_STEPS):
        llm.run_wave(Wave((Ubatch((i,), (Segment(0, i, 1),), (0,)),)))
    yield {"cache": "filled by steps", **row(llm, CACHED, repetitions)}
    llm.plan = replace(plan, schedule=replace(plan.schedule, n_cached=()))
    yield {"cache": "not used", **row(llm, CACHED, repetitions)}
    llm.plan = plan


def first_sights(llm: LLM) -> Iterator[Row]:
    """What prompts take whose kind of rows has not come before: the first is issued, the second recorded."""
    for n in SHORT[:2]:
        seconds = []
        for i in range(4):
            wave = Wave((Ubatch(tuple(range(100 * i, 100 * i + n)), (Segment(0, 0, n),), (n - 1,)),))
            begin = time.perf_counter()
            llm.run_wave(wave)
            seconds.append(round(time.perf_counter() - begin, 3))
        yield {"pp": n, "seconds": dict(zip(("issued", "recorded", "replayed", "again"), seconds, strict=True))}


def short_prompts(llm: LLM, repetitions: int) -> Iterator[Row]:
    """The plan's own choice, and the same without steps where it is one; then each policy."""
    yield from first_sights(llm)
    plan = llm.plan
    for n in SHORT:
        n_rows = plan.step_rows(n, n)
        chosen = plan.step_schedule(n_rows) if n_rows else plan.schedule_for(n)
        about = {"policy": "auto", "rows of a step": n_rows, "is": chosen.policy, "shares": chosen.shares}
        yield about | row(llm, n, repetitions)
        if n_rows:
            llm.plan = replace(plan, takes_steps=False)
            yield {"policy": "auto", "rows of a step": 0, **row(llm, n, repetitions)}
            llm.plan = plan
    tried = ((Policy.ALL, SHORT[3:]), (Policy.SPREAD, SHORT[:5]), (Policy.SELECTED, SHORT), (Policy.CPU, SHORT[:4]))
    for policy, lengths in tried:
        llm.plan = replace(plan, policy=policy)
        for n in lengths:
            found = row(llm, n, repetitions)
            met = (
                {"met": round(found["uploaded_gb"] * 1e9 / llm.host_expert_bytes, 3)}
                if policy is Policy.SELECTED
                else {}
            )
            yield {"policy": policy, **found, **met}
    llm.plan = plan


def setups(n_gpus: int, n_layer: int) -> dict[str, tuple[Callable[[LLM, int], Iterator[Row]], dict[str, Any]]]:
    long = {"n_ctx": LONG[-1], "n_wave": LONG[-1], "n_ubatch": 4096}
    one, two = {"devices": "cuda:0"}, {"devices": "cuda:0,cuda:1"}
    host = {"cpu_moe": True, "schedule": "breadth-first", "grain": 1}
    half = {"n_ctx": CACHED, "n_wave": CACHED, "moe_cache_mib": _EXPERTS_MIB * n_layer // 2 + 4}
    of_one = {
        "1 GPU, experts host": (long_prompts, one | long | host),
        "1 GPU, resident": (long_prompts, one | long),
        "1 GPU, half cached": (cached_prompts, one | host | half),
        "1 GPU, short": (short_prompts, one | {"cpu_moe": True, "n_ctx": 4096}),
    }
    of_two = {
        "2 GPUs, experts host": (long_prompts, two | long | host),
        "2 GPUs, half cached": (cached_prompts, two | host | half),
        "2 GPUs, short": (short_prompts, two | {"cpu_moe": True, "n_ctx": 4096}),
        "2 GPUs, experts host, depth-first": (
            long_prompts,
            two | long | {"cpu_moe": True, "schedule": "depth-first", "grain": 24},
        ),
    }
    return of_one if n_gpus < 2 else of_two | of_one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="setups by the beginnings of their names")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.init()
    for name, (rows, options) in setups(torch.cuda.device_count(), args.layers).items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        for i in range(torch.cuda.device_count()):
            torch.zeros(1, device=f"cuda:{i}")  # so that what a process takes in any case is there
        torch.cuda.empty_cache()
        used_before, about = used_bytes(), {"setup": name, "layers": args.layers}
        with LLM(synthetic("qwen3-30b-a3b", quant="Q8_0", n_layer=args.layers), **options) as llm:
            for found in rows(llm, args.repetitions):
                note(about | found, args.out)
            note(about | memory(llm, used_before), args.out)


if __name__ == "__main__":
    main()
