"""Three sequences of a fixture that are decoded together, past where windows and blocks of its models end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.models.fixtures import Case

N_SLOTS, N_CELLS, N_UBATCH = 3, 144, 64
LONG_CELLS, LONG_UBATCH, LONG_PROMPTS = 80, 8, (30, 3, 17)


def ubatch(*pieces: tuple[Sequence[int], Segment]) -> Ubatch:
    ids = tuple(i for tokens, s in pieces for i in tokens[s.first_pos : s.end_pos])
    return Ubatch(ids, tuple(s for _, s in pieces), tuple(range(len(ids))))


def waves_of(case: Case) -> tuple[list[Wave], list[Wave]]:
    """Prompts, and steps after them: of three sequences, in two orders, and of the longest alone, past position 128."""
    a, b, c = (case.expected(f"input_ids_{i}").tolist() for i in (1, 0, 2))
    prompts = [(a, Segment(0, 0, 64)), (a, Segment(0, 64, 61)), (b, Segment(1, 0, 36)), (c, Segment(2, 0, 3))]
    steps = []
    for i in range(4):
        pieces = [(tokens, Segment(slot, n + i, 1)) for slot, (tokens, n) in enumerate(((a, 125), (b, 36), (c, 3)))]
        steps.append(ubatch(*(pieces if i < 2 else pieces[::-1])))
    steps += [ubatch((a, Segment(0, position, 1))) for position in range(129, 133)]
    return [Wave((ubatch(piece),)) for piece in prompts], [Wave((step,)) for step in steps]


def is_step(wave: Wave) -> bool:
    """Whether it has one token of each sequence."""
    return all(segment.n_tokens == 1 for segment in wave.ubatches[0].segments)


def decoded(run: Callable[[Wave], list[torch.Tensor]], case: Case) -> torch.Tensor:
    """Logits of all steps, after the prompts."""
    prompts, steps = waves_of(case)
    for wave in prompts:
        run(wave)
    return torch.cat([rows for wave in steps for rows in run(wave)])


def long_waves(case: Case) -> list[Wave]:
    """Prompts of three lengths in ubatches of eight, then steps of all three up to the end of the longest's cells."""
    texts = [case.expected("input_ids_1").tolist()[i : i + LONG_CELLS] for i in range(3)]
    found = []
    for slot, n in enumerate(LONG_PROMPTS):
        cuts = [(i, min(LONG_UBATCH, n - i)) for i in range(0, n, LONG_UBATCH)]
        found.append(Wave(tuple(ubatch((texts[slot], Segment(slot, *cut))) for cut in cuts)))
    n_steps = LONG_CELLS - max(LONG_PROMPTS)
    return found + [
        Wave((ubatch(*((texts[slot], Segment(slot, n + i, 1)) for slot, n in enumerate(LONG_PROMPTS))),))
        for i in range(n_steps)
    ]
