"""From `--devices` and `--device-memory` to open devices.

    cpu                 everything on the host, computed in place
    virtual:N           N accelerators of threads, and the host
    null:N              N accelerators that execute nothing, and the host
    cuda:0,cuda:1       these GPUs, in this order, and the host;  cuda: all of them
    auto                cuda where there is one, else cpu

Bad values are `UserError`s that name the flag. CUDA is imported only when it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib import import_module
from typing import Protocol, cast

import torch

from overspill.device.base import Device, Devices
from overspill.device.cpu import CpuDevice
from overspill.device.null import open_null
from overspill.device.virtual import VirtualDevice, VirtualHost
from overspill.errors import UserError

MAX_DEVICES = 64
DEFAULT_VIRTUAL_BYTES = 1024**3
DEFAULT_NULL_BYTES = 24 * 1024**3
NULL_HOST_BYTES = 1024**4

_ALLOWED = "use cpu, auto, cuda, cuda:0,cuda:1, virtual:N or null:N"
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}
_SIZE = re.compile(r"([0-9]{1,15})(\.[0-9]{1,6})?\s*([a-z]*)")

ThreadInit = Callable[[], None]


class _Cuda(Protocol):
    """What this file needs of `overspill.device.cuda`."""

    def open_cuda(self, indices: Sequence[int], caps: Sequence[int | None]) -> tuple[Device, ...]: ...

    def pinned_memory(self, n_bytes: int) -> torch.Tensor: ...


def open_devices(
    spec: str,
    *,
    memory: str | None = None,
    chaos_seed: int | None = None,
    h2d_gbps: float | None = None,
    thread_init: ThreadInit | None = None,
) -> Devices:
    """Open the devices that `spec` names (see the module's text); the caller closes them.

    `memory` caps each accelerator (or the host of `cpu`), see `parse_memory`. `chaos_seed` and `h2d_gbps` (1e9 bytes
    per second) are for virtual devices alone. `thread_init` runs on every worker thread before its first work; `cpu`
    has none. Raises `UserError`.
    """
    kind, numbers = _parse_spec(spec)
    if kind != "virtual" and (chaos_seed is not None or h2d_gbps is not None):
        raise UserError(f"--devices {spec}: chaos and link rates are for virtual devices; use virtual:N")
    if h2d_gbps is not None and h2d_gbps <= 0:
        raise UserError(f"--devices {spec}: a link of {h2d_gbps} GB/s moves nothing; give a rate above 0")
    if kind == "cuda":
        return _open_cuda(_cuda_indices(spec, numbers), memory, thread_init)
    if kind == "virtual":
        return _open_virtual(numbers[0], memory, chaos_seed, h2d_gbps, thread_init)
    if kind == "null":
        return open_null(_caps(memory, numbers[0], DEFAULT_NULL_BYTES), host_bytes=NULL_HOST_BYTES)[0]
    cap_bytes = None if memory is None else parse_memory(memory, n_devices=1)[0]
    return Devices((), CpuDevice(is_asynchronous=False, cap_bytes=cap_bytes))


def parse_memory(text: str, *, n_devices: int) -> tuple[int, ...]:
    """Bytes for each of `n_devices`: sizes such as `300MiB`, `24GB`, `1.5GiB` or plain bytes, one for all or one each.

    KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB powers of 1000. Raises `UserError`.
    """
    sizes = tuple(_parse_size(part.strip(), text) for part in text.split(","))
    if len(sizes) == 1:
        return sizes * n_devices
    if len(sizes) != n_devices:
        raise UserError(
            f"--device-memory {text}: {len(sizes)} sizes for {n_devices} devices; give one for all or one for each"
        )
    return sizes


def _parse_size(part: str, text: str) -> int:
    match = _SIZE.fullmatch(part.lower())
    if match is None or match[3] not in _UNITS:
        raise UserError(f"--device-memory {text}: '{part}' is not a size; write 300MiB, 24GB or a number of bytes")
    return int(Fraction(match[1] + (match[2] or "")) * _UNITS[match[3]])


def names_gpus(spec: str) -> bool:
    """Whether `spec` opens GPUs. Raises `UserError`."""
    return _parse_spec(spec)[0] == "cuda"


def _parse_spec(spec: str) -> tuple[str, tuple[int, ...]]:
    """The kind of device and its numbers: a count for virtual and null, indices for cuda (none: all)."""
    text = spec.strip().lower()
    if text == "auto":
        return ("cuda", ()) if _has_cuda() else ("cpu", ())
    if text in ("cpu", "cuda"):
        return text, ()
    if match := re.fullmatch(r"(virtual|null):([0-9]{1,9})", text):
        return match[1], (_checked_count(spec, int(match[2])),)
    return "cuda", _parse_indices(text, spec)


def _checked_count(spec: str, n_devices: int) -> int:
    if not 1 <= n_devices <= MAX_DEVICES:
        raise UserError(f"--devices {spec}: {n_devices} devices; give 1 to {MAX_DEVICES}")
    return n_devices


def _parse_indices(text: str, spec: str) -> tuple[int, ...]:
    indices = tuple(_parse_index(part.strip(), spec) for part in text.split(","))
    for i, index in enumerate(indices):
        if index in indices[:i]:
            raise UserError(f"--devices {spec}: cuda:{index} is named twice; name each device once")
    return indices


def _parse_index(part: str, spec: str) -> int:
    match = re.fullmatch(r"cuda:([0-9]{1,9})", part)
    if match is None:
        raise UserError(f"--devices {spec}: '{part}' is not a device; {_ALLOWED}")
    return int(match[1])


def _has_cuda() -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


def _cuda_indices(spec: str, indices: tuple[int, ...]) -> tuple[int, ...]:
    """The GPUs asked for, each of which exists."""
    if not _has_cuda():
        raise UserError(f"--devices {spec}: CUDA is not available here; use cpu or virtual:N")
    n_gpus = torch.accelerator.device_count()
    for index in indices:
        if index >= n_gpus:
            raise UserError(f"--devices {spec}: no cuda:{index} here; the last one is cuda:{n_gpus - 1}")
    return indices or tuple(range(n_gpus))


def _caps(memory: str | None, n_devices: int, default_bytes: int) -> tuple[int, ...]:
    return (default_bytes,) * n_devices if memory is None else parse_memory(memory, n_devices=n_devices)


def _open_virtual(
    n_devices: int,
    memory: str | None,
    chaos_seed: int | None,
    h2d_gbps: float | None,
    thread_init: ThreadInit | None,
) -> Devices:
    accelerators = tuple(
        VirtualDevice(i, total_bytes=n_bytes, chaos_seed=chaos_seed, h2d_gbps=h2d_gbps, thread_init=thread_init)
        for i, n_bytes in enumerate(_caps(memory, n_devices, DEFAULT_VIRTUAL_BYTES))
    )
    return Devices(accelerators, VirtualHost(chaos_seed=chaos_seed, thread_init=thread_init))


def _open_cuda(indices: tuple[int, ...], memory: str | None, thread_init: ThreadInit | None) -> Devices:
    cuda = cast(_Cuda, import_module("overspill.device.cuda"))
    caps = (None,) * len(indices) if memory is None else parse_memory(memory, n_devices=len(indices))
    host = CpuDevice(is_asynchronous=True, thread_init=thread_init, pinned_memory=cuda.pinned_memory)
    return Devices(cuda.open_cuda(indices, caps), host)
