"""Times what the expert cache adds to a layer of a decoding step on one GPU: looking up, and filling slots.

    python benchmarks/gpu_cache_kernels.py      less than a minute; needs 2 GB of host RAM

One layer of qwen3-30b-a3b in Q8_0 (128 experts top-8), half of them in slots, whole experts and halves, one token. Each
row: microseconds in a CUDA graph of 16 calls. `divide` is what steps without a cache do instead of `look_up`. Filling
reads so many experts from pinned memory; its floor is the link's rate.
"""

from __future__ import annotations

import json
from functools import partial

import torch
from gpu_report import CUDA, graph_us

from overspill.device.cuda import pinned_memory
from overspill.gguf.types import TensorType
from overspill.kernels.sharing import CacheState
from overspill.kernels.triton import expert_cache, spread
from overspill.quant.experts import NO_VECTORS, ExpertWeights
from overspill.quant.qtensor import QTensor

E, K, F, D, N_CALLS = 128, 8, 768, 2048, 16
SHARES = [(0, 3), (1, 3), (2, 2)]


def host_experts() -> ExpertWeights:
    """All experts of a layer in pinned memory."""
    shapes = [(E, F, D), (E, F, D), (E, D, F)]
    sizes = [e * rows * TensorType.Q8_0.row_bytes(cols) for e, rows, cols in shapes]
    stacks = [
        QTensor.from_bytes(pinned_memory(n), TensorType.Q8_0, shape) for n, shape in zip(sizes, shapes, strict=True)
    ]
    return ExpertWeights(*stacks)


def empty(n_slices: int) -> CacheState:
    known = torch.full((4, E * n_slices), -1, dtype=torch.int32, device=CUDA)
    return CacheState(E // 2 * n_slices, n_slices, *known)


def fills(n_slices: int, first: int, n_parts: int) -> CacheState:
    """A state that wants so many slices fetched, from one on."""
    state = empty(n_slices)
    for i in range(n_parts):
        state.fills[(first + i) % (E * n_slices)] = i
    return state


def main() -> None:
    source = host_experts()
    expert_bytes = sum(part.data[0].numel() for part in source.parts)
    memory = torch.empty(E // 2 * expert_bytes + 192, dtype=torch.uint8, device=CUDA)
    ids = [torch.randperm(E, device=CUDA)[:K].int()[None] for _ in range(N_CALLS)]
    for n_slices in (1, 2):
        who = torch.empty(E * n_slices, dtype=torch.int32, device=CUDA)
        tally, state = torch.zeros(4, dtype=torch.int64, device=CUDA), empty(n_slices)
        us = graph_us([partial(spread.divide, i, SHARES, who, tally, n_slices, 2) for i in ids], N_CALLS)
        print(json.dumps({"name": "divide", "slices": n_slices, "us": round(us, 2)}))
        us = graph_us([partial(expert_cache.look_up, i, SHARES, who, tally, state, 2) for i in ids], N_CALLS)
        print(json.dumps({"name": "look_up", "slices": n_slices, "us": round(us, 2)}))
        for n_parts in (0, 1, 2, 3, 4, 8):
            states = [fills(n_slices, 8 * i, n_parts) for i in range(N_CALLS)]
            us = graph_us([partial(spread.fill, source, s, memory, NO_VECTORS) for s in states], N_CALLS)
            gb_s = round(n_parts / n_slices * expert_bytes / us / 1e3, 1)
            print(
                json.dumps(
                    {
                        "name": "fill",
                        "experts": n_parts / n_slices,
                        "slices": n_slices,
                        "us": round(us, 2),
                        "gb_s": gb_s,
                    }
                )
            )


if __name__ == "__main__":
    main()
