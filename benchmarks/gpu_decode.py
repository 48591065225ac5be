"""Decoding of a Qwen3-30B-A3B-shaped model (random weights) on one and two GPUs, experts resident and in host RAM.

    python benchmarks/gpu_decode.py [--layers 48] [--out FILE]      needs 40 GB of free host RAM; about two minutes

One sequence is measured as `overspill bench -p 0 -n 64 -d 512` does; several at once after prompts of 512 tokens, each
with tokens of its own, 24 steps, through `LLM.run_wave`, without sampling. Prints a line of JSON per measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overspill import LLM
from overspill.bench.bench import Test, measure
from overspill.bench.synth import synthetic
from overspill.cache.cells import Segment
from overspill.pipeline.wave import Ubatch, Wave

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


def run(name: str, n_layer: int, **options: Any) -> list[dict[str, Any]]:
    """All measurements of one placement."""
    sizes = {"n_ctx": N_SLOTS * 640, "n_parallel": N_SLOTS, "n_ubatch": DEPTH, "n_wave": DEPTH}
    with LLM(synthetic("qwen3-30b-a3b", quant="Q8_0", n_layer=n_layer), **sizes, **options) as llm:
        about = {"setup": name, "layers": n_layer, "shares": llm.plan.schedule_for(1).shares}
        one = measure(llm, Test(0, 64, DEPTH), 3)
        rows = [about | {"sequences": 1, "tokens_per_second": [round(x, 1) for x in one.samples_ts]}]
        return rows + [
            about | {"sequences": n, "tokens_per_second": [round(several(llm, n), 1)]} for n in (4, 8, N_SLOTS)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    two = ",".join(f"cuda:{i}" for i in range(min(2, torch.cuda.device_count())))
    setups: list[tuple[str, dict[str, Any]]] = [
        ("1 GPU, resident", {"devices": "cuda:0"}),
        ("1 GPU, experts host", {"devices": "cuda:0", "cpu_moe": True}),
    ]
    if "," in two:
        setups += [
            ("2 GPUs, resident", {"devices": two}),
            ("2 GPUs, experts host", {"devices": two, "cpu_moe": True, "schedule": "breadth-first", "grain": 1}),
        ]
    rows = [row for name, options in setups for row in run(name, args.layers, **options)]
    lines = "\n".join(map(json.dumps, rows))
    print(lines)
    if args.out:
        args.out.write_text(lines + "\n")


if __name__ == "__main__":
    main()
