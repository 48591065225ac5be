"""Slabs: how a layer's host experts are cut for upload. Sizes only, no torch.

A slab is a range of experts of one layer, whose parts stand in a staging slot one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from overspill.pipeline.split import Slab

ALIGNMENT = 64
WIDE_VALUE_BYTES = 2


def align(n_bytes: int) -> int:
    """Round up to the alignment of parts in a slot."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def cut_slabs(
    n_experts: int, expert_bytes: Sequence[int], slot_bytes: int, *, at_most: int | None = None
) -> tuple[Slab, ...]:
    """Consecutive ranges of experts, each of which fits in a slot; sizes differ by at most one expert.

    expert_bytes: bytes of one expert's staged parts. slot_bytes must be at least `slot_bytes_for(.., 1)`.
    at_most: experts in a slab, whatever the slot holds.
    """
    most = min(n_experts, at_most or n_experts, (slot_bytes - len(expert_bytes) * (ALIGNMENT - 1)) // sum(expert_bytes))
    assert most > 0, "the plan gave a slot that holds no expert"
    n_slabs = -(-n_experts // most)
    return tuple(Slab(n_experts * i // n_slabs, n_experts * (i + 1) // n_slabs) for i in range(n_slabs))


def slot_bytes_for(expert_bytes: Sequence[int], n_experts: int) -> int:
    """Smallest slot in which `cut_slabs` puts `n_experts` experts at once."""
    return n_experts * sum(expert_bytes) + len(expert_bytes) * (ALIGNMENT - 1)
