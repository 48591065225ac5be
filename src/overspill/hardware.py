"""The hardware at hand: which devices the options name, what they can do, and the kernels that suit them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from overspill.cache.cells import CellType
from overspill.device.base import Device, Devices
from overspill.device.factory import names_gpus, open_devices
from overspill.device.handoff import failing_pairs
from overspill.device.topology import Sample, measure
from overspill.kernels import Ops, cpu
from overspill.needs import Weight, cell_type, has_gpus
from overspill.options import Options
from overspill.pipeline.memory import Precision
from overspill.placement.machine import GPU_ISSUE_US, DeviceSpec, Machine
from overspill.quant.qtensor import QTensor

_CELLS = {
    CellType.F32: torch.float32,
    CellType.F16: torch.float16,
    CellType.BF16: torch.bfloat16,
    CellType.Q8_0: torch.uint8,
}
_GPU = "cuda"
_RESERVE_BYTES = 1 << 30
_CORES_FOR_ANOTHER = 16
_READ_BYTES = 96 << 20  # beyond the caches of most machines
_MANY_TOKENS, _MANY_VALUES = 64, 1 << 20


def machine_for(options: Options, weight: Weight) -> Machine:
    """The machine at hand as far as the options let it be used, with rates measured now, at weights like this one."""
    devices = open_for(options)
    try:
        rates = measure(devices, _sample(weight, devices.host.free_bytes))
        failing = failing_pairs(devices) if options.host_stage == "auto" else frozenset()
    finally:
        devices.close()
    is_shared = options.device_memory is None
    specs = tuple(
        DeviceSpec(d.name, d.total_bytes, d.free_bytes, h2d, tflops, _reserve_bytes(d.name, is_shared=is_shared), read)
        for d, h2d, tflops, read in zip(
            devices.accelerators, rates.h2d_gbps, rates.tflops, rates.read_gbps, strict=True
        )
    )
    return Machine(
        host_bytes=_host_share(devices.host.free_bytes),
        devices=specs,
        h2d_total_gbps=rates.h2d_total_gbps,
        peer_gbps=rates.peer_gbps,
        cpu_gbps=rates.cpu_gbps,
        cpu_gflops=rates.cpu_gflops,
        call_us=rates.call_us,
        issue_us=GPU_ISSUE_US if any(d.name.startswith(_GPU) for d in specs) else 0.0,
        failing_pairs=frozenset((specs[i].name, specs[j].name) for i, j in failing),
    )


def _sample(weight: Weight, free_bytes: int) -> Sample:
    """The CPU's kernels at matrices of the type and width in which a model has most of its weights, and at as many
    bytes of them, up to what no cache holds."""
    row_bytes = weight.type.row_bytes(weight.n_columns)
    n_rows = max(_MANY_TOKENS, min(_READ_BYTES, weight.n_bytes, free_bytes // 16) // row_bytes)
    raw = torch.ones(n_rows * row_bytes, dtype=torch.uint8)
    large = QTensor.from_bytes(raw, weight.type, (n_rows, weight.n_columns))
    n_few = min(n_rows, max(_MANY_TOKENS, _MANY_VALUES // weight.n_columns))
    x, linear = torch.ones(_MANY_TOKENS, weight.n_columns), cpu.OPS.linear
    return Sample(
        many=lambda: linear(x, large.rows(0, n_few)),
        flops=2.0 * _MANY_TOKENS * n_few * weight.n_columns,
        one=lambda: linear(x[:1], large),
        n_bytes=n_rows * row_bytes,
        call=lambda: linear(x[:1], large.rows(0, 1)),
    )


def _host_share(n_free: int) -> int:
    """Of the host's free memory, what a plan may use: the rest is for other programs, whose needs change meanwhile."""
    return n_free - min(n_free // 8, _RESERVE_BYTES)


def _reserve_bytes(name: str, *, is_shared: bool) -> int:
    """Memory to leave free on a GPU that other programs may use too."""
    return _RESERVE_BYTES if is_shared and name.startswith(_GPU) else 0


def precision_on(machine: Machine, options: Options) -> Precision:
    """What shared buffers hold: normed inputs bfloat16 beside GPUs and float32 elsewhere; cells of `cell_type`."""
    normed = torch.bfloat16 if has_gpus(machine) else torch.float32
    return Precision(normed, _CELLS[cell_type(machine, options)])


def ops_for(devices: Devices) -> Callable[[Device], Ops]:
    """The kernels of each device; equal GPUs choose the same ones, so that they compute the same bits."""
    gpus = [device for device in devices.accelerators if device.name.startswith(_GPU)]
    if not gpus:
        return lambda device: cpu.OPS
    from overspill.kernels.triton import make_ops, shared_chooser

    tables = {gpu.name: make_ops(gpu.torch_device, chooser=shared_chooser()) for gpu in gpus}
    return lambda device: tables.get(device.name, cpu.OPS)


def n_threads_for(options: Options) -> int:
    """Of the CPU: what the user says, or as many as it has for this process.

    Beside GPUs some are left to drivers, and to the thread that issues: threads that compute wait for each other, so
    one without a core would hold up all the others, for milliseconds.
    """
    n_cores = len(os.sched_getaffinity(0))
    n_for_others = -(-n_cores // _CORES_FOR_ANOTHER) if names_gpus(_spec(options)) else 0
    most = max(1, n_cores - n_for_others)
    return min(options.threads or most, most)


def _spec(options: Options) -> str:
    return "cpu" if options.devices == "none" else options.devices


def open_for(options: Options) -> Devices:
    """The devices that the options name, with their share of the CPU's threads; the caller closes them."""
    n_threads = n_threads_for(options)
    cpu.use_threads(n_threads)
    cpu.use_threads_by_default(n_threads)
    spec = _spec(options)
    memory = None if options.device_memory is None else ",".join(map(str, options.device_memory))
    kind, _, count = spec.partition(":")
    n_workers = int(count) if kind == "virtual" and count.isdecimal() else 1
    return open_devices(
        spec,
        memory=memory,
        chaos_seed=options.chaos_seed,
        h2d_gbps=options.h2d_gbps,
        thread_init=lambda: cpu.use_threads(max(1, n_threads // max(1, n_workers))),
    )
