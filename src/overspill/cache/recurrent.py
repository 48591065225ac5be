"""States of sequences: reading those before segments, writing those after them.

A layer's state tensors are `[R, ...]`, one row for each state that is kept. Several segments are taken together, in a
leading dimension B; they must be of different sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from overspill.cache.cells import Segment


def runs(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    """Segments in order, those together that can be computed side by side: neighbours of equal length, none of which
    goes on where another ends."""
    run: list[Segment] = []
    for segment in segments:
        if run and (segment.n_tokens != run[0].n_tokens or any(s.slot == segment.slot for s in run)):
            yield run
            run = []
        run.append(segment)
    yield run


def states_before(tensor: torch.Tensor, run: Sequence[Segment]) -> torch.Tensor:
    """State `[B, ...]` before each segment: zeros where a sequence begins. May be a view; not to be changed."""
    rows = [tensor[s.states.before] if s.first_pos else torch.zeros_like(tensor[0]) for s in run]
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def put_states(tensor: torch.Tensor, run: Sequence[Segment], states: torch.Tensor) -> None:
    """Write the state `[B, ...]` after each segment."""
    for segment, state in zip(run, states, strict=True):
        tensor[segment.states.after].copy_(state)
