"""Loading: every tensor to its home, once.

Weights of a device are read into a small pinned ring and go up from there; experts whose home is the host but whose
layer computes on an accelerator go into the arena, from where slabs are uploaded; what the CPU itself computes with
stays where the file is mapped, or is read into memory of its own (`host_matrices`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from overspill.device.base import Buffer, Device, Devices, Event, HostDevice, MemoryKind
from overspill.device.lane import Lane
from overspill.gguf.source import ModelSource
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.kernels import Ops
from overspill.models.base import Block, HParams, Model, TensorSpec
from overspill.models.describe import is_widened
from overspill.models.layers import PARTS, expert_vectors
from overspill.pipeline.arena import Arena
from overspill.pipeline.host_budget import LOAD_CHUNK_BYTES, load_chunk_bytes
from overspill.pipeline.host_matrices import HostMatrices
from overspill.pipeline.reading import LoadMode, ReadInto, TensorReader, reader_of
from overspill.pipeline.residence import Bytes, Residence, lock, reserve_bytes
from overspill.pipeline.ring import LoadRing, PinnedRing
from overspill.pipeline.slabs import WIDE_VALUE_BYTES
from overspill.pipeline.split import Layout
from overspill.pipeline.upload import HostExperts, HostPart
from overspill.placement.shape import TOKEN_EMBEDDING, Role, role_of
from overspill.quant.dequant import dequantize
from overspill.quant.experts import ExpertVectors
from overspill.quant.qtensor import QTensor

_RING_BYTES = LOAD_CHUNK_BYTES


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model whose layers are bound to devices, and the experts that stayed in host RAM, by layer.

    rings: by number of the accelerator, where some of its experts could not be pinned. in_file: what stays in the
    mapped file and is worth reading ahead.
    """

    model: Model
    host_experts: dict[int, HostExperts]
    rings: dict[int, PinnedRing]
    residence: Residence
    in_file: tuple[Bytes, ...]


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
    mode: LoadMode = LoadMode.AUTO,
    n_threads: int = 4,
    is_asynchronous: bool = True,
    widens_dense: bool = False,
) -> Loaded:
    """Read all tensors of `specs` (those the file has).

    is_on_host: which expert tensors of a layer with host experts stay there. progress: called with the bytes of each
    tensor done. n_threads: read experts that stay in host RAM. is_asynchronous: weights go up to an accelerator while
    the next ones are read. widens_dense: dense matrices of accelerators become bfloat16 here (see
    `models.describe.is_widened`), where their kernels can.
    """
    by_layer, top = _by_layer(specs, hp.n_layer)
    shared = [spec for name, spec in top.items() if name.startswith("rope_")]
    with TensorReader(source, is_direct=mode is LoadMode.DIO) as reader:
        loader = _Loader(
            source,
            reader,
            devices,
            ops_of,
            progress,
            mode=mode,
            n_threads=n_threads,
            is_asynchronous=is_asynchronous,
            widens_dense=widens_dense,
        )
        blocks: list[Block] = []
        staged: dict[int, list[str]] = {}
        vectors: dict[int, ExpertVectors] = {}
        for i_layer, layer_specs in enumerate(by_layer):
            if layout.has_host_experts(i_layer):
                staged[i_layer] = [s.name for s in layer_specs if _is_routed(s.name) and is_on_host(s.name)]
                vectors[i_layer] = expert_vectors(
                    loader.block(devices.host, _vectors(layer_specs), is_counted=False), hp.expert_limit(i_layer)
                )
            own = [s for s in layer_specs if s.name not in staged.get(i_layer, ())]
            blocks.append(loader.block(devices.all[layout.layer_device[i_layer]], [*own, *shared]))
        embedding = loader.block(devices.all[layout.embed_device], [s for s in top.values() if _is_embedding(s.name)])
        head = loader.block(devices.all[layout.output_device], _head(top), tied="output.weight" not in top)
        loader.free_ring_host()
        arena = Arena(source, reader, devices.host, mode)
        parts = [(name, layout.layer_device[i]) for i, names in staged.items() for name in names]
        arena.fill(parts, loader.budget_bytes, n_threads, progress)
    host_experts = {i: _host_experts(source, arena, i, hp.n_expert, vectors[i]) for i in staged}
    residence, in_file = loader.settle(arena)
    return Loaded(make_model(hp, embedding, blocks, head), host_experts, arena.rings, residence, in_file)


