"""Boxes and flags in pinned memory for what passes between devices in a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from overspill.device.base import Buffer, HostDevice
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action
from overspill.pipeline.step_work import MAX_STEP_TOKENS
from overspill.pipeline.wave import Ubatch

_FLAGS_A_LETTER = 4


@dataclass(frozen=True, eq=False)
class Letter:
    """A hand-off: its box in pinned memory, with all parts one behind the other, and a flag for each.

    is_written: whoever computes what is sent writes it into the box itself.
    """

    action: Action
    box: torch.Tensor
    flags: torch.Tensor
    part_words: list[int]
    is_written: bool = False

    @property
    def boxes(self) -> Sequence[torch.Tensor]:
        """The box of each part."""
        boxes: Sequence[torch.Tensor] = self.box.split(self.part_words)
        return boxes


class Letters:
    """The memory of all letters of a step; programs use it one after the other."""

    def __init__(self, host: HostDevice, memory: Memory) -> None:
        self._host = host
        self._memory = memory
        self.boxes = torch.empty(0, dtype=torch.int32)
        self.flags = torch.empty(0, dtype=torch.int64)

    def address(self, hand_offs: Sequence[Action], ubatch: Ubatch) -> dict[int, Letter]:
        """A box and flags for each hand-off, by `id` of its action, in memory reserved for the most tokens."""
        row_words = [[_row_words(b) for b in self._memory.all_of(a.reads)] for a in hand_offs]
        most = min(MAX_STEP_TOKENS, self._memory.sizes.n_slots)
        n_words, n_flags = sum(map(sum, row_words)) * most, len(hand_offs) * _FLAGS_A_LETTER
        if n_words > len(self.boxes) or n_flags > len(self.flags):
            allocate = self._host.allocate_pinned
            self.boxes = allocate(4 * max(1, n_words), name="mail").host_tensor.view(torch.int32).zero_()
            self.flags = allocate(8 * max(1, n_flags), name="flags").host_tensor.view(torch.int64).zero_()
        found, at = {}, 0
        for i, (action, words) in enumerate(zip(hand_offs, row_words, strict=True)):
            flags = self.flags[i * _FLAGS_A_LETTER :][: len(words)]
            n_rows = [min(ubatch.n_tokens, len(b.raw())) for b in self._memory.all_of(action.reads)]
            part_words = [n * rows for n, rows in zip(words, n_rows, strict=True)]
            found[id(action)] = Letter(action, self.boxes[at : at + sum(part_words)], flags, part_words)
            at += sum(words) * most
        return found

    def fill_harmless(self, letters: Iterable[Letter]) -> None:
        """For kernels that run before anything was sent: routing that is none would lead them out of their memory."""
        self.boxes.zero_()
        for letter in letters:
            boxes = iter(letter.boxes)
            for resource in letter.action.reads:
                parts = [next(boxes) for _ in self._memory[resource]]
                if resource[0] == "route":
                    n_used = self._memory.n_expert_used
                    parts[1].view(-1, n_used).copy_(torch.arange(n_used, dtype=torch.int32))
                elif resource[0] == "who":
                    parts[0].fill_(-1)


def _row_words(buffer: Buffer) -> int:
    """32-bit words of one token in a buffer `[T, ...]`."""
    rows = buffer.raw()
    return prod(rows.shape[1:]) * rows.element_size() // 4
