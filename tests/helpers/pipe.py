"""A fixture model on virtual (or null) devices with a hand-made layout, for tests of the pipeline itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from overspill.cache.cells import Segment
from overspill.device.base import Devices
from overspill.device.factory import open_devices
from overspill.gguf.source import ModelSource
from overspill.kernels import ref
from overspill.models.check import check_tensors
from overspill.models.registry import architecture
from overspill.pipeline.memory import Memory, Sizes
from overspill.pipeline.runner import Runner
from overspill.pipeline.schedule import WaveSchedule
from overspill.pipeline.split import Layout
from overspill.pipeline.upload import cut_slabs, slot_bytes_for
from overspill.pipeline.wave import Ubatch, Wave
from overspill.pipeline.weights import load
from overspill.pipeline.work import Work


@dataclass(frozen=True)
class Shape:
    """A layout to try: devices, grain, experts per staging slot, which layers keep experts on the host."""

    n_devices: int
    grain: int = 1
    slab_experts: int = 8
    host_layers: str = "all"
    n_staging: int = 2
    n_layers_on_cpu: int = 0

    def is_host(self, i_layer: int) -> bool:
        """Whether the layer's experts stay in host RAM."""
        return {"all": True, "none": False, "odd": i_layer % 2 == 1, "even": i_layer % 2 == 0}[self.host_layers]


def expert_bytes(source: ModelSource, i_layer: int) -> list[int]:
    """Bytes of one expert's gate, up and down."""
    infos = [source.tensors[f"blk.{i_layer}.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")]
    return [info.n_bytes // info.shape[0] for info in infos]


def make_layout(source: ModelSource, n_layer: int, n_expert: int, shape: Shape) -> tuple[Layout, tuple[int, ...]]:
    """The layout and the staging slot bytes per device."""
    N = shape.n_devices
    where = tuple(N if i < shape.n_layers_on_cpu else (i // shape.grain) % N for i in range(n_layer))
    slot_bytes = [0] * N
    slabs = []
    for i, device in enumerate(where):
        if n_expert == 0 or device == N or not shape.is_host(i):
            slabs.append(())
            continue
        parts = expert_bytes(source, i)
        size = slot_bytes_for(parts, min(shape.slab_experts, n_expert))
        slot_bytes[device] = max(slot_bytes[device], size)
        slabs.append(cut_slabs(n_expert, parts, size))
    return Layout(N, where, where[-1], tuple(slabs)), tuple(slot_bytes)


@dataclass
class Pipe:
    """An assembled pipeline."""

    runner: Runner
    devices: Devices
    layout: Layout
    n_host_expert_bytes: int
    memory: Memory


@contextmanager
def pipe(
    source: ModelSource,
    shape: Shape,
    *,
    n_ubatch: int,
    n_ubatches: int,
    n_cells: int,
    n_slots: int = 1,
    chaos_seed: int | None = None,
    max_in_flight: int = 64,
    kind: str = "virtual",
) -> Iterator[Pipe]:
    """Open devices, load, reserve; close at the end."""
    arch = architecture(source.keys.arch)
    hp = arch.read_hparams(source.keys)
    specs = check_tensors(arch.tensors(hp), source.tensors)
    layout, slot_bytes = make_layout(source, hp.n_layer, hp.n_expert, shape)
    devices = open_devices(
        f"{kind}:{shape.n_devices}", chaos_seed=chaos_seed, thread_init=lambda: torch.set_num_threads(1)
    )
    try:
        loaded = load(source, specs, arch.Model, hp, layout, devices, lambda device: ref.OPS)
        memory = Memory(devices, layout, hp, Sizes(n_ubatch, n_ubatches, n_slots, n_cells), slot_bytes, shape.n_staging)
        work = Work(loaded.model, layout, memory, loaded.host_experts, ref.OPS)
        runner = Runner(devices, layout, memory, work, max_in_flight=max_in_flight)
        n_bytes = sum(experts.n_bytes for experts in loaded.host_experts.values())
        for device in devices.all:
            device.reset_counters()
        yield Pipe(runner, devices, layout, n_bytes, memory)
    finally:
        devices.close()


def cut_wave(ids: Sequence[int], sizes: Sequence[int], *, first_pos: int = 0, slot: int = 0) -> Wave:
    """A wave over one sequence, cut in ubatches of the given sizes, all rows wanted."""
    ubatches = []
    i = 0
    for n in sizes:
        piece = tuple(int(t) for t in ids[i : i + n])
        ubatches.append(Ubatch(piece, (Segment(slot, first_pos + i, n),), tuple(range(n))))
        i += n
    return Wave(tuple(ubatches))


def run_all(pipe: Pipe, ids: Sequence[int], sizes: Sequence[int], schedule: WaveSchedule, n_waves: int) -> torch.Tensor:
    """Logits `[T, V]` of a prompt that goes through in `n_waves` waves."""
    per_wave = -(-len(sizes) // n_waves)
    rows = []
    first = 0
    for i in range(0, len(sizes), per_wave):
        group = sizes[i : i + per_wave]
        n = sum(group)
        rows += pipe.runner.run(cut_wave(ids[first : first + n], group, first_pos=first), schedule)
        first += n
    return torch.cat(rows)
