"""Computes the same prompts again and again, and tells where the first bits differ: to find what is not deterministic.

    python tools/same_bits.py [--devices cuda:0,cuda:1] [--schedule breadth-first] [--attention NAME] [--seconds 60]
                              [--processes 4] [--tokens 8193] [--record-prompts on]

Several processes at once take the devices from each other, which brings out faults of timing. Each runs two prompts in
turn, on memory full of NaN, and compares logits and the cells of all layers with those of the first time. A difference
is a line: which rows of the logits, then the first layer whose cells differ, and at which positions. The last line of a
process is JSON. Exit code 1 if anything differed. --attention: the way to compute it (`kernels.triton.attend`) where
several suit; otherwise each process measures and chooses, as the engine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from overspill import LLM
from overspill.bench.families import qwen3moe
from overspill.bench.synth import SyntheticModel
from overspill.gguf.keys import Keys
from overspill.gguf.types import TensorType

N_LAYER, N_VOCAB, N_UBATCH, MOST_TOLD = 6, 512, 4096, 4
Cells = list[list[torch.Tensor]]


def model() -> SyntheticModel:
    values = dict(qwen3moe(N_LAYER, 256, heads=(8, 2), n_ff=128, rope_base=1e6))
    values |= {"qwen3moe.expert_count": 16, "qwen3moe.vocab_size": N_VOCAB}
    return SyntheticModel("six layers", Keys.of(values, "six layers"), TensorType.Q8_0)


def wait(llm: LLM) -> None:
    llm.runner.synchronize_host()
    for i in range(torch.cuda.device_count()):
        torch.cuda.synchronize(i)


def poison(llm: LLM) -> None:
    wait(llm)
    for buffers in llm.runner._memory._buffers.values():
        for buffer in buffers:
            buffer.raw_bytes().fill_(0xFF)
    wait(llm)


def cells(llm: LLM) -> Cells:
    wait(llm)
    return [[buffer.raw().clone() for buffer in llm.runner._memory["kv", i]] for i in range(N_LAYER)]


def differences(found: torch.Tensor, wanted: torch.Tensor, now: Cells, before: Cells) -> Iterator[str]:
    largest = (found - wanted).abs().amax(1)
    rows = largest.nonzero().flatten().tolist()
    yield f"{len(rows)} rows of logits, {rows[:3]} to {rows[-2:]}, by up to {float(largest.max()):.3g}"
    for i, pair in enumerate(zip(now, before, strict=True)):
        differ = [(a.view(torch.uint8) != b.view(torch.uint8)).any(-1) for a, b in zip(*pair, strict=True)]
        if any(d.any() for d in differ):
            yield f"layer {i}: " + ", ".join(f"positions {d.nonzero()[:, -1].unique().tolist()[:8]}" for d in differ)
            return


def preferring(name: str) -> Any:
    """A chooser to which this way of computing attention is the fastest."""
    from overspill.kernels.triton import AttentionChooser
    from overspill.kernels.triton.attend import CANDIDATES

    (wanted,) = (c.attend for c in CANDIDATES if c.name == name)

    def timer(run: Callable[[], object]) -> float:
        assert isinstance(run, partial)
        return 1.0 if run.func is wanted else 1000.0

    return AttentionChooser(timer=timer)


def repeat(number: int, args: argparse.Namespace) -> int:
    """Runs whose results differ from those of the first time, of one process."""
    cpus = sorted(os.sched_getaffinity(0))
    own = cpus[number :: args.processes] or cpus
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))
    ids = np.random.default_rng(number).integers(0, N_VOCAB, (2, args.tokens)).tolist()
    options = {"devices": args.devices, "schedule": args.schedule, "grain": 1, "policy": "all", "cpu_moe": True}
    sizes = {"n_ubatch": N_UBATCH, "n_wave": 3 * N_UBATCH, "n_ctx": args.tokens + 64}
    first: dict[int, tuple[torch.Tensor, Cells]] = {}
    n_runs = n_differing = 0
    with LLM(model(), **options, **sizes, record_prompts=args.record_prompts) as llm:
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            which = n_runs % 2
            n_runs += 1
            poison(llm)
            found = llm.logits(ids[which]), cells(llm)
            wanted = first.setdefault(which, found)
            if torch.equal(found[0], wanted[0]):
                continue
            n_differing += 1
            if n_differing <= MOST_TOLD:
                for line in differences(found[0], wanted[0], found[1], wanted[1]):
                    print(f"process {number}, run {n_runs}: {line}", flush=True)
    print(json.dumps({"process": number, "attention": args.attention, "runs": n_runs, "differing": n_differing}))
    return n_differing


def one(number: int, args: argparse.Namespace) -> None:
    if args.attention is None:
        sys.exit(repeat(number, args) > 0)
    chooser = preferring(args.attention)
    with patch("overspill.kernels.triton.shared_chooser", lambda: chooser):
        sys.exit(repeat(number, args) > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default=",".join(f"cuda:{i}" for i in range(torch.cuda.device_count())) or "cpu")
    parser.add_argument("--schedule", default="breadth-first")
    parser.add_argument("--attention", choices=("cudnn", "torch_flash", "triton"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8193)
    parser.add_argument("--record-prompts", choices=("auto", "on", "off"), default="auto")
    args = parser.parse_args()
    processes = [
        multiprocessing.get_context("spawn").Process(target=one, args=(i, args)) for i in range(args.processes)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
