"""Decoding of a Qwen3-30B-A3B-shaped model (random weights) on one and two GPUs, experts resident and in host RAM.

    python benchmarks/gpu_decode.py [--layers 48] [--only TEXT ...] [--out FILE]
                                                needs 40 GB of free host RAM; about two minutes, and four for caches

One sequence is measured as `overspill bench -p 0 -n 64 -d 512` does; several at once after prompts of 512 tokens, each
with tokens of its own, 24 steps, through `LLM.run_wave`, without sampling. Prints a line of JSON per measurement.

Setups named "cached" keep that share of the experts on the GPUs, "zipf" ones draw the experts of tokens by that law
(`--routing`); others are routed by random weights, which is about uniform. --only: setups whose names contain a text.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from json_lines import note

from overspill import LLM
from overspill.bench.bench import Test, measure
from overspill.bench.synth import synthetic
from overspill.cache.cells import Segment
from overspill.pipeline.wave import Ubatch, Wave

_EXPERTS_MIB = 612  # of a layer: 128 experts of 3 x 768 x 2048 weights in Q8_0
N_SLOTS, DEPTH, N_STEPS, N_WARM = 16, 512, 24, 3


def several(llm: LLM, n_sequences: int) -> float:
    """Tokens per second of all sequences together."""
    random = np.random.default_rng(n_sequences)

    def step(i: int) -> None:
        ids = tuple(int(t) for t in random.integers(0, llm.hparams.n_vocab, n_sequences))
        segments = tuple(Segment(s, DEPTH + i, 1) for s in range(n_sequences))
        llm.run_wave(Wave((Ubatch(ids, segments, tuple(range(n_sequences))),)))

    for slot in range(n_sequences):
        ids = tuple(int(t) for t in random.integers(0, llm.hparams.n_vocab, DEPTH))
        llm.run_wave(Wave((Ubatch(ids, (Segment(slot, 0, DEPTH),)),)))
    for i in range(N_WARM):
        step(i)
    started = time.perf_counter()
    for i in range(N_STEPS):
        step(N_WARM + i)
    return n_sequences * N_STEPS / (time.perf_counter() - started)


def run(name: str, n_layer: int, **options: Any) -> Iterator[dict[str, Any]]:
    """All measurements of one placement."""
    sizes = {"n_ctx": N_SLOTS * 640, "n_parallel": N_SLOTS, "n_ubatch": DEPTH, "n_wave": DEPTH}
    with LLM(synthetic("qwen3-30b-a3b", quant="Q8_0", n_layer=n_layer), **sizes, **options) as llm:
        schedule = llm.plan.step_schedule(1)
        about = {"setup": name, "layers": n_layer, "shares": schedule.shares, "n_cached": schedule.n_cached}
        one = measure(llm, Test(0, 64, DEPTH), 3)
        rates = {"sequences": 1, "tokens_per_second": [round(x, 1) for x in one.samples_ts]}
        yield about | rates | {"predicted": round(one.predicted_ts, 1), "experts": one.counters["experts"]}
        for n in (4, 8, N_SLOTS):
            yield about | {"sequences": n, "tokens_per_second": [round(several(llm, n), 1)]}


def cached(share: float, n_layer: int) -> dict[str, Any]:
    """Options of a cache for this share of the experts."""
    return {"moe_cache_mib": int(share * _EXPERTS_MIB * n_layer) + 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    two = ",".join(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))
    setups: list[tuple[str, dict[str, Any]]] = [
        ("1 GPU, resident", {"devices": "cuda:0"}),
        ("1 GPU, experts host", {"devices": "cuda:0", "cpu_moe": True}),
    ]
    if "," in two:
        on_two = {"devices": two, "cpu_moe": True, "schedule": "breadth-first", "grain": 1}
        half, tenth = cached(0.5, args.layers), cached(0.1, args.layers)
        setups += [
            ("2 GPUs, resident", {"devices": two}),
            ("2 GPUs, experts host", on_two),
            ("2 GPUs, half cached, uniform", on_two | half | {"routing": "uniform"}),
            ("2 GPUs, half cached, zipf:1.0", on_two | half | {"routing": "zipf:1.0"}),
            ("2 GPUs, a tenth cached, uniform", on_two | tenth | {"routing": "uniform"}),
            ("2 GPUs, a tenth cached, zipf:1.0", on_two | tenth | {"routing": "zipf:1.0"}),
            ("2 GPUs, not cached, uniform", on_two | {"routing": "uniform"}),
            ("2 GPUs, not cached, zipf:1.0", on_two | {"routing": "zipf:1.0"}),
        ]
    setups = [setup for setup in setups if any(text in setup[0] for text in args.only)]
    for name, options in setups:
        for row in run(name, args.layers, **options):
            note(row, args.out)


if __name__ == "__main__":
    main()
