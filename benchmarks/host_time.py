"""Host time of prefill: what Python, torch and launches take per layer and ubatch, whatever the GPU computes.

    python benchmarks/host_time.py [--ubatches 16] [--layers 24] [--profile 30] [--out FILE]

A small model (so that a device is never the slower side), experts in host RAM, breadth-first. A prompt's work is issued
when it is first seen, recorded beside that the second time, and replayed from then on. On a machine with a GPU
everything is real. Without one, torch's streams and events, Triton's kernels and the large products are replaced by
nothing: what is left is the Python of this project, and torch's own at about the cost that it has for a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from overspill import LLM
from overspill.bench.families import qwen3moe
from overspill.bench.synth import SyntheticModel
from overspill.cache.cells import Segment
from overspill.gguf.keys import Keys
from overspill.gguf.types import TensorType
from overspill.pipeline.wave import Ubatch, Wave

N_UBATCH = 512


def model(n_layer: int) -> SyntheticModel:
    """Shaped like Qwen3-MoE, with matrices of some KiB, and enough rows per expert for large products."""
    values = dict(qwen3moe(n_layer, 32, heads=(2, 1), n_ff=32, rope_base=1e6))
    values |= {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.vocab_size": 64}
    return SyntheticModel("host time", Keys.of(values, "host time"), TensorType.Q8_0)


def wave(n_ubatches: int, slot: int = 0) -> Wave:
    ids = tuple(i % 64 for i in range(N_UBATCH))
    return Wave(tuple(Ubatch(ids, (Segment(slot, i * N_UBATCH, N_UBATCH),)) for i in range(n_ubatches)))


class _Nothing:
    """Stands for streams, events, graphs and compiled kernels: every call returns at once."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        pass


class _Program:
    """A compiled kernel that does nothing."""

    function, packed_metadata, n_started = 0, (), 0

    def run(self, *args: object) -> None:
        _Program.n_started += 1


