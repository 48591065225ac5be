"""What the GPU benchmarks share: timing next to a floor, random weights, errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.testing import do_bench

from overspill.gguf.types import TensorType
from overspill.quant.qtensor import QTensor

BF16 = torch.bfloat16
CUDA = torch.device("cuda")


def graph_us(calls: Sequence[Callable[[], object]], n_calls: int) -> float:
    """Microseconds of a call, of `n_calls` recorded in turn; the median of 5 replays after 2."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(n_calls):
            calls[i % len(calls)]()
    times = []
    for _ in range(7):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / n_calls)
    return sorted(times[2:])[2]


def median_us(run: Callable[[], object]) -> float:
    """Median time of a call on the device; the L2 cache is cleared between calls."""
    return 1e3 * float(do_bench(run, warmup=10, rep=60, return_mode="median"))


class Report:
    """Lines on the screen and rows for a file."""

    def __init__(self, tb_per_s: float, tflops: float) -> None:
        self._tb_per_s = tb_per_s
        self._tflops = tflops
        self.rows: list[dict[str, Any]] = []
        self.n_wrong = 0

    def add(
        self, name: str, run: Callable[[], object], *, n_bytes: float = 0, flop: float = 0, is_right: bool = True
    ) -> float:
        """Time a call; returns microseconds."""
        us = median_us(run)
        floor_us = max(n_bytes / self._tb_per_s, flop / self._tflops) / 1e6
        rate = f"{flop / us / 1e6:7.0f} TFLOP/s" if flop else f"{n_bytes / us / 1e3:7.0f} GB/s   "
        mark = "" if is_right else "   WRONG"
        self.n_wrong += not is_right
        print(f"{name:58s} {us:9.1f} us {rate}  floor {floor_us:8.1f} us {floor_us / us:4.0%}{mark}", flush=True)
        self.rows.append({"name": name, "us": us, "bytes": n_bytes, "flop": flop, "floor_us": floor_us, "ok": is_right})
        return us

    def note(self, text: str) -> None:
        """A line without a time."""
        print(text, flush=True)
        self.rows.append({"note": text})


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error by norm; NaN counts as infinite."""
    e = float((got.double() - wanted.double()).norm() / wanted.double().norm())
    return e if e == e else float("inf")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=CUDA, dtype=dtype)


def random_weight(type: TensorType, *shape: int) -> QTensor:
    """Random bytes: any value, NaN too."""
    size = (*shape[:-1], type.row_bytes(shape[-1]))
    return QTensor(torch.randint(0, 256, size, dtype=torch.uint8, device=CUDA), type, shape)


def q8_0(*shape: int) -> QTensor:
    """Finite Q8_0 values of about one hundredth."""
    q = random_weight(TensorType.Q8_0, *shape)
    blocks = q.data.unflatten(-1, (-1, 34))
    blocks[..., 0], blocks[..., 1] = 0, 6
    return q


def attention_flop(T: int, C: int, n_head: int, head_dim: int) -> float:
    """Of causal attention of the last T of C positions."""
    return 4.0 * n_head * head_dim * (T * (C - T) + T * (T + 1) / 2)
