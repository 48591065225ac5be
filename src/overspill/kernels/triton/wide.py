"""Experts as plain matrices: dequantised once, used by all ubatches of a wave.

A widened slab is an `ExpertWeights` like any other, whose stacks are views of one buffer: gate and up of an expert
stand one behind the other, `[n, 2 F, D]`, then come the down matrices, `[n, D, F]`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from overspill.kernels.triton.dequant import PLAIN, dequantize_into, plain_view
from overspill.kernels.triton.grouped import Stacks
from overspill.quant.experts import ExpertWeights
from overspill.quant.qtensor import QTensor


def wide_bytes(n_experts: int, n_embd: int, n_ff: int, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """Room that so many widened experts take."""
    return 3 * n_experts * n_embd * n_ff * dtype.itemsize


def stacks_in(buffer: torch.Tensor, n: int, F: int, D: int, dtype: torch.dtype) -> Stacks:
    """The layout above over the front of a uint8 buffer."""
    flat = buffer[: wide_bytes(n, D, F, dtype=dtype)].view(dtype)
    gate_up = flat[: 2 * n * F * D].view(n, 2 * F, D)
    return Stacks(gate_up[:, :F], gate_up[:, F:], flat[2 * n * F * D :].view(n, D, F))


def widen(weights: ExpertWeights, buffer: torch.Tensor, *, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """Dequantise all experts of `weights` into `buffer` (uint8, at least `wide_bytes`, 16-byte aligned)."""
    n, F, D = weights.gate.shape
    stacks = stacks_in(buffer, n, F, D, dtype)
    for q, stack in zip(weights.parts, stacks, strict=True):
        dequantize_into(q, stack)
    gate, up, down = (QTensor(stack.view(torch.uint8), PLAIN[dtype], tuple(stack.shape)) for stack in stacks)
    return replace(weights, gate=gate, up=up, down=down)


def widen_into(source: ExpertWeights, target: ExpertWeights) -> None:
    """Dequantise the experts of `source` into the plain stacks of `target`, which has the same shapes.

    Where the device alone knows which are there, those that are; they fill slots from the first one on.
    """
    offsets = None
    if isinstance(source.slot_of, torch.Tensor):
        n_there = (source.slot_of >= 0).sum(dtype=torch.int32)
        slots = torch.arange(source.gate.shape[0] + 1, dtype=torch.int32, device=n_there.device)
        offsets = torch.minimum(slots, n_there)
    for q, stack in zip(source.parts, target.parts, strict=True):
        plain_into(q, stack, offsets)


def plain_into(source: QTensor, target: QTensor, offsets: torch.Tensor | None = None) -> None:
    """Dequantise a matrix, or a stack of them, into one of bfloat16. offsets: see `dequantize_into`."""
    view = plain_view(target, torch.bfloat16)
    assert view is not None
    dequantize_into(source, view, offsets=offsets)


def gate_up_of(stacks: Stacks) -> torch.Tensor | None:
    """Gate and up as one stack `[n, 2 F, D]` without a copy, None where they do not lie like that."""
    gate, up = stacks.gate, stacks.up
    n, F, D = gate.shape
    is_one = gate.stride(0) == 2 * F * D and up.data_ptr() - gate.data_ptr() == F * D * gate.element_size()
    return gate.as_strided((n, 2 * F, D), (2 * F * D, D, 1)) if is_one else None
