"""Speed of the CPU kernels against what the machine can do: memory bandwidth for few tokens, torch's product for many.

    python benchmarks/cpu_kernels.py [--threads 1 2] [--types Q8_0 Q4_K] [--seconds 0.5]

Prints GB/s of weights read for one token, GFLOP/s for more, and milliseconds per call of a layer's routed experts.
Every figure is the best of as many calls as fit in the given time; "cold" figures include compiling.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import numpy as np
import torch

from overspill.gguf.types import TensorType
from overspill.kernels import numba as kernels
from overspill.quant.experts import Activation
from overspill.quant.qtensor import QTensor

COMMON = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "F16", "BF16", "F32")
# Bigger than any cache for one token, where reading it is what costs; smaller for many.
MATRIX, BIG_MATRIX = (8192, 2048), (65536, 2048)
LAYERS = {"128 experts, top-8, 2048 x 768": (128, 8, 2048, 768), "8 experts, top-2, 576 x 1536": (8, 2, 576, 1536)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--types", nargs="+", default=list(COMMON))
    parser.add_argument("--layer-types", nargs="+", default=["Q8_0", "Q4_K"])
    parser.add_argument("--seconds", type=float, default=0.5, help="time spent on each figure")
    args = parser.parse_args()
    print_start_up([TensorType[name] for name in args.types])
    for n_threads in args.threads:
        torch.set_num_threads(n_threads)
        kernels.use_threads(n_threads)
        print(f"\n{n_threads} threads; torch product {torch_gflops(args.seconds):.0f} GFLOP/s,", end=" ")
        print(f"reading memory {read_gb_per_s(args.seconds):.1f} GB/s")
        for name in args.types:
            print_matmul(TensorType[name], args.seconds)
        for layer, sizes in LAYERS.items():
            for name in args.layer_types:
                if sizes[2] % TensorType[name].block.n_elements == 0:
                    print_experts(layer, sizes, TensorType[name], args.seconds)


def best_s(call: Callable[[], object], seconds: float) -> float:
    """Shortest of the calls that fit in `seconds`, three at least."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def random_weight(type: TensorType, shape: tuple[int, ...]) -> QTensor:
    """Small random values: bytes 1 to 63, so that no scale, whatever its place, is special or tiny."""
    n_bytes = int(np.prod(shape[:-1])) * type.row_bytes(shape[-1])
    part = np.random.default_rng(0).integers(1, 64, size=min(n_bytes, 1 << 22), dtype=np.uint8)
    return QTensor.from_bytes(torch.from_numpy(np.resize(part, n_bytes)), type, shape)


def torch_gflops(seconds: float) -> float:
    a, b = torch.randn(1024, 2048), torch.randn(2048, 2048)
    return 2 * 1024 * 2048 * 2048 / best_s(partial(torch.mm, a, b), seconds) / 1e9


def read_gb_per_s(seconds: float) -> float:
    """The float32 kernel with one token does one product per number read: nothing but reading is left."""
    weight = random_weight(TensorType.F32, (1 << 15, 2048))
    x = torch.randn(1, 2048)
    return weight.n_bytes / best_s(partial(kernels.matmul, x, weight), seconds) / 1e9


def print_start_up(types: list[TensorType]) -> None:
    x = torch.randn(1, 256)
    for type in types:
        weight = random_weight(type, (8, 256))
        start = time.perf_counter()
        kernels.matmul(x, weight)
        print(f"first call with {type.name}: {time.perf_counter() - start:.2f} s")


def print_matmul(type: TensorType, seconds: float) -> None:
    big, x = random_weight(type, BIG_MATRIX), torch.randn(1, BIG_MATRIX[1])
    took = best_s(partial(kernels.matmul, x, big), seconds)
    figures = [f"1: {big.n_bytes / took / 1e9:5.1f} GB/s"]
    weight = random_weight(type, MATRIX)
    for n_tokens in (2, 4, 8, 16, 32, 128, 512):
        x = torch.randn(n_tokens, MATRIX[1])
        took = best_s(partial(kernels.matmul, x, weight), seconds)
        figures.append(f"{n_tokens}: {2 * n_tokens * MATRIX[0] * MATRIX[1] / took / 1e9:3.0f}")
    print(f"{type.name:5s} T -> GFLOP/s  {'  '.join(figures)}")


def print_experts(layer: str, sizes: tuple[int, int, int, int], type: TensorType, seconds: float) -> None:
    n_experts, n_used, n_model, n_hidden = sizes
    gate, up = (random_weight(type, (n_experts, n_hidden, n_model)) for _ in range(2))
    down = random_weight(type, (n_experts, n_model, n_hidden))
    figures = []
    for n_tokens in (1, 8, 32, 512):
        x, out = torch.randn(n_tokens, n_model), torch.zeros(n_tokens, n_model)
        routings = [torch.rand(n_tokens, n_experts).topk(n_used).indices for _ in range(16)]
        weights = torch.rand(n_tokens, n_used)
        turns = cycle(routings)
        took = best_s(partial(run_experts, x, (gate, up, down), turns, weights, out), seconds)
        gflops = 6 * n_tokens * n_used * n_model * n_hidden / took / 1e9
        n_read = len(routings[0].unique()) * (gate[0].n_bytes + up[0].n_bytes + down[0].n_bytes)
        figures.append(f"T={n_tokens}: {took * 1e3:.3f} ms ({gflops:.0f} GFLOP/s, {n_read / took / 1e9:.1f} GB/s)")
    print(f"{layer}, {type.name}:\n   {'   '.join(figures)}")


def run_experts(
    x: torch.Tensor,
    stacks: tuple[QTensor, QTensor, QTensor],
    turns: Iterator[torch.Tensor],
    weights: torch.Tensor,
    out: torch.Tensor,
) -> None:
    kernels.experts(x, *stacks, next(turns), weights, None, out, Activation.SILU)


if __name__ == "__main__":
    main()
