"""The buffers a run needs, all reserved before the first request, in the sizes the plan has counted.

Nothing here grows later: a smaller wave uses the front of the same buffers, so no request allocates, and the worst
case is known to fit when loading ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from overspill.cache.cells import CellType, KvShape
from overspill.cache.rings import Rings
from overspill.device.base import Buffer, Devices, MemoryKind
from overspill.gpu_memory import MAX_SLICES
from overspill.models.base import HParams
from overspill.pipeline.history import TokenHistory
from overspill.pipeline.ledger import Resource
from overspill.pipeline.letter_sizes import LetterSizes, step_letters
from overspill.pipeline.split import N_TILES, Layout, detours
from overspill.pipeline.wave import MAX_STEP_TOKENS
from overspill.placement.budget import N_LOGIT_BUFFERS, N_LOGIT_ROWS, StagingPlan


@dataclass(frozen=True)
class Sizes:
    """Worst cases of a run. n_ubatches: ubatches a wave can hold. n_slots: sequences. n_cells: cells of each.

    n_states: states of each, the one at its end included, in models that have states. n_trials: rows beside them, that
    nobody reads. has_rings: layers that see a window have cells for it and for a ubatch, not for all positions.
    """

    n_ubatch: int
    n_ubatches: int
    n_slots: int
    n_cells: int
    n_states: int = 1
    n_trials: int = 0
    has_rings: bool = True

    @classmethod
    def of_plan(
        cls,
        n_ubatch: int,
        n_wave: int,
        n_slots: int,
        n_ctx: int,
        n_states: int = 1,
        n_trials: int = 0,
        *,
        has_rings: bool = True,
    ) -> Sizes:
        """From a plan's numbers; `n_ctx` cells are shared out evenly over the slots."""
        return cls(n_ubatch, -(-n_wave // n_ubatch), n_slots, n_ctx // n_slots, n_states, n_trials, has_rings)

    @property
    def n_spare(self) -> int | None:
        """Cells of a ring beyond what its layer sees: all of a ubatch is written before it is read."""
        return self.n_ubatch if self.has_rings else None

    @property
    def n_logits_rows(self) -> int:
        """Rows of logits computed at once; more wanted rows are computed in chunks."""
        return min(self.n_ubatch, N_LOGIT_ROWS)


@dataclass(frozen=True)
class Precision:
    """Types of the buffers that kernels share: the normed input of experts, and keys and values (uint8: q8_0)."""

    normed: torch.dtype = torch.float32
    kv: torch.dtype = torch.float32


class Memory:
    """All buffers of a run, by the resource names of `pipeline.schedule`."""

    def __init__(
        self,
        devices: Devices,
        layout: Layout,
        hp: HParams,
        sizes: Sizes,
        staging: Sequence[StagingPlan | None],
        precision: Precision = Precision(),
        *,
        n_spread_tokens: int = 0,
        n_image_bytes: int = 0,
        cache_bytes: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.sizes = sizes
        self._precision = precision
        self._n_spread_tokens = n_spread_tokens
        self.n_vocab = hp.n_vocab
        self.n_expert_used = hp.n_expert_used
        self.has_states = hp.has_states
        self.rings = Rings.of((hp.kv_shape(i) for i in range(hp.n_layer)), sizes.n_cells, sizes.n_spare)
        self.history = TokenHistory(hp.n_before, n_slots=sizes.n_slots, n_cells=sizes.n_cells)
        self._devices = devices
        self._hp = hp
        self._buffers: dict[Resource, tuple[Buffer, ...]] = {}
        self._together: dict[tuple[Resource, ...], tuple[Buffer, ...]] = {}
        for i_device in self._in_use(layout):
            self._add_activations(i_device)
        for i_device in layout.input_devices:
            self._add_inputs(i_device)
        for i_layer, i_device in enumerate(layout.layer_device):
            self._add_kv(i_layer, i_device)
        if n_spread_tokens:
            self._add_spread(layout, n_spread_tokens)
        for i_layer, n_bytes in cache_bytes.items():
            self._add_cache(i_layer, layout.layer_device[i_layer], n_bytes)
        for i_device, n in Counter(layout.layer_device[i] for i in cache_bytes).items():
            known = devices.host.allocate_pinned(n * hp.n_expert * MAX_SLICES * 4, name=f"host_cached{i_device}")
            self._buffers["host_cached", i_device] = (known,)
        for i_device, plan in enumerate(staging):
            if plan is not None:
                self._add_staging(i_device, plan)
        self.x_row_bytes = hp.x_dim * 4
        self.tile_bytes = min(layout.detour.tile_bytes, sizes.n_ubatch * self.x_row_bytes)
        for source, target in detours(layout):
            self._add_tiles(source, target)
        self._add_host(layout)
        if n_image_bytes:
            images = devices.host.allocate_pinned(n_image_bytes, name="images", kind=MemoryKind.KV)
            self._buffers["images",] = (images,)

    @property
    def n_state_rows(self) -> int:
        """Rows of the state tensors."""
        return self.sizes.n_slots * self.sizes.n_states + self.sizes.n_trials

    @property
    def trial_row(self) -> int:
        """A row of states that may be written at any time."""
        return self.sizes.n_slots * self.sizes.n_states

    def step_letters(self, layout: Layout) -> LetterSizes:
        """What letters of decoding steps may take."""
        return step_letters(
            self._hp,
            layout,
            self.sizes.n_ubatch,
            min(MAX_STEP_TOKENS, self.sizes.n_slots) if self.has_states else MAX_STEP_TOKENS,
            normed_value_bytes=self._precision.normed.itemsize,
            n_spread=self._n_spread_tokens,
        )

    def __getitem__(self, resource: Resource) -> tuple[Buffer, ...]:
        return self._buffers[resource]

    def one(self, resource: Resource) -> Buffer:
        """The buffer of a resource that has one."""
        (buffer,) = self._buffers[resource]
        return buffer

    def any_of(self, resource: Resource) -> tuple[Buffer, ...]:
        """Its buffers; none where it does not exist."""
        return self._buffers.get(resource, ())

    def all_of(self, resources: tuple[Resource, ...]) -> tuple[Buffer, ...]:
        """The buffers of several resources."""
        buffers = self._together.get(resources)
        if buffers is None:
            buffers = tuple(buffer for resource in resources for buffer in self._buffers[resource])
            self._together[resources] = buffers
        return buffers

    def _in_use(self, layout: Layout) -> list[int]:
        return sorted({layout.host, layout.output_device, *layout.input_devices})

    def _new(self, i_device: int, shape: tuple[int, ...], dtype: torch.dtype, kind: MemoryKind, name: str) -> Buffer:
        return self._devices.all[i_device].allocate(shape, dtype, kind=kind, name=name)

    def _add_activations(self, i_device: int) -> None:
        hp, T, compute = self._hp, self.sizes.n_ubatch, MemoryKind.COMPUTE
        for m in range(self.sizes.n_ubatches):
            x = self._new(i_device, (T, hp.x_dim), torch.float32, compute, f"x{m}")
            self._buffers["x", i_device, m] = (x,)
            if hp.n_expert:
                self._buffers["route", i_device, m] = (
                    self._new(i_device, (T, hp.n_embd), self._precision.normed, compute, f"normed{m}"),
                    self._new(i_device, (T, hp.n_expert_used), torch.int32, compute, f"ids{m}"),
                    self._new(i_device, (T, hp.n_expert_used), torch.float32, compute, f"mix{m}"),
                )

    def _add_inputs(self, i_device: int) -> None:
        """Positions `[m, 0]` and token ids `[m, 1]` of each ubatch."""
        shape = (self.sizes.n_ubatches, 2, self.sizes.n_ubatch)
        inputs = self._new(i_device, shape, torch.int32, MemoryKind.COMPUTE, "inputs")
        self._buffers["pos", i_device] = (inputs,)

    def _add_kv(self, i_layer: int, i_device: int) -> None:
        kept, sizes = self._hp.kv_shape(i_layer), self.sizes
        shapes = kept.tensor_shapes(sizes.n_slots, sizes.n_cells, sizes.n_spare)
        cells = [
            self._new(i_device, shape, dtype, MemoryKind.KV, f"cells{i}.{i_layer}")
            for i, (shape, dtype) in enumerate(self._cells(kept, shapes))
        ]
        states = [
            self._new(i_device, shape, torch.float32, MemoryKind.KV, f"state{i}.{i_layer}")
            for i, shape in enumerate(kept.state_shapes(self.n_state_rows))
        ]
        self._buffers["kv", i_layer] = (*cells, *states)

    def _cells(self, kept: KvShape, shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of tensors of cells, then of blocks, which q8_0 has as float16."""
        is_q8 = self._precision.kv == torch.uint8
        n_cell_tensors = len(shapes) - len(kept.blocks)
        for i, shape in enumerate(shapes):
            if is_q8 and i < n_cell_tensors:
                yield (*shape[:-1], CellType.Q8_0.row_bytes(shape[-1])), torch.uint8
            else:
                yield shape, torch.float16 if is_q8 else self._precision.kv

    def _add_spread(self, layout: Layout, n_tokens: int) -> None:
        """For experts of few tokens that several parties compute: who does what, and what each says."""
        compute = MemoryKind.COMPUTE
        used = self._in_use(layout)
        for i in used:
            for m in range(self.sizes.n_ubatches):
                who = self._new(i, (1, self._hp.n_expert * MAX_SLICES), torch.int32, compute, f"who{m}")
                self._buffers["who", i, m] = (who,)
            rows = (n_tokens, self._hp.n_embd)
            self._buffers["y", i] = (self._new(i, rows, torch.float32, compute, "y"),)
            if i != layout.host:
                tally = self._new(i, (layout.n_layer, 2 + layout.n_accelerators), torch.int64, compute, "tally")
                self._buffers["tally", i] = (tally,)
                on_host = self._devices.host.allocate_pinned(tally.n_bytes, name=f"tally{i}")
                self._buffers["host_tally", i] = (on_host,)
            for party in used:
                if party != i and i != layout.host:
                    heard = self._new(i, rows, torch.float32, compute, f"heard{party}")
                    self._buffers["heard", i, party] = (heard,)

    def _add_staging(self, i_device: int, plan: StagingPlan) -> None:
        for i in range(plan.n_slots):
            slot = self._new(i_device, (plan.slot_bytes,), torch.uint8, MemoryKind.STAGING, f"slot{i}")
            self._buffers["slot", i_device, i] = (slot,)
        if plan.wide_bytes:
            wide = self._new(i_device, (plan.wide_bytes,), torch.uint8, MemoryKind.STAGING, "wide")
            self._buffers["wide", i_device] = (wide,)

    def _add_cache(self, i_layer: int, i_device: int, n_bytes: int) -> None:
        """Slots of experts that the device keeps, and what is known of them (see `kernels.CacheState`)."""
        slots = self._new(i_device, (n_bytes,), torch.uint8, MemoryKind.CACHE, f"cache.{i_layer}")
        state = self._new(
            i_device, (4, self._hp.n_expert * MAX_SLICES), torch.int32, MemoryKind.CACHE, f"cached.{i_layer}"
        )
        self._buffers["cache", i_layer] = (slots, state)

    def _add_tiles(self, source: int, target: int) -> None:
        for i in range(N_TILES):
            tile = self._devices.host.allocate_pinned(self.tile_bytes, name=f"tile {source}-{target}.{i}")
            self._buffers["tile", source, target, i] = (tile,)

    def _add_host(self, layout: Layout) -> None:
        host, sizes, V = self._devices.host, self.sizes, self._hp.n_vocab
        n_rows = sizes.n_logits_rows
        for i in range(N_LOGIT_BUFFERS):
            out = self._new(layout.output_device, (n_rows, V), torch.float32, MemoryKind.COMPUTE, f"logits{i}")
            self._buffers["logits", layout.output_device, i] = (out,)
            self._buffers["host_logits", i] = (host.allocate_pinned(n_rows * V * 4, name=f"host_logits{i}"),)
        n_inputs = sizes.n_ubatches * 2 * sizes.n_ubatch
        self._buffers["host_pos",] = (host.allocate_pinned(n_inputs * 4, name="host_inputs"),)
        for m in range(sizes.n_ubatches):
            n_bytes = max(1, sizes.n_ubatch * self._hp.n_expert_used * 4)
            self._buffers["ids", m] = (host.allocate_pinned(n_bytes, name=f"host_ids{m}"),)
