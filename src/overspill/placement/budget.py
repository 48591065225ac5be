"""The budget of a device: bytes by kind, and the sizes of the buffers that do not depend on where layers live.

All buffers are counted for the worst case, because nothing is allocated after loading: the KV cache for every cell,
activations for every ubatch of a wave, the whole staging ring.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from overspill.gpu_memory import MAX_SLICES
from overspill.placement.shape import ModelShape

N_LOGIT_ROWS: Final = 128
"""Most rows of logits computed at once."""

N_LOGIT_BUFFERS: Final = 2
"""So that rows are computed while the ones before are copied to the host."""


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What the kernels of the accelerators take beyond the buffers that all devices have.

    wide_value_bytes: per value of a slab that is dequantised before it is used; 0: slabs are used as they are.
    normed_value_bytes: per value of the experts' input. scratch_bytes: temporaries of one ubatch. head_bytes: and of
    the logits, on the device that computes them. resident_bytes: and of experts that may be resident. n_trials: rows of
    recurrent states beside those of sequences.
    takes_steps: decoding steps are recorded, and replayed without the host.
    n_spread_tokens: most tokens whose host experts several parties can compute; 0: none. spreads_alone: other
    accelerators cannot take part, because they lack the experts' biases. read_cell_bytes: per cell of one sequence,
    where attention reads keys and values that are decoded first, of one layer. host_read_cell_bytes: the same in host
    RAM, where the CPU computes layers. recordings: whether prompts are recorded, the choices that there are, the
    faster first; recording_bytes: what that takes besides.
    """

    wide_value_bytes: int = 0
    normed_value_bytes: int = 4
    scratch_bytes: int = 0
    head_bytes: int = 0
    resident_bytes: int = 0
    n_trials: int = 0
    takes_steps: bool = False
    n_spread_tokens: int = 0
    spreads_alone: bool = False
    read_cell_bytes: int = 0
    host_read_cell_bytes: int = 0
    recordings: tuple[bool, ...] = (False,)
    recording_bytes: int = 0

    def recorded(self, is_recorded: bool) -> KernelNeeds:
        """The same with prompts that are recorded, or are not."""
        return replace(self, scratch_bytes=self.scratch_bytes + self.recording_bytes) if is_recorded else self


NO_NEEDS: Final = KernelNeeds()


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """Buffers that a device which computes layers holds, for each ubatch of a wave; logits once.

    x: hidden states f32 [T, X]. normed: [T, D]. expert_ids: i32 [T, K]. expert_weights: f32
    [T, K]. positions: i32 [2, T], with the token ids. logits: f32 [2, min(T, 128), V], on the output device only.
    """

    n_slots: int
    x: int
    normed: int
    expert_ids: int
    expert_weights: int
    positions: int
    logits: int

    @property
    def slot(self) -> int:
        """Bytes of one ubatch slot."""
        return self.x + self.normed + self.expert_ids + self.expert_weights + self.positions

    @property
    def total(self) -> int:
        return self.n_slots * self.slot + self.logits


def logits_bytes(shape: ModelShape, n_ubatch: int) -> int:
    """f32 [2, min(T, 128), V]: on the device that computes logits, and in host RAM, where they arrive."""
    return N_LOGIT_BUFFERS * min(n_ubatch, N_LOGIT_ROWS) * shape.n_vocab * 4


def activation_bytes(
    shape: ModelShape, *, n_ubatch: int, n_wave: int, has_output: bool, normed_value_bytes: int = 4
) -> ActivationBytes:
    """Sizes of the activation buffers of one device; the runner allocates exactly these."""
    n_expert_used = shape.n_expert_used if shape.is_moe else 0
    return ActivationBytes(
        n_slots=-(-n_wave // n_ubatch),
        x=n_ubatch * 4 * shape.x_dim,
        normed=n_ubatch * normed_value_bytes * shape.n_embd if shape.is_moe else 0,
        expert_ids=n_ubatch * 4 * n_expert_used,
        expert_weights=n_ubatch * 4 * n_expert_used,
        positions=n_ubatch * 8,
        logits=logits_bytes(shape, n_ubatch) if has_output else 0,
    )


def pinned_end_bytes(shape: ModelShape, sizes: ActivationBytes, n_ubatch: int) -> int:
    """Host RAM that copies from and to devices start and end in: ids and positions, chosen experts, logits."""
    return sizes.n_slots * (sizes.positions + max(1, sizes.expert_ids)) + logits_bytes(shape, n_ubatch)


def who_bytes(shape: ModelShape, n_ubatches: int) -> int:
    """i32 [M, E S]: who computes which slice of an expert."""
    return 4 * n_ubatches * shape.n_expert * MAX_SLICES


def tally_bytes(shape: ModelShape, n_devices: int) -> int:
    """i64 [L, 2 + N]: how many experts each party has computed."""
    return 8 * shape.n_layer * (2 + n_devices)


def spread_bytes(shape: ModelShape, *, n_ubatches: int, n_tokens: int, n_used: int, n_devices: int) -> int:
    """What an accelerator holds for experts of few tokens that several parties compute: who computes which; what each
    of the `n_used` devices and the host say, f32 [T, D]; and a tally."""
    said = 4 * shape.n_embd * (n_used + 1) * n_tokens
    return who_bytes(shape, n_ubatches) + said + tally_bytes(shape, n_devices)


def most_spread_bytes(shape: ModelShape, *, n_ubatches: int, needs: KernelNeeds, n_devices: int) -> int:
    """`spread_bytes` where all devices take part, as far as kernels let experts be spread at all."""
    if not needs.n_spread_tokens or not shape.is_moe:
        return 0
    return spread_bytes(
        shape,
        n_ubatches=n_ubatches,
        n_tokens=needs.n_spread_tokens,
        n_used=n_devices,
        n_devices=n_devices,
    )


SLOT_PADDING: Final = 192
"""Bytes a slot has beyond its experts, because the parts of a slab start at aligned offsets."""


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """The staging ring of a device: `n_slots` slots of `slot_bytes`, each holding up to `slab_experts` experts.

    wide_bytes: one slab dequantised, on devices whose kernels want that.
    """

    n_slots: int
    slot_bytes: int
    slab_experts: int
    wide_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        return self.n_slots * self.slot_bytes + self.wide_bytes


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Projected bytes of one device, by kind."""

    name: str
    total_bytes: int
    free_bytes: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    staging_bytes: int
    cache_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.compute_bytes + self.staging_bytes + self.cache_bytes

    @property
    def spare_bytes(self) -> int:
        """What stays free; negative when the plan does not fit."""
        return self.free_bytes - self.used_bytes
