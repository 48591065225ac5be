"""Loading: every tensor to its home, once.

Weights of a device are copied through a small pinned ring; experts whose home is the host but whose layer computes on
an accelerator go into pinned memory, from where slabs are uploaded; what the CPU itself computes with stays where the
file is mapped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from overspill.device.base import Buffer, Device, Devices, Event, MemoryKind, Part
from overspill.device.lane import Lane
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.kernels import Ops
from overspill.models.base import Block, HParams, Model, TensorSpec
from overspill.models.describe import is_widened
from overspill.models.layers import PARTS, expert_vectors
from overspill.pipeline.split import Layout
from overspill.pipeline.upload import WIDE_VALUE_BYTES, HostExperts, HostPart
from overspill.quant.dequant import dequantize
from overspill.quant.experts import ExpertVectors
from overspill.quant.qtensor import QTensor

_RING_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model whose layers are bound to devices, and the experts that stayed in host RAM, by layer."""

    model: Model
    host_experts: dict[int, HostExperts]


def load(
    source: ModelSource,
    specs: Sequence[TensorSpec],
    make_model: Callable[[HParams, Block, Sequence[Block], Block], Model],
    hp: HParams,
    layout: Layout,
    devices: Devices,
    ops_of: Callable[[Device], Ops],
    *,
    is_on_host: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], None] = lambda n_bytes: None,
    n_threads: int = 4,
    widens_dense: bool = False,
) -> Loaded:
    """Read all tensors of `specs` (those the file has).

    is_on_host: which expert tensors of a layer with host experts stay there. progress: called with the bytes of each
    tensor done. n_threads: read experts that stay in host RAM. widens_dense: dense matrices of accelerators become
    bfloat16 here (see `models.describe.is_widened`), where their kernels can.
    """
    loader = _Loader(source, devices, ops_of, progress, widens_dense=widens_dense)
    by_layer: list[list[TensorSpec]] = [[] for _ in range(hp.n_layer)]
    top: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name.startswith("blk."):
            by_layer[int(spec.name.split(".")[1])].append(spec)
        else:
            top[spec.name] = spec
    host_experts: dict[int, HostExperts] = {}
    blocks = []
    for i_layer, layer_specs in enumerate(by_layer):
        if layout.has_host_experts(i_layer):
            staged = [s.name for s in layer_specs if _is_routed(s.name) and is_on_host(s.name)]
            vectors = expert_vectors(loader.block(devices.host, _vectors(layer_specs), is_counted=False))
            host_experts[i_layer] = loader.host_experts(i_layer, hp.n_expert, staged, vectors)
            layer_specs = [s for s in layer_specs if s.name not in staged]
        shared = [spec for name, spec in top.items() if name.startswith("rope_")]
        blocks.append(loader.block(devices.all[layout.layer_device[i_layer]], [*layer_specs, *shared]))
    loader.fill_host_experts(n_threads)
    embedding = loader.block(devices.all[layout.embed_device], [top["token_embd.weight"]])
    head = loader.block(devices.all[layout.output_device], _head(top), tied="output.weight" not in top)
    loader.free_ring()
    return Loaded(make_model(hp, embedding, blocks, head), host_experts)


def _head(top: dict[str, TensorSpec]) -> list[TensorSpec]:
    tied = [] if "output.weight" in top else [top["token_embd.weight"]]
    return [spec for name, spec in top.items() if name.startswith("output")] + tied


def _is_routed(name: str) -> bool:
    return any(name.endswith(f".{part}.weight") for part in PARTS)


