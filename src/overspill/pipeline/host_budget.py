"""What a run keeps in host RAM beside weights: counted before loading, to the byte where it can be.

The host holds activations for experts that the CPU computes, the pinned ends of every copy, tiles of hand-offs that
make a detour, and, while loading or for as long as some experts cannot be pinned, rings.
"""

from __future__ import annotations

from dataclasses import replace

from overspill.pipeline.split import N_TILES, Layout, detours
from overspill.placement.budget import KernelNeeds, activation_bytes, pinned_end_bytes
from overspill.placement.plan import Placement
from overspill.placement.shape import ModelShape, Role

RING_CHUNKS = 3
RING_CHUNK_BYTES = 16 << 20
LOAD_CHUNKS = 2
LOAD_CHUNK_BYTES = 32 << 20
MIN_CHUNK_BYTES = 1 << 12


def with_host_buffers(
    shape: ModelShape,
    placement: Placement,
    layout: Layout,
    needs: KernelNeeds,
    *,
    n_parallel: int,
    n_image_bytes: int,
) -> Placement:
    """The placement, its last budget with all that the host holds. n_image_bytes: for images of slots."""
    sizes = activation_bytes(
        shape,
        n_ubatch=placement.n_ubatch,
        n_wave=placement.n_wave,
        has_output=layout.output_device == layout.host,
        normed_value_bytes=needs.normed_value_bytes,
    )
    positions = sizes.positions * sizes.n_slots
    reads = needs.host_read_cell_bytes * (placement.n_ctx // n_parallel) * (layout.host in layout.layer_device)
    compute = sizes.total - positions * (layout.host not in layout.input_devices) + reads
    pinned_ends = pinned_end_bytes(shape, sizes, placement.n_ubatch)
    tiles = len(detours(layout)) * N_TILES * min(layout.detour.tile_bytes, sizes.x)
    before = placement.budgets[-1]
    budget = replace(
        before,
        kv_bytes=before.kv_bytes + n_image_bytes,
        compute_bytes=compute,
        staging_bytes=pinned_ends + tiles,
    )
    spare = budget.free_bytes - (budget.used_bytes - budget.weights_bytes)
    budget = replace(budget, staging_bytes=budget.staging_bytes + _ring_bytes(shape, placement, layout, spare))
    return replace(placement, budgets=(*placement.budgets[:-1], budget))


def load_chunk_bytes(largest: int, free_bytes: int, *, most: int = LOAD_CHUNK_BYTES) -> int:
    """Size of a chunk that weights of devices are read into. largest: bytes of a tensor."""
    return max(MIN_CHUNK_BYTES, min(most, largest, free_bytes // (4 * LOAD_CHUNKS)))


def ring_chunk_bytes(largest: int, budget_bytes: int, n_rings: int, *, most: int = RING_CHUNK_BYTES) -> int:
    """Size of a chunk that pageable experts go up through: all rings together take at most half of the budget, unless
    that is next to nothing. largest: bytes of a part."""
    return max(MIN_CHUNK_BYTES, min(most, largest, budget_bytes // (2 * n_rings * RING_CHUNKS)))


def _ring_bytes(shape: ModelShape, placement: Placement, layout: Layout, spare_bytes: int) -> int:
    """The larger of what weights of devices, and what experts that are not pinned, go through."""
    if not placement.used_devices:
        return 0
    loading = LOAD_CHUNKS * load_chunk_bytes(max(tensor.n_bytes for tensor in shape.tensors), spare_bytes)
    n_rings = len({device for i, device in enumerate(layout.layer_device) if layout.has_host_experts(i)})
    if n_rings == 0:
        return loading
    part = max(t.n_bytes for t in shape.tensors if t.role is Role.EXPERT)
    return max(loading, n_rings * RING_CHUNKS * ring_chunk_bytes(part, spare_bytes, n_rings))