def _by_layer(specs: Sequence[TensorSpec], n_layer: int) -> tuple[list[list[TensorSpec]], dict[str, TensorSpec]]:
    """Tensors of each layer, and those of none by name."""
    by_layer: list[list[TensorSpec]] = [[] for _ in range(n_layer)]
    top: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name.startswith("blk."):
            by_layer[int(spec.name.split(".")[1])].append(spec)
        else:
            top[spec.name] = spec
    return by_layer, top


def _host_experts(
    source: ModelSource, arena: Arena, i_layer: int, n_experts: int, vectors: ExpertVectors
) -> HostExperts:
    """Routed experts of a layer as they lie in the arena; parts that do not are on the layer's device."""
    parts: list[HostPart | None] = []
    for part in PARTS:
        name = f"blk.{i_layer}.{part}.weight"
        buffer = arena.buffers.get(name)
        if buffer is None:
            parts.append(None)
        else:
            n, rows, cols = source.tensors[name].shape
            parts.append(HostPart(buffer, source.tensors[name].type, (n, rows, cols)))
    gate, up, down = parts
    return HostExperts((gate, up, down), n_experts, vectors)


def _head(top: dict[str, TensorSpec]) -> list[TensorSpec]:
    tied = [] if "output.weight" in top else [top["token_embd.weight"]]
    return [spec for name, spec in top.items() if name.startswith("output")] + tied


def _is_embedding(name: str) -> bool:
    return role_of(name)[0] is Role.LOOKUP or name == TOKEN_EMBEDDING


def _is_routed(name: str) -> bool:
    return any(name.endswith(f".{part}.weight") for part in PARTS)


