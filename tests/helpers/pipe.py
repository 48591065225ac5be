"""A fixture model on virtual (or null, or no) devices with a hand-made layout, for tests of the pipeline itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import cast
from unittest.mock import patch

import torch

from overspill.cache.cells import Segment
from overspill.device.base import Buffer, Devices
from overspill.device.factory import open_devices
from overspill.device.hazard import Entry
from overspill.device.null import NullBackend, NullDevice, NullHost, NullLog
from overspill.device.virtual import VirtualStream
from overspill.gguf.source import ModelSource
from overspill.kernels import Ops, ref
from overspill.models.check import understand
from overspill.models.specs.base import HParams
from overspill.pipeline import weights
from overspill.pipeline.expert_cache import ExpertCaches
from overspill.pipeline.memory import Memory, Precision, Sizes
from overspill.pipeline.reading import LoadMode
from overspill.pipeline.recorded import Recorded
from overspill.pipeline.residence import Residence
from overspill.pipeline.runner import Runner
from overspill.pipeline.schedule import Order, Policy, WaveSchedule
from overspill.pipeline.slabs import WIDE_VALUE_BYTES, cut_slabs, slot_bytes_for
from overspill.pipeline.split import Detour, Layout, Slab
from overspill.pipeline.spread_tally import SpreadTally
from overspill.pipeline.step_work import StepWork
from overspill.pipeline.steps import StepRunner
from overspill.pipeline.wave import Ubatch, Wave
from overspill.pipeline.weights import load
from overspill.pipeline.work import Work
from overspill.placement.budget import StagingPlan

OPS = replace(ref.OPS, widen=ref.widen)
DIRECT = Detour()
FLOAT32 = Precision()
EXACT_POLICIES = [policy for policy in Policy if policy is not Policy.SPREAD]
"""Those that give the same bits wherever experts are computed; SPREAD adds up the parts of several parties."""

ORDERS_AND_POLICIES = [(order, policy) for order in Order for policy in EXACT_POLICIES]

_NULL_BYTES = 1 << 40
# The real ring would cost most of the time of opening a small model.
_RING_BYTES = 1 << 16


Layers = str | frozenset[int]


def _holds(layers: Layers, i_layer: int) -> bool:
    """Whether a layer is one of `all`, `none`, `odd`, `even`, or of the numbers given."""
    if isinstance(layers, frozenset):
        return i_layer in layers
    return {"all": True, "none": False, "odd": i_layer % 2 == 1, "even": i_layer % 2 == 0}[layers]


@dataclass(frozen=True)
class Shape:
    """A layout to try: devices, grain, experts per staging slot, which layers keep experts on the host.

    No devices: everything on the CPU. mixed_layers: those of the host layers whose down matrices are resident.
    embeds: the last accelerator does it, not the host. widens: staged slabs are dequantised before they are used.
    """

    n_devices: int
    grain: int = 1
    slab_experts: int = 8
    host_layers: Layers = "all"
    n_staging: int = 2
    n_layers_on_cpu: int = 0
    mixed_layers: Layers = "none"
    embeds: bool = False
    widens: bool = False
    n_cached: int = 0
    n_slices: int = 1

    def device_of(self, i_layer: int) -> int:
        """Where the layer computes; `n_devices` is the host."""
        if self.n_devices == 0 or i_layer < self.n_layers_on_cpu:
            return self.n_devices
        return (i_layer // self.grain) % self.n_devices

    def is_host(self, i_layer: int) -> bool:
        """Whether the layer's experts stay in host RAM though an accelerator computes it."""
        return self.device_of(i_layer) < self.n_devices and _holds(self.host_layers, i_layer)

    def is_mixed(self, i_layer: int) -> bool:
        """Whether the down matrices of a host layer are resident."""
        return self.is_host(i_layer) and _holds(self.mixed_layers, i_layer)

    def is_on_host(self, name: str) -> bool:
        """Whether a tensor of a host layer's experts stays in host RAM."""
        return not (name.endswith("ffn_down_exps.weight") and self.is_mixed(int(name.split(".")[1])))


