"""Experts of few tokens that several parties compute: who computes which, and bringing them there. In torch.

The rule is a function of the ids and the weights of the parties alone, so it is the same for whoever applies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.gpu_memory import MAX_SLICES
from overspill.kernels.sharing import Shares
from overspill.quant.experts import ExpertVectors, ExpertWeights
from overspill.quant.qtensor import QTensor

PARTS_OF_ONE = 1024
_ALIGNMENT = 64


def bounds(shares: Shares) -> list[int]:
    """Where each party's part begins, in 1024ths of all, and 1024 at the end."""
    total = sum(weight for _, weight in shares)
    found, done = [0], 0
    for _, weight in shares:
        done += weight
        found.append(done * PARTS_OF_ONE // total)
    return found


def divide(
    ids: torch.Tensor,
    shares: Shares,
    who: torch.Tensor,
    tally: torch.Tensor,
    n_slices: int = 1,
    whole: int | None = None,
) -> None:
    """`kernels.Divide`."""
    named = torch.unique(ids.long())
    slices = (named[:, None] * n_slices + torch.arange(n_slices)).view(-1)
    who.fill_(-1)
    for (party, _), bound in zip(shares, bounds(shares), strict=False):
        first = (bound * len(slices) + PARTS_OF_ONE // 2) // PARTS_OF_ONE
        if party == whole:
            first = (first + n_slices // 2) // n_slices * n_slices
        who[slices[first:]] = party
    for party, _ in shares:
        tally[1 + party] += (who == party).sum() * (MAX_SLICES // n_slices)


def fetch(
    source: ExpertWeights, who: torch.Tensor, party: int, room: torch.Tensor, vectors: ExpertVectors
) -> ExpertWeights:
    """`kernels.Fetch`."""
    n_slices = len(who) // source.gate.shape[0]
    stacks = stacks_in(room, source.parts, n_slices)
    mine = torch.nonzero(who == party)[: stacks[0].shape[0], 0]
    slot_of = torch.full_like(who, -1)
    slot_of[mine] = torch.arange(len(mine), dtype=torch.int32)
    put_slices(source, mine.tolist(), stacks, range(len(mine)), n_slices)
    return ExpertWeights(*stacks, slot_of.numpy(), vectors, n_slices)


def put_slices(
    source: ExpertWeights, wanted: Sequence[int], stacks: Sequence[QTensor], slots: Sequence[int], n_slices: int
) -> None:
    """Copy slices of experts to slots of stacks."""
    for stack, part in zip(stacks, source.parts, strict=True):
        is_down = part is source.down
        for slot, i in zip(slots, wanted, strict=True):
            rows = part.data[i // n_slices].unflatten(1 if is_down else 0, (n_slices, -1))
            stack.data[slot] = rows[:, i % n_slices] if is_down else rows[i % n_slices]


def stacks_in(room: torch.Tensor, parts: Sequence[QTensor], n_slices: int = 1) -> tuple[QTensor, QTensor, QTensor]:
    """Gate, up and down stacks of as many (slices of) experts as have room in uint8 memory, from aligned offsets."""
    sizes = [part.data[0].numel() // n_slices for part in parts]
    n = min(parts[0].shape[0] * n_slices, (len(room) - len(sizes) * (_ALIGNMENT - 1)) // sum(sizes))
    stacks, first = [], 0
    n_model, n_hidden = parts[0].shape[2], parts[0].shape[1] // n_slices
    shapes = (n, n_hidden, n_model), (n, n_hidden, n_model), (n, n_model, n_hidden)
    for part, size, shape in zip(parts, sizes, shapes, strict=True):
        stacks.append(QTensor.from_bytes(room[first : first + n * size], part.type, shape))
        first = -(-(first + n * size) // _ALIGNMENT) * _ALIGNMENT
    return stacks[0], stacks[1], stacks[2]