def _vectors(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Biases and scales of the routed experts."""
    return [s for s in specs if any(s.name.endswith((f".{part}.bias", f".{part}.scale")) for part in PARTS)]


def _free_bytes(host: HostDevice) -> int:
    return host.free_bytes - reserve_bytes(host.total_bytes)


class _Loader:
    def __init__(
        self,
        source: ModelSource,
        reader: TensorReader,
        devices: Devices,
        ops_of: Callable[[Device], Ops],
        progress: Callable[[int], None],
        *,
        mode: LoadMode,
        n_threads: int,
        is_asynchronous: bool,
        widens_dense: bool,
    ) -> None:
        self._source = source
        self._reader = reader
        self._devices = devices
        self._ops_of = ops_of
        self._progress = progress
        self._mode = mode
        self._n_threads = n_threads
        self._is_asynchronous = is_asynchronous
        self._widens_dense = widens_dense
        self._ring: LoadRing | None = None
        self._n_device_bytes = 0
        self._on_host = HostMatrices(
            source,
            reader,
            devices.host,
            mode,
            n_threads=n_threads,
            huge_bytes=_free_bytes(devices.host) // 2,
            interleave=ops_of(devices.host).interleave,
            panel_types=ops_of(devices.host).panel_types,
        )

    @property
    def budget_bytes(self) -> int:
        """What may be pinned now: what is free less a reserve and the mapped weights that should stay in memory."""
        return _free_bytes(self._devices.host) - self._n_mapped_bytes

    @property
    def _n_mapped_bytes(self) -> int:
        return sum(len(view) for view in self._on_host.mapped.values())

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
                matrices[name] = self._matrix(device, spec, is_table=name == TOKEN_EMBEDDING)
            if is_counted:
                self._progress(self._source.tensors[spec.name].n_bytes)
        return Block(self._ops_of(device), matrices, vectors)

    def free_ring_host(self) -> None:
        """Wait until the weights of accelerators have arrived, and give back what only loading needed."""
        if self._ring is not None:
            self._ring.free_host()
            self._ring = None

    def settle(self, arena: Arena) -> tuple[Residence, tuple[Bytes, ...]]:
        """Lock what stays in the mapped file, if wanted. Returns where all is, and what is mapped but not locked."""
        views = tuple(self._on_host.mapped.values())
        n_locked = lock(views, self.budget_bytes + self._n_mapped_bytes) if self._mode.is_locked and views else 0
        residence = Residence(
            self._mode,
            self._n_device_bytes,
            arena.pinned_bytes,
            arena.pageable_bytes,
            self._n_mapped_bytes,
            self._on_host.n_copied_bytes,
            n_locked,
        )
        return residence, (*(() if n_locked else views), *arena.mapped)

    def _matrix(self, device: Device, spec: TensorSpec, *, is_table: bool) -> QTensor:
        """is_table: rows of it are looked up."""
        info = self._source.tensors[spec.name]
        shape = info.shape if spec.is_padded else spec.shape
        if device.is_host:
            is_table = is_table or role_of(info.name)[0] is Role.LOOKUP
            return self._on_host.table(info, shape) if is_table else self._on_host.matrix(info, shape)
        plain = self._ops_of(device).plain
        if self._widens_dense and plain is not None and is_widened(info):
            return self._plain(device, info, plain)
        target = self._new(device, info.n_bytes, info.name)
        self._send(target, self._reader.open(info.name))
        return QTensor.from_bytes(target.raw(), info.type, shape)

    def _plain(self, device: Device, info: TensorInfo, plain: Callable[[QTensor, QTensor], None]) -> QTensor:
        """A matrix in bfloat16; its blocks are on the device only for as long as it takes."""
        target = self._new(device, prod(info.shape) * WIDE_VALUE_BYTES, info.name)
        blocks = device.allocate((info.n_bytes,), torch.uint8, kind=MemoryKind.STAGING, name=info.name)
        stream = device.stream(Lane.COMPUTE)
        stream.wait(self._send(blocks, self._reader.open(info.name)))
        source = QTensor.from_bytes(blocks.raw(), info.type, info.shape)
        wide = QTensor.from_bytes(target.raw(), TensorType.BF16, info.shape)
        stream.launch(lambda: plain(source, wide), label=f"load {info.name}", reads=(blocks,), writes=(target,))
        stream.record().wait_host()
        device.free(blocks)
        return wide

    def _vector(self, device: Device, spec: TensorSpec) -> torch.Tensor:
        info = self._source.tensors[spec.name]
        raw = torch.empty(info.n_bytes, dtype=torch.uint8)
        self._reader.open(info.name)(0, raw)
        values = dequantize(QTensor.from_bytes(raw, info.type, info.shape)).contiguous()
        if device.is_host:
            self._on_host.n_copied_bytes += values.nbytes
            return values.view(spec.shape)
        flat = values.view(torch.uint8).flatten()
        target = self._new(device, flat.numel(), spec.name)
        self._send(target, reader_of(flat))
        return target.raw().view(torch.float32).view(spec.shape)

    def _new(self, device: Device, n_bytes: int, name: str) -> Buffer:
        self._n_device_bytes += n_bytes
        return device.allocate((n_bytes,), torch.uint8, kind=MemoryKind.WEIGHTS, name=name)

    def _send(self, target: Buffer, read: ReadInto) -> Event:
        if self._ring is None:
            largest = max(info.n_bytes for info in self._source.tensors.values())
            chunk_bytes = load_chunk_bytes(largest, self._devices.host.free_bytes, most=_RING_BYTES)
            self._ring = LoadRing(self._devices.host, chunk_bytes=chunk_bytes)
        arrived = self._ring.send(target, read)
        if not self._is_asynchronous:
            arrived.wait_host()
        return arrived