def _vectors(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Biases and scales of the routed experts."""
    return [s for s in specs if any(s.name.endswith((f".{part}.bias", f".{part}.scale")) for part in PARTS)]


class _Loader:
    def __init__(
        self,
        source: ModelSource,
        devices: Devices,
        ops_of: Callable[[Device], Ops],
        progress: Callable[[int], None],
        *,
        widens_dense: bool,
    ) -> None:
        self._widens_dense = widens_dense
        self._source = source
        self._devices = devices
        self._ops_of = ops_of
        self._progress = progress
        self._ring: _Ring | None = None
        self._to_fill: list[tuple[str, torch.Tensor]] = []

    def block(
        self, device: Device, specs: Iterable[TensorSpec], *, tied: bool = False, is_counted: bool = True
    ) -> Block:
        """The tensors on a device, named without `blk.N.`; tied: the embedding serves as the head.

        is_counted: whether they count as progress; a second copy does not.
        """
        matrices: dict[str, QTensor] = {}
        vectors: dict[str, torch.Tensor] = {}
        for spec in specs:
            name = spec.name.split(".", 2)[2] if spec.name.startswith("blk.") else spec.name
            name = "output.weight" if tied and name == "token_embd.weight" else name
            if len(spec.shape) == 1 or name.endswith(".bias"):
                vectors[name] = self._vector(device, spec)
            else:
                matrices[name] = self._matrix(device, spec)
            if is_counted:
                self._progress(self._source.tensors[spec.name].n_bytes)
        return Block(self._ops_of(device), matrices, vectors)

    def host_experts(self, i_layer: int, n_experts: int, staged: Sequence[str], vectors: ExpertVectors) -> HostExperts:
        """Routed experts of a layer in pinned memory: the tensors named in `staged`."""
        names = (f"blk.{i_layer}.{part}.weight" for part in PARTS)
        gate, up, down = (self._host_part(name) if name in staged else None for name in names)
        return HostExperts((gate, up, down), n_experts, vectors)

    def _host_part(self, name: str) -> HostPart:
        info = self._source.tensors[name]
        buffer = self._devices.host.allocate_pinned(info.n_bytes, name=name, kind=MemoryKind.WEIGHTS)
        self._to_fill.append((name, buffer.host_tensor))
        n_experts, rows, cols = info.shape
        return HostPart(buffer, info.type, (n_experts, rows, cols))

    def fill_host_experts(self, n_threads: int) -> None:
        """Read the experts that stay in host RAM into their memory, on several threads."""

        def fill(job: tuple[str, torch.Tensor]) -> int:
            name, target = job
            target.copy_(_tensor(self._source.bytes_of(name)))
            return target.numel()

        with ThreadPoolExecutor(n_threads) as pool:
            for n_bytes in pool.map(fill, self._to_fill):
                self._progress(n_bytes)
        self._to_fill.clear()

    def _matrix(self, device: Device, spec: TensorSpec) -> QTensor:
        info = self._source.tensors[spec.name]
        raw = _tensor(self._source.bytes_of(spec.name))
        if device.is_host:
            return QTensor.from_bytes(raw, info.type, info.shape)
        plain = self._ops_of(device).plain
        if self._widens_dense and plain is not None and is_widened(info):
            return self._plain(device, raw, info, plain)
        return QTensor.from_bytes(self._send(device, raw, spec.name), info.type, info.shape)

    def _plain(
        self, device: Device, raw: torch.Tensor, info: TensorInfo, plain: Callable[[QTensor, QTensor], None]
    ) -> QTensor:
        """A matrix in bfloat16; its blocks are on the device only for as long as it takes."""
        n_bytes = prod(info.shape) * WIDE_VALUE_BYTES
        target = device.allocate((n_bytes,), torch.uint8, kind=MemoryKind.WEIGHTS, name=info.name)
        blocks = device.allocate((raw.numel(),), torch.uint8, kind=MemoryKind.STAGING, name=info.name)
        self._send_into(blocks, raw)
        source = QTensor.from_bytes(blocks.raw(), info.type, info.shape)
        wide = QTensor.from_bytes(target.raw(), TensorType.BF16, info.shape)
        stream = device.stream(Lane.COMPUTE)
        stream.launch(lambda: plain(source, wide), label=f"load {info.name}", reads=(blocks,), writes=(target,))
        stream.record().wait_host()
        device.free(blocks)
        return wide

    def _vector(self, device: Device, spec: TensorSpec) -> torch.Tensor:
        info = self._source.tensors[spec.name]
        raw = _tensor(self._source.bytes_of(spec.name))
        values = dequantize(QTensor.from_bytes(raw, info.type, info.shape)).contiguous()
        if not device.is_host:
            values = self._send(device, values.view(torch.uint8).flatten(), spec.name).view(torch.float32)
        return values.view(spec.shape)

    def _send(self, device: Device, raw: torch.Tensor, name: str) -> torch.Tensor:
        target = device.allocate((raw.numel(),), torch.uint8, kind=MemoryKind.WEIGHTS, name=name)
        self._send_into(target, raw)
        return target.raw()

    def _send_into(self, target: Buffer, raw: torch.Tensor) -> None:
        if self._ring is None:
            self._ring = _Ring(self._devices)
        self._ring.send(target, raw)

    def free_ring(self) -> None:
        """Give back what only loading needed."""
        if self._ring is not None:
            self._ring.free()
            self._ring = None


class _Ring:
    """Two pinned chunks through which weights travel to accelerators."""

    def __init__(self, devices: Devices) -> None:
        self._host = devices.host
        self._chunks = [devices.host.allocate_pinned(_RING_BYTES, name=f"load{i}") for i in range(2)]
        self._busy: list[Event | None] = [None, None]
        self._i = 0

    def send(self, target: Buffer, raw: torch.Tensor) -> None:
        """Copy `raw` into `target`; returns when the copy is done."""
        stream = target.device.stream(Lane.UPLOAD)
        for first in range(0, raw.numel(), _RING_BYTES):
            piece = raw[first : first + _RING_BYTES]
            self._put(target, stream_offset=first, piece=piece)
        stream.record().wait_host()

    def free(self) -> None:
        """Give the memory back; every `send` has ended."""
        for chunk in self._chunks:
            self._host.free(chunk)

    def _put(self, target: Buffer, *, stream_offset: int, piece: torch.Tensor) -> None:
        i, self._i = self._i, 1 - self._i
        busy = self._busy[i]
        if busy is not None:
            busy.wait_host()
        self._chunks[i].host_tensor[: piece.numel()].copy_(piece)
        stream = target.device.stream(Lane.UPLOAD)
        stream.upload(target, [Part(self._chunks[i], 0, stream_offset, piece.numel())], label=f"load {target.name}")
        self._busy[i] = stream.record()


def _tensor(raw: NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over mapped, read-only bytes; nobody writes to weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(raw)
