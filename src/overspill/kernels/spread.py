"""Experts of few tokens that several parties compute: who computes which, and bringing them there. In torch.

The rule is a function of the ids and the weights of the parties alone, so it is the same for whoever applies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overspill.kernels import Shares
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


def divide(ids: torch.Tensor, shares: Shares, who: torch.Tensor, tally: torch.Tensor) -> None:
    """`kernels.Divide`."""
    named = torch.unique(ids.long())
    who.fill_(-1)
    cuts = [(b * len(named) + PARTS_OF_ONE // 2) // PARTS_OF_ONE for b in bounds(shares)]
    for (party, _), first, last in zip(shares, cuts, cuts[1:], strict=False):
        who[named[first:last]] = party
        tally[1 + party] += last - first


def fetch(
    source: ExpertWeights, who: torch.Tensor, party: int, room: torch.Tensor, vectors: ExpertVectors
) -> ExpertWeights:
    """`kernels.Fetch`."""
    stacks = stacks_in(room, source.parts)
    mine = torch.nonzero(who == party)[: stacks[0].shape[0], 0]
    slot_of = torch.full_like(who, -1)
    slot_of[mine] = torch.arange(len(mine), dtype=torch.int32)
    for stack, part in zip(stacks, source.parts, strict=True):
        stack.data[: len(mine)] = part.data[mine]
    return ExpertWeights(*stacks, slot_of.numpy(), vectors)


def stacks_in(room: torch.Tensor, parts: Sequence[QTensor]) -> tuple[QTensor, QTensor, QTensor]:
    """Gate, up and down stacks of as many experts as have room in uint8 memory, each from an aligned offset."""
    sizes = [part.data[0].numel() for part in parts]
    n = min(parts[0].shape[0], (len(room) - len(sizes) * (_ALIGNMENT - 1)) // sum(sizes))
    stacks, first = [], 0
    for part, size in zip(parts, sizes, strict=True):
        stacks.append(QTensor.from_bytes(room[first : first + n * size], part.type, (n, *part.shape[1:])))
        first = -(-(first + n * size) // _ALIGNMENT) * _ALIGNMENT
    return stacks[0], stacks[1], stacks[2]
