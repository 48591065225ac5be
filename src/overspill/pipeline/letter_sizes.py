"""Pinned memory that the letters of any decoding step take, from a layout alone.

Who sends letters depends on rates that are known late, so the most is taken: experts of every layer that are spread
over all parties, or computed by the CPU alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from overspill.gpu_memory import MAX_SLICES
from overspill.letter_room import FLAG_STRIDE, n_pieces, room
from overspill.pipeline.schedule import Action, Order, Policy, Shares, Verb, WaveSchedule, actions
from overspill.pipeline.split import Detour, Layout


class LetterSizes(NamedTuple):
    """32-bit words of all boxes, and int64 numbers of their flags."""

    n_words: int
    n_flags: int

    @property
    def n_bytes(self) -> int:
        return 4 * self.n_words + 8 * self.n_flags


def letter_size(part_words: list[int]) -> LetterSizes:
    """Of a letter with parts of so many words."""
    return LetterSizes(sum(map(room, part_words)), len(part_words) * n_pieces(part_words) * FLAG_STRIDE)


class Widths(Protocol):
    """Of what a token takes along: a model's hyper-parameters have them, and so has its widths."""

    @property
    def x_dim(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_expert(self) -> int: ...
    @property
    def n_expert_used(self) -> int: ...


def step_letters(
    widths: Widths, layout: Layout, n_ubatch: int, n_tokens: int, *, normed_value_bytes: int, n_spread: int
) -> LetterSizes:
    """Of all letters of a step of so many tokens, whatever its schedule. n_spread: most tokens whose experts are
    spread."""
    parts = {
        "x": [(n_ubatch, widths.x_dim)],
        "route": [
            (n_ubatch, widths.n_embd * normed_value_bytes // 4),
            (n_ubatch, widths.n_expert_used),
            (n_ubatch, widths.n_expert_used),
        ],
        "who": [(1, widths.n_expert * MAX_SLICES)],
        "y": [(n_spread, widths.n_embd)],
    }

    def words(action: Action) -> list[int]:
        names = [str(resource[0]) for resource in action.reads]
        return [n * min(n_tokens, n_rows) for name in names for n_rows, n in parts[name]]

    sizes = []
    for schedule in _schedules(layout, n_spread):
        listed = actions(replace(layout, detour=Detour()), schedule, [1], [1])
        letters = [letter_size(words(action)) for action in listed if action.verb is Verb.HAND_OFF]
        sizes.append(LetterSizes(*(max(1, sum(n)) for n in zip((0, 0), *letters, strict=True))))
    return LetterSizes(*(max(n) for n in zip(*sizes, strict=True)))


_PLAIN: Final = WaveSchedule(Order.DEPTH_FIRST, Policy.CPU)


def _schedules(layout: Layout, n_spread: int) -> list[WaveSchedule]:
    if not n_spread:
        return [_PLAIN]
    used = sorted({layout.output_device, *layout.input_devices} - {layout.host})
    everybody: list[Shares] = [
        ((i, 1), *((p, 1) for p in (*used, layout.host) if p != i)) for i in range(layout.n_accelerators)
    ]
    return [_PLAIN, replace(_PLAIN, policy=Policy.SPREAD, shares=tuple(everybody))]
