"""From an architecture's tensors to what placement wants to know: bytes, roles, and FLOPs per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from overspill.cache.cells import CellType, KvShape
from overspill.gguf.tensors import TensorInfo
from overspill.gguf.types import TensorType
from overspill.gpu_memory import MAX_SLICES
from overspill.models.specs.base import HParams, TensorSpec
from overspill.placement.shape import CellRing, ModelShape, Role, role_of, sized_tensors

_SLICE_VALUES = 32  # what every kernel can read, of any type


def model_shape(
    name: str,
    hp: HParams,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, TensorInfo],
    *,
    cells: CellType = CellType.F32,
    has_rings: bool = True,
    widens_dense: bool = False,
) -> ModelShape:
    """Sizes and costs of a model from the tensors it loads.

    A product of a `[N, K]` weight with one token takes 2 N K FLOP; of routed experts a token meets K of E.
    cells: how keys and values are stored. has_rings: see `pipeline.memory.Sizes`. widens_dense: dense matrices are held
    in bfloat16. Attention is priced as if every layer saw all keys, a token's change of a state as two products with it
    and two sums.
    """
    kv = [hp.kv_shape(i) for i in range(hp.n_layer)]
    rings = [_ring(shape, cells) if has_rings else None for shape in kv]
    flops, experts = [8.0 * shape.n_state_values for shape in kv], [0] * hp.n_layer
    for spec in specs:
        role, i_layer = role_of(spec.name)
        if i_layer is not None and len(spec.shape) > 1 and spec.name.endswith(".weight") and not spec.is_index:
            share = hp.n_expert_used / hp.n_expert if role is Role.EXPERT else 1.0
            flops[i_layer] += 2.0 * prod(spec.shape) * share
            experts[i_layer] += prod(spec.shape) // hp.n_expert if role is Role.EXPERT else 0
    sizes = ((spec.name, _held_bytes(tensors[spec.name], widens_dense=widens_dense)) for spec in specs)
    return ModelShape(
        name=name,
        arch=hp.arch,
        n_layer=hp.n_layer,
        n_embd=hp.n_embd,
        n_vocab=hp.n_vocab,
        n_expert=hp.n_expert,
        n_expert_used=hp.n_expert_used,
        n_ctx_train=hp.n_ctx_train,
        tensors=sized_tensors(sizes, n_layer=hp.n_layer),
        kv_bytes_per_cell=tuple(
            shape.cell_bytes(cells) - (0 if ring is None else ring.cell_bytes)
            for shape, ring in zip(kv, rings, strict=True)
        ),
        rings=tuple(rings),
        state_bytes=tuple(shape.n_state_values * 4 for shape in kv),
        flops_per_token=tuple(flops),
        attention_flops=tuple(2.0 * hp.n_head * (shape.key_dim + shape.value_dim) for shape in kv),
        output_flops=2.0 * hp.n_vocab * hp.n_embd,
        x_dim=hp.x_dim,
        expert_values=max(experts) if hp.n_expert else 0,
        n_expert_slices=_n_slices(specs, tensors),
    )


def _ring(shape: KvShape, cells: CellType) -> CellRing | None:
    """What a layer keeps of the positions that it may see, if these are not all; its blocks are kept of all."""
    if shape.reach is None:
        return None
    return CellRing(shape.reach, shape._replace(blocks=()).cell_bytes(cells))


def _n_slices(specs: Sequence[TensorSpec], tensors: Mapping[str, TensorInfo]) -> int:
    """Into how many slices of their hidden width experts can be cut: whole blocks of down's rows, and no vectors."""
    names = [spec.name for spec in specs]
    downs = [spec for spec in specs if spec.name.endswith("ffn_down_exps.weight")]
    blocks = [max(_SLICE_VALUES, tensors[spec.name].type.block.n_elements) for spec in downs]
    can_be = all(spec.shape[-1] % (MAX_SLICES * block) == 0 for spec, block in zip(downs, blocks, strict=True))
    has_vectors = any(name.endswith(("_exps.bias", "_exps.scale")) for name in names)
    return MAX_SLICES if downs and can_be and not has_vectors else 1


def is_widened(info: TensorInfo) -> bool:
    """Whether a tensor is a quantised dense matrix of a layer: few bytes, read by every ubatch, better bfloat16."""
    is_dense = info.name.startswith("blk.") and info.name.endswith(".weight") and len(info.shape) == 2
    return is_dense and info.type not in (TensorType.F32, TensorType.BF16) and not info.type.is_integer


def dense_wide_bytes(specs: Sequence[TensorSpec], tensors: Mapping[str, TensorInfo]) -> int:
    """What the matrices that `is_widened` names take in bfloat16."""
    return sum(2 * prod(spec.shape) for spec in specs if is_widened(tensors[spec.name]))


def _held_bytes(info: TensorInfo, *, widens_dense: bool) -> int:
    return 2 * prod(info.shape) if widens_dense and is_widened(info) else info.n_bytes
