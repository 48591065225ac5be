"""Boxes and flags in pinned memory for what passes between devices in a recorded step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from overspill.device.base import Buffer, HostDevice
from overspill.letter_room import MAX_PARTS, room
from overspill.pipeline.ledger import Resource
from overspill.pipeline.letter_sizes import LetterSizes, letter_size
from overspill.pipeline.memory import Memory
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.wave import Ubatch


@dataclass(frozen=True, eq=False)
class Letter:
    """A hand-off: its box in pinned memory, and a flag for each piece of each part, see `letter_room`.

    is_copy: one of the same content has been sent before, in the same box: nobody needs to send this one.
    """

    action: Action
    box: torch.Tensor
    flags: torch.Tensor
    part_words: list[int]
    is_copy: bool = False

    @property
    def boxes(self) -> list[torch.Tensor]:
        """The box of each part."""
        split = self.box.split([room(n) for n in self.part_words])
        return [part[:n] for part, n in zip(split, self.part_words, strict=True)]


class Letters:
    """The memory of all letters of any step, reserved at once; programs use it one after the other."""

    def __init__(self, host: HostDevice, memory: Memory, sizes: LetterSizes) -> None:
        self._memory = memory
        allocate = host.allocate_pinned
        self.boxes = allocate(4 * sizes.n_words, name="mail").host_tensor.view(torch.int32).zero_()
        self.flags = allocate(8 * sizes.n_flags, name="flags").host_tensor.view(torch.int64).zero_()

    def address(self, listed: Sequence[Action], ubatch: Ubatch) -> dict[int, Letter]:
        """A box and flags for each hand-off, by `id` of its action."""
        latest: dict[tuple[int, tuple[Resource, ...]], Letter] = {}
        found, at, i_flag = {}, 0, 0
        for action in listed:
            if action.verb is Verb.HAND_OFF:
                key = (action.source, action.reads)
                letter = latest.get(key)
                if letter is None:
                    part_words = self._part_words(action, ubatch.n_tokens)
                    n_words, n_flags = letter_size(part_words)
                    box, flags = self.boxes[at : at + n_words], self.flags[i_flag : i_flag + n_flags]
                    found[id(action)] = latest[key] = Letter(action, box, flags, part_words)
                    at, i_flag = at + n_words, i_flag + n_flags
                else:
                    found[id(action)] = replace(letter, action=action, is_copy=True)
            for key in [key for key in latest if set(latest[key].action.reads) & set(action.writes)]:
                del latest[key]
        return found

    def _part_words(self, action: Action, n_tokens: int) -> list[int]:
        buffers = self._memory.all_of(action.reads)
        assert len(buffers) <= MAX_PARTS
        return [_row_words(buffer) * min(n_tokens, len(buffer.raw())) for buffer in buffers]

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