def expert_bytes(source: ModelSource, i_layer: int, shape: Shape) -> list[int]:
    """Bytes of one expert's gate, up and down, of those that are on the host."""
    names = [f"blk.{i_layer}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    infos = [source.tensors[name] for name in names if shape.is_on_host(name)]
    return [info.n_bytes // info.shape[0] for info in infos]


def make_layout(source: ModelSource, n_layer: int, n_expert: int, shape: Shape) -> tuple[Layout, tuple[int, ...]]:
    """The layout and the staging slot bytes per device."""
    N = shape.n_devices
    where = tuple(shape.device_of(i) for i in range(n_layer))
    slot_bytes = [0] * N
    slabs: list[tuple[Slab, ...]] = []
    for i, device in enumerate(where):
        if n_expert == 0 or not shape.is_host(i):
            slabs.append(())
            continue
        parts = expert_bytes(source, i, shape)
        size = slot_bytes_for(parts, min(shape.slab_experts, n_expert))
        slot_bytes[device] = max(slot_bytes[device], size)
        slabs.append(cut_slabs(n_expert, parts, size))
    mixed = frozenset(i for i in range(n_layer) if slabs[i] and shape.is_mixed(i))
    embed_on = N - 1 if shape.embeds else None
    return Layout(N, where, where[-1], tuple(slabs), mixed, embed_on), tuple(slot_bytes)


def rare_delays(seed: int, *, share: float = 0.25, longest_s: float = 0.0008) -> AbstractContextManager[object]:
    """While it lasts, virtual streams delay this share of their work and copies (the same ones for the same seed).

    A few long delays change the order of things more than many short ones, and cost less time.
    """
    randoms: dict[str, Random] = {}

    def delay(stream: VirtualStream) -> None:
        name = f"{seed}/{stream.device.name}/{stream.lane}"
        random = randoms.setdefault(name, Random(name))
        if random.random() < share:
            time.sleep(random.uniform(0.0, longest_s))

    return patch.object(VirtualStream, "_delay", delay)


def staging_plans(slot_bytes: Sequence[int], hp: HParams, shape: Shape) -> tuple[StagingPlan | None, ...]:
    """Staging rings with slots of these sizes; none where a device stages nothing."""
    n_experts = min(shape.slab_experts, hp.n_expert)
    wide_bytes = n_experts * 3 * hp.n_embd * hp.n_ff_exp * WIDE_VALUE_BYTES if shape.widens else 0
    plans = [StagingPlan(shape.n_staging, size, n_experts, wide_bytes) if size else None for size in slot_bytes]
    return tuple(plans)


def cache_bytes(source: ModelSource, layout: Layout, shape: Shape) -> dict[int, int]:
    """Memory of the slots, by layer."""
    host_layers = [i for i, slabs in enumerate(layout.slabs) if slabs and shape.n_cached]
    return {i: slot_bytes_for(expert_bytes(source, i, shape), shape.n_cached) for i in host_layers}


def shares_of(n_devices: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For spread experts: every device takes part in every layer, its owner twice as much as the others."""
    everybody = range(n_devices + 1)
    return tuple(((i, 2), *((p, 1) for p in everybody if p != i)) for i in range(n_devices))


@dataclass
class Pipe:
    """An assembled pipeline. uploaded_bytes and the like are counted from here, loading excepted."""

    runner: Runner
    devices: Devices
    layout: Layout
    n_host_expert_bytes: int
    memory: Memory
    shape: Shape
    residence: Residence
    tally: SpreadTally | None
    caches: ExpertCaches

    def schedule(self, order: Order, policy: Policy = Policy.ALL) -> WaveSchedule:
        """A schedule that uses the staging slots there are."""
        shape = self.shape
        shares, n_cached = shares_of(shape.n_devices), (shape.n_cached,) * shape.n_devices
        return WaveSchedule(order, policy, shape.n_staging, shape.widens, shares, n_cached, shape.n_slices)

    @property
    def log(self) -> list[Entry]:
        """What null devices have written down."""
        return cast(NullBackend, self.devices.host).log.entries

    def buffers(self, *names: str) -> list[Buffer]:
        """All buffers of the resources of these names; of every resource when none is given."""
        resources = self.memory._buffers.items()
        return [b for key, buffers in resources if not names or cast(tuple[str], key)[0] in names for b in buffers]

    def poison(self) -> None:
        """Forget everything: what a run does not compute itself is NaN (or id -1)."""
        self.runner.synchronize_host()
        for buffer in self.buffers():
            buffer.raw().reshape(-1).view(torch.uint8).fill_(0xFF)
        self.caches.empty_host()

    def uploaded_bytes(self) -> list[int]:
        """Per accelerator."""
        return [device.counters.uploaded_bytes for device in self.devices.accelerators]


class ReadableNullHost(NullHost):
    """A null host with real memory, all zeros at first, so that ids and logits can be read on it."""

    def _new_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


def _open(kind: str, n_devices: int, chaos_seed: int | None) -> Devices:
    if kind == "null":
        log = NullLog()
        accelerators = tuple(NullDevice(i, log=log, total_bytes=_NULL_BYTES) for i in range(n_devices))
        return Devices(accelerators, ReadableNullHost(log=log, total_bytes=_NULL_BYTES))
    if n_devices == 0:
        return open_devices("cpu")
    spec = f"{kind}:{n_devices}"
    return open_devices(spec, chaos_seed=chaos_seed, thread_init=lambda: torch.set_num_threads(1))


@contextmanager
def pipe(
    source: ModelSource,
    shape: Shape,
    *,
    n_ubatch: int,
    n_ubatches: int,
    n_cells: int,
    n_slots: int = 1,
    n_states: int = 1,
    chaos_seed: int | None = None,
    max_in_flight: int = 64,
    kind: str = "virtual",
    devices: Devices | None = None,
    detour: Detour = DIRECT,
    waits_on_host: bool = False,
    mode: LoadMode = LoadMode.AUTO,
    ops: Ops | None = None,
    n_trials: int = 0,
    precision: Precision = FLOAT32,
) -> Iterator[Pipe]:
    """Open devices (or take those given), reserve, load; close at the end.

    ops: of the accelerators; None: those of the host. n_trials: 1 lets steps of decoding be recorded. precision: of
    shared buffers, cells among them.
    """
    ops = OPS if ops is None else ops
    arch, hp, specs, source = understand(source)
    layout, slot_bytes = make_layout(source, hp.n_layer, hp.n_expert, shape)
    layout = replace(layout, detour=detour)
    devices = devices or _open(kind, shape.n_devices, chaos_seed)
    try:
        memory = Memory(
            devices,
            layout,
            hp,
            Sizes(n_ubatch, n_ubatches, n_slots, n_cells, n_states, n_trials),
            staging_plans(slot_bytes, hp, shape),
            precision,
            n_spread_tokens=n_ubatch if hp.n_expert else 0,
            cache_bytes=cache_bytes(source, layout, shape),
        )
        with patch.object(weights, "_RING_BYTES", _RING_BYTES), rare_delays(0, share=0.0):
            loaded = load(
                source,
                specs,
                arch.Model,
                hp,
                layout,
                devices,
                lambda device: OPS if device.is_host else ops,
                is_on_host=shape.is_on_host,
                mode=mode,
            )
        parts = (loaded.model, layout, memory, loaded.host_experts, OPS, loaded.rings)
        tables = [*[ops] * shape.n_devices, OPS]
        steps = None
        if n_trials:
            step_work = StepWork(*parts, tables=tables)
            assert StepRunner.serves(devices, layout, hp, tables)
            steps = StepRunner(devices, layout, memory, step_work, tables, n_threads=1)
        tally = SpreadTally(devices, memory, layout, loaded.host_experts) if hp.n_expert else None
        caches = ExpertCaches(devices, memory, layout, hp.n_expert)
        runner = Runner(
            devices,
            layout,
            memory,
            Work(*parts, tables=tables, recorded=Recorded(n_ubatches)),
            max_in_flight=max_in_flight,
            waits_on_host=waits_on_host,
            steps=steps,
            caches=caches,
        )
        n_bytes = sum(experts.n_bytes for experts in loaded.host_experts.values())
        for device in devices.all:
            device.reset_counters()
        yield Pipe(runner, devices, layout, n_bytes, memory, shape, loaded.residence, tally, caches)
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


def cut_waves(ids: Sequence[int], sizes: Sequence[int], n_waves: int) -> list[Wave]:
    """The same in at most `n_waves` waves, one after the other."""
    per_wave = -(-len(sizes) // n_waves)
    waves = []
    first = 0
    for i in range(0, len(sizes), per_wave):
        group = sizes[i : i + per_wave]
        waves.append(cut_wave(ids[first : first + sum(group)], group, first_pos=first))
        first += sum(group)
    return waves


def run_all(pipe: Pipe, ids: Sequence[int], sizes: Sequence[int], schedule: WaveSchedule, n_waves: int) -> torch.Tensor:
    """Logits `[T, V]` of a prompt that goes through in `n_waves` waves."""
    return torch.cat([rows for wave in cut_waves(ids, sizes, n_waves) for rows in pipe.runner.run(wave, schedule)])