@contextmanager
def no_gpu() -> Iterator[None]:
    """Two GPUs that are not there."""
    import overspill.kernels.triton as kernels
    from overspill.device.base import Devices
    from overspill.device.cpu import CpuDevice
    from overspill.device.cuda import CudaDevice
    from overspill.kernels.triton import attend, launch
    from overspill.kernels.triton.flash import Partial
    from overspill.placement.machine import DeviceSpec, Machine

    specs = tuple(DeviceSpec(f"cuda:{i}", 80 << 30, 80 << 30, 55.0, 700.0) for i in range(2))
    machine = Machine(1 << 36, specs, 105.0, 300.0, 150.0, 1000.0)

    def open_for(options: object) -> Devices:
        gpus = tuple(CudaDevice(i, cap_bytes=None) for i in range(2))
        for gpu in gpus:
            gpu.torch_device = torch.device("cpu")
        host = CpuDevice(is_asynchronous=True, pinned_memory=lambda n: torch.zeros(n, dtype=torch.uint8))
        return Devices(gpus, host)

    class Chooser(kernels.AttentionChooser):
        def _ranking(self, *of: object) -> list[attend.Candidate]:
            return list(attend.CANDIDATES)

    def ops_for(devices: Devices) -> Any:
        from overspill.kernels import cpu

        tables = {gpu.name: kernels.make_ops(gpu.torch_device, chooser=Chooser()) for gpu in devices.accelerators}
        for table in tables.values():
            vars(table.experts)["_may_use_torch"] = True
            vars(table.attention)["_device"] = SimpleNamespace(type="cuda")
        return lambda device: tables.get(device.name, cpu.OPS)

    def product(x: torch.Tensor, w: torch.Tensor, **how: object) -> torch.Tensor:
        return x.new_empty(len(x), w.shape[-1], dtype=how.get("out_dtype", x.dtype))

    def add_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, **how: object) -> torch.Tensor:
        return torch.empty_like(y)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, scale: float) -> Partial:
        q, k, v = attend._batch(q, k, v)
        return Partial(attend._rows(torch.empty_like(q)), q.new_empty(q.shape[1:3], dtype=torch.float32))

    nothing = _Nothing()
    cuda = {
        "Stream": _Nothing,
        "Event": _Nothing,
        "CUDAGraph": _Nothing,
        "set_stream": lambda stream: None,
        "current_stream": lambda device=None: nothing,
        "default_stream": lambda device=None: nothing,
        "synchronize": lambda device=None: None,
        "graph_pool_handle": lambda: (0, 0),
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
    with ExitStack() as patches:
        for name, value in cuda.items():
            patches.enter_context(patch.object(torch.cuda, name, value))
        for target, name, value in (
            (launch.JITFunction, "run", lambda *args, **options: _Program()),
            (launch.driver, "_active", SimpleNamespace(get_current_stream=lambda device: 0)),
            (torch, "mm", product),
            (torch, "addmm", add_product),
            (torch, "_grouped_mm", lambda x, w, offs: x.new_empty(len(x), w.shape[2])),
            (attend, "_cudnn", sdpa),
        ):
            patches.enter_context(patch.object(target, name, value))
        for name, function in (
            ("open_for", open_for),
            ("ops_for", ops_for),
            ("machine_for", lambda *of: machine),
            ("with_rates", lambda plan, *of: plan),
        ):
            patches.enter_context(patch(f"overspill.llm.{name}", function))
        yield


class Phase(NamedTuple):
    """Microseconds per layer and ubatch: of the issuing thread, and by the clock until all devices are idle."""

    host_us: float
    wall_us: float


def measured(llm: LLM, work: Wave) -> Phase:
    n_items = len(work.ubatches) * llm.hparams.n_layer
    llm.runner.synchronize_host()
    began, started = time.perf_counter(), time.thread_time()
    llm.run_wave(work)
    host_s = time.thread_time() - started
    llm.runner.synchronize_host()
    return Phase(round(1e6 * host_s / n_items, 1), round(1e6 * (time.perf_counter() - began) / n_items, 1))


def memory(device: int) -> tuple[int, int]:
    """Bytes in use on a GPU, and those of them that torch holds."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free, torch.cuda.memory_reserved(device)


def measure(llm: LLM, n_ubatches: int, n_profiled: int, order: str, repetitions: int) -> dict[str, Any]:
    """A wave that is issued, for the second time after another of its shape; then recorded; then replayed.

    Prints what takes longest of a replayed one. memory_mib: in use, and held by torch, per GPU, after each of these.
    """
    work, others = wave(n_ubatches), wave(n_ubatches, slot=1)
    n_gpus = len(llm.devices.accelerators)
    llm.run_wave(others)
    phases, held = {}, {}
    for name in ("issued", "recorded"):
        phases[name] = measured(llm, work)
        held[name] = [memory(i) for i in range(n_gpus)]
    replayed = [measured(llm, work) for _ in range(repetitions)]
    held["replayed"] = [memory(i) for i in range(n_gpus)]
    if n_profiled:
        profile = cProfile.Profile()
        profile.runcall(llm.run_wave, work)
        pstats.Stats(profile).sort_stats(order).print_stats(n_profiled)
    return {
        "ubatches": n_ubatches,
        **{name: phase._asdict() for name, phase in phases.items()},
        "replayed": min(replayed)._asdict(),
        "all_replayed": [phase.host_us for phase in replayed],
        "memory_mib": {name: [[n >> 20 for n in pair] for pair in of] for name, of in held.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ubatches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="show the N functions that take longest")
    parser.add_argument("--sort", default="tottime", choices=("tottime", "cumtime", "ncalls"))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    n = args.ubatches * N_UBATCH
    is_real = torch.cuda.is_available()
    options = {
        "n_ctx": 2 * n,
        "n_parallel": 2,
        "n_wave": n,
        "n_ubatch": N_UBATCH,
        "cpu_moe": True,
        "record_prompts": "on",
        "schedule": "breadth-first",
        "grain": 1,
    }
    with ExitStack() as setup:
        if not is_real:
            torch.set_num_threads(1)
            setup.enter_context(no_gpu())
        llm = setup.enter_context(LLM(model(args.layers), devices="cuda", **options))
        row = {"real": is_real, **measure(llm, args.ubatches, args.profile, args.sort, args.repetitions)}
        row["kernels_started"] = _Program.n_started
    print(json.dumps(row))
    if args.out:
        args.out.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
