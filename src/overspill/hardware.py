"""The hardware at hand: which devices the options name, what they can do, and the kernels that suit them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from overspill.device.base import Device, Devices
from overspill.device.factory import open_devices
from overspill.device.handoff import failing_pairs
from overspill.device.topology import measure
from overspill.gguf.source import ModelSource
from overspill.kernels import Ops, cpu
from overspill.kernels.gpu_memory import DEFAULT_WEIGHT_BYTES, DENSE_PART_BYTES, scratch_bytes
from overspill.models.base import HParams, TensorSpec
from overspill.models.describe import dense_wide_bytes, model_shape
from overspill.options import Options
from overspill.pipeline.memory import Precision
from overspill.pipeline.upload import WIDE_VALUE_BYTES
from overspill.placement.budget import N_LOGIT_ROWS, NO_NEEDS, KernelNeeds
from overspill.placement.machine import GPU_ISSUE_US, DeviceSpec, Machine
from overspill.placement.shape import ModelShape

_GPU = "cuda"
_MADE_OF_THREADS = ("virtual:", "null:")
_RESERVE_BYTES = 1 << 30
_DENSE_SHARE = 0.2


def machine_for(options: Options) -> Machine:
    """The machine at hand as far as the options let it be used, with rates measured now."""
    devices = open_for(options)
    try:
        rates = measure(devices)
        failing = failing_pairs(devices) if options.host_stage == "auto" else frozenset()
    finally:
        devices.close()
    is_shared = options.device_memory is None
    specs = tuple(
        DeviceSpec(d.name, d.total_bytes, d.free_bytes, h2d_gbps, tflops, _reserve_bytes(d.name, is_shared=is_shared))
        for d, h2d_gbps, tflops in zip(devices.accelerators, rates.h2d_gbps, rates.tflops, strict=True)
    )
    return Machine(
        host_bytes=_host_share(devices.host.free_bytes),
        devices=specs,
        h2d_total_gbps=rates.h2d_total_gbps,
        peer_gbps=rates.peer_gbps,
        cpu_gbps=rates.cpu_gbps,
        cpu_gflops=rates.cpu_gflops,
        issue_us=GPU_ISSUE_US if any(d.name.startswith(_GPU) for d in specs) else 0.0,
        failing_pairs=frozenset((specs[i].name, specs[j].name) for i, j in failing),
    )


def _host_share(n_free: int) -> int:
    """Of the host's free memory, what a plan may use: the rest is for other programs, whose needs change meanwhile."""
    return n_free - min(n_free // 8, _RESERVE_BYTES)


def _reserve_bytes(name: str, *, is_shared: bool) -> int:
    """Memory to leave free on a GPU that other programs may use too."""
    return _RESERVE_BYTES if is_shared and name.startswith(_GPU) else 0


def has_gpus(machine: Machine) -> bool:
    """Whether the accelerators are real; those of a described machine are."""
    return any(not device.name.startswith(_MADE_OF_THREADS) for device in machine.devices)


def precision_on(machine: Machine) -> Precision:
    """What shared buffers hold: bfloat16 beside GPUs, float32 elsewhere."""
    return Precision(torch.bfloat16, torch.bfloat16) if has_gpus(machine) else Precision()


def shape_for(machine: Machine, source: ModelSource, hparams: HParams, specs: Sequence[TensorSpec]) -> ModelShape:
    """A model's sizes and costs as this machine would hold it."""
    return model_shape(
        source.name,
        hparams,
        specs,
        source.tensors,
        kv_value_bytes=precision_on(machine).kv.itemsize,
        widens_dense=widens_dense(machine, source, specs),
    )


def widens_dense(machine: Machine, source: ModelSource, specs: Sequence[TensorSpec]) -> bool:
    """Whether GPUs hold dense matrices in bfloat16: where these take a small part of their memory."""
    n_bytes = dense_wide_bytes(specs, source.tensors)
    return has_gpus(machine) and n_bytes <= _DENSE_SHARE * sum(device.free_bytes for device in machine.devices)


def needs_on(machine: Machine, hp: HParams) -> Callable[[int], KernelNeeds]:
    """What the accelerators' kernels take, by the size of a ubatch."""
    if not has_gpus(machine):
        return lambda n_ubatch: NO_NEEDS
    n_heads_dim = hp.n_head * hp.head_dim
    experts = (hp.n_expert, hp.n_expert_used, hp.n_ff_exp if hp.n_expert else hp.n_ff)
    logits_bytes = 4 * N_LOGIT_ROWS * hp.n_vocab
    return lambda n_ubatch: KernelNeeds(
        wide_value_bytes=WIDE_VALUE_BYTES,
        normed_value_bytes=2,
        scratch_bytes=scratch_bytes(
            n_ubatch, n_embd=hp.n_embd, n_heads_dim=n_heads_dim, n_kv_dim=hp.n_head_kv * hp.head_dim, experts=experts
        )
        + 4 * hp.n_scratch * n_ubatch,
        head_bytes=logits_bytes + DENSE_PART_BYTES,
        resident_bytes=DEFAULT_WEIGHT_BYTES if hp.n_expert else 0,
    )


def ops_for(devices: Devices) -> Callable[[Device], Ops]:
    """The kernels of each device; equal GPUs choose the same ones, so that they compute the same bits."""
    gpus = [device for device in devices.accelerators if device.name.startswith(_GPU)]
    if not gpus:
        return lambda device: cpu.OPS
    from overspill.kernels.triton import make_ops, shared_chooser

    tables = {gpu.name: make_ops(gpu.torch_device, chooser=shared_chooser()) for gpu in gpus}
    return lambda device: tables.get(device.name, cpu.OPS)


def open_for(options: Options) -> Devices:
    """The devices that the options name, with their share of the CPU's threads; the caller closes them."""
    n_threads = options.threads or len(os.sched_getaffinity(0))
    cpu.use_threads(n_threads)
    spec = "cpu" if options.devices == "none" else options.devices
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
