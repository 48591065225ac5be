"""overspill against llama.cpp on the same GPUs and the same file, in one run.

    python benchmarks/gpu_vs_llamacpp.py --llama-bench PATH [--layers 48] [--only TEXT ...] [--prompts 128 ...]
                                         [--dir /dev/shm] [--out FILE]

Writes a random model of Qwen3-30B-A3B's shape in Q8_0 (32.5 GB), so both route alike, and measures prompts and 32
tokens of decoding with each program, one after the other: llama-bench with `-b 4096 -ub 4096 -fa on`, its experts in
host RAM by `-ncmoe`, the file read, not mapped; overspill with its own choice of schedule and policy. Needs 110 GB of
free host RAM; about a minute and a half a setup, of which loading is most. Prints a line of JSON per test.

Build the peer with CUDA: `cmake -B build -DGGML_CUDA=ON && cmake --build build -j --target llama-bench`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from json_lines import note
from model_file import write

from overspill import LLM
from overspill.bench.bench import Test, measure

SHAPE, QUANT = "qwen3-30b-a3b", "Q8_0"
PROMPTS = (32, 128, 512, 2048, 8192, 53248)
N_GEN, N_UBATCH, REPEATS = 32, 4096, 2
SETUPS: dict[str, tuple[int, bool]] = {
    "2 GPUs, experts host": (2, True),
    "1 GPU, experts host": (1, True),
    "2 GPUs, resident": (2, False),
    "1 GPU, resident": (1, False),
}
Rates = dict[str, list[float]]
"""Tokens per second of each repetition, by test."""


def of_llamacpp(program: Path, path: Path, n_gpus: int, is_host: bool, prompts: Sequence[int]) -> Rates:
    """What llama-bench measures."""
    sizes = ["-p", ",".join(map(str, prompts)), "-n", str(N_GEN), "-b", str(N_UBATCH), "-ub", str(N_UBATCH)]
    placed = ["-ngl", "99", "-ncmoe", "99" if is_host else "0", "-fa", "on", "-lm", "none"]
    command = [str(program), "-m", str(path), *sizes, *placed, "-r", str(REPEATS), "-o", "json"]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(n_gpus)))}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | visible)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-500:]}")
    return {_name(row["n_prompt"], row["n_gen"]): row["samples_ts"] for row in json.loads(done.stdout)}


def of_overspill(path: Path, n_gpus: int, is_host: bool, prompts: Sequence[int]) -> Rates:
    """The same tests with overspill, its plan's choices as they are."""
    devices = ",".join(f"cuda:{i}" for i in range(n_gpus))
    n_ctx = max(*prompts, N_GEN)
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "n_wave": n_ctx, "n_ubatch": min(N_UBATCH, n_ctx)}
    with LLM(path, devices=devices, cpu_moe=is_host, **sizes) as llm:
        tests = [Test(n, 0, 0) for n in prompts] + [Test(0, N_GEN, 0)]
        return {_name(t.n_prompt, t.n_gen): list(measure(llm, t, REPEATS).samples_ts) for t in tests}


def _name(n_prompt: int, n_gen: int) -> str:
    return f"pp{n_prompt}" if n_prompt else f"tg{n_gen}"


def compare(program: Path, path: Path, prompts: Sequence[int], name: str) -> Iterator[dict[str, Any]]:
    n_gpus, is_host = SETUPS[name]
    theirs = of_llamacpp(program, path, n_gpus, is_host, prompts)
    ours = of_overspill(path, n_gpus, is_host, prompts)
    for test, rates in ours.items():
        ratio = sum(rates) / len(rates) / (sum(theirs[test]) / len(theirs[test]))
        both = {"overspill": [round(r, 1) for r in rates], "llama.cpp": [round(r, 1) for r in theirs[test]]}
        yield {"setup": name, "test": test, **both, "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--only", nargs="*", default=[""])
    parser.add_argument("--prompts", nargs="*", type=int, default=list(PROMPTS))
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    path = args.dir / "overspill-vs.gguf"
    try:
        write(path, SHAPE, quant=QUANT, n_layer=args.layers)
        for name, (n_gpus, _) in SETUPS.items():
            if n_gpus > torch.cuda.device_count() or not any(text in name for text in args.only):
                continue
            for row in compare(args.llama_bench, path, args.prompts, name):
                note(row, args.out)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
