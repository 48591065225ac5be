"""What a model takes on a machine, and what the kernels there take beside it: numbers alone, no torch.

So a plan can be made for a machine that one does not have, in a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from overspill.cache.cells import CellType, KvShape
from overspill.errors import UserError
from overspill.gguf.source import ModelSource
from overspill.gguf.types import TensorType
from overspill.gpu_memory import (
    DEFAULT_WEIGHT_BYTES,
    DENSE_PART_BYTES,
    MAX_RECORDED_LAYERS,
    MAX_SPREAD_TOKENS,
    RECORDED_LAYER_BYTES,
    kept_bytes,
    temporary_bytes,
)
from overspill.models.describe import dense_wide_bytes, model_shape
from overspill.models.specs.base import HParams, TensorSpec
from overspill.options import Options, flag_of
from overspill.pipeline.slabs import WIDE_VALUE_BYTES
from overspill.placement.budget import N_LOGIT_ROWS, KernelNeeds
from overspill.placement.machine import Machine
from overspill.placement.shape import ModelShape, Role, role_of

_MADE_OF_THREADS = ("virtual:", "null:")
_DENSE_SHARE = 0.2


class Weight(NamedTuple):
    """How matrices are stored, how long their rows are, and what all of them take."""

    type: TensorType
    n_columns: int
    n_bytes: int


def main_weight(source: ModelSource, specs: Sequence[TensorSpec]) -> Weight:
    """The kind of matrix that takes most of a model's layers."""
    n_bytes: Counter[tuple[TensorType, int]] = Counter()
    for spec in specs:
        info = source.tensors[spec.name]
        if spec.name.startswith("blk.") and len(info.shape) > 1 and not spec.is_index:
            n_bytes[info.type, info.shape[-1]] += info.n_bytes
    ((type, n_columns), n_most) = n_bytes.most_common(1)[0]
    return Weight(type, n_columns, n_most)


def expert_type(source: ModelSource, specs: Sequence[TensorSpec]) -> str:
    """The type that most bytes of routed experts are of; empty without experts."""
    n_bytes: Counter[str] = Counter()
    for spec in specs:
        if role_of(spec.name)[0] is Role.EXPERT:
            n_bytes[source.tensors[spec.name].type.name] += source.tensors[spec.name].n_bytes
    return n_bytes.most_common(1)[0][0] if n_bytes else ""


def has_gpus(machine: Machine) -> bool:
    """Whether the accelerators are real; those of a described machine are."""
    return any(not device.name.startswith(_MADE_OF_THREADS) for device in machine.devices)


def cell_type(machine: Machine, options: Options) -> CellType:
    """Of keys and values in the cache: what the user says, otherwise bf16 beside GPUs and f32 elsewhere."""
    asked = options.cache_type_k
    if asked == "auto":
        return CellType.BF16 if has_gpus(machine) else CellType.F32
    if asked == "f32" and has_gpus(machine):
        raise UserError(f"{flag_of('cache_type_k')} f32: kernels of GPUs read f16, bf16 and q8_0; choose one of these")
    return CellType(asked)


def shape_for(
    machine: Machine, options: Options, source: ModelSource, hparams: HParams, specs: Sequence[TensorSpec]
) -> ModelShape:
    """A model's sizes and costs as this machine would hold it."""
    return model_shape(
        source.name,
        hparams,
        specs,
        source.tensors,
        cells=cell_type(machine, options),
        has_rings=not options.swa_full,
        widens_dense=widens_dense(machine, source, specs),
    )


def widens_dense(machine: Machine, source: ModelSource, specs: Sequence[TensorSpec]) -> bool:
    """Whether GPUs hold dense matrices in bfloat16: where these take a small part of their memory."""
    n_bytes = dense_wide_bytes(specs, source.tensors)
    return has_gpus(machine) and n_bytes <= _DENSE_SHARE * sum(device.free_bytes for device in machine.devices)


def needs_on(
    machine: Machine, options: Options, hp: HParams, specs: Sequence[TensorSpec]
) -> Callable[[int], KernelNeeds]:
    """What the accelerators' kernels take, by the size of a ubatch."""
    cells = cell_type(machine, options)
    shapes = [hp.kv_shape(i) for i in range(hp.n_layer)]
    rings = [] if options.swa_full else [shape for shape in shapes if shape.reach is not None]
    rows = shapes if options.swa_full else [shape for shape in shapes if shape.reach is None]
    host_read = 0 if cells is CellType.F32 else _cell_bytes(rows, CellType.F32)
    if not has_gpus(machine):
        on = options.record_prompts == "on"
        needs = KernelNeeds(read_cell_bytes=host_read, host_read_cell_bytes=host_read, recordings=(on,))
        return lambda n_ubatch: needs
    n_heads_dim = hp.n_head * hp.head_dim
    rounded_bytes = 0 if cells is CellType.BF16 else 2 * n_heads_dim
    experts = (hp.n_expert, hp.n_expert_used, hp.n_ff_exp if hp.n_expert else hp.n_ff)
    head_bytes = 4 * N_LOGIT_ROWS * hp.n_vocab + DENSE_PART_BYTES
    recordings = {"auto": (True, False), "on": (True,), "off": (False,)}[options.record_prompts]
    widths = {"n_embd": hp.n_embd, "n_heads_dim": n_heads_dim, "n_kv_dim": hp.n_head_kv * hp.head_dim}

    def needs_of(n_ubatch: int) -> KernelNeeds:
        temporary = temporary_bytes(n_ubatch, **widths, experts=experts) + _ring_bytes(rings, cells, n_ubatch)
        temporary += 2 * n_heads_dim * n_ubatch * bool(rings)
        kept = kept_bytes(n_ubatch, n_embd=hp.n_embd, experts=experts)
        return KernelNeeds(
            wide_value_bytes=WIDE_VALUE_BYTES,
            normed_value_bytes=2,
            scratch_bytes=temporary + kept + (4 * hp.n_scratch + rounded_bytes) * n_ubatch,
            head_bytes=max(0, head_bytes - temporary),  # when logits are computed, layers need nothing
            resident_bytes=DEFAULT_WEIGHT_BYTES if hp.n_expert else 0,
            n_trials=1,
            takes_steps=True,
            n_spread_tokens=MAX_SPREAD_TOKENS,
            spreads_alone=any(spec.name.endswith(("_exps.bias", "_exps.scale")) for spec in specs),
            read_cell_bytes=_cell_bytes(rows, CellType.F16) if cells is CellType.Q8_0 else 0,
            host_read_cell_bytes=host_read,
            recordings=recordings,
            recording_bytes=temporary + MAX_RECORDED_LAYERS * RECORDED_LAYER_BYTES,
        )

    return needs_of


def _cell_bytes(shapes: Sequence[KvShape], type: CellType) -> int:
    """Of the largest cell of a layer."""
    return max((shape.cell_bytes(type) for shape in shapes), default=0)


def _ring_bytes(shapes: Sequence[KvShape], cells: CellType, n_ubatch: int) -> int:
    """What is copied of a ring so that it follows each other, and decoded if it must be, for one layer."""
    types = (cells, CellType.F16) if cells is CellType.Q8_0 else (cells,)
    sizes = (sum(shape.cell_bytes(t) for t in types) * ((shape.reach or 0) + n_ubatch) for shape in shapes)
    return max(sizes, default=0)
