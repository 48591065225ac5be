"""Decoding by replay on devices made of threads: kernels in Triton's interpreter, logits those of the plain model.

A recording is a list of the work that was recorded; everything else is as on a GPU. On one device only: the interpreter
runs one kernel at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.helpers.triton_device import DEVICE, HAS_CUDA  # isort: skip (before Triton)

from overspill.cache.cells import StateRows
from overspill.device.base import running_on
from overspill.device.virtual import VirtualStream
from overspill.kernels.triton import make_ops
from overspill.models.base import UbatchView
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.helpers.pipe import Shape, pipe
from tests.helpers.reference import Reference
from tests.models.fixtures import Case


def _run_unnamed(stream: VirtualStream, work: Callable[[], None], *_: object) -> None:
    """Recorded work names no buffers."""
    with running_on(stream.device):
        work()


@pytest.fixture(autouse=True)
def _recording_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VirtualStream, "_run_work", _run_unnamed)
    # What layers share within a wave is not to be found again by those of the next.
    monkeypatch.setattr(UbatchView, "angles", lambda view, rope: rope.angles(view.positions))


def ubatch(*tokens: tuple[Sequence[int], Segment]) -> Ubatch:
    ids = tuple(i for known, s in tokens for i in known[s.first_pos : s.end_pos])
    return Ubatch(ids, tuple(s for _, s in tokens), tuple(range(len(ids))))


@pytest.mark.slow
@pytest.mark.skipif(HAS_CUDA, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["qwen35", "kimi_linear"])
def test_states_go_on_once_a_step(name: str) -> None:
    """Two sequences, together and alone, in place and from row to row."""
    case = Case(name)
    a, b = ([int(i) for i in case.expected("input_ids_2")[first : first + 12]] for first in (0, 12))
    keep, moved = StateRows(1, 1), StateRows(1, 3)
    waves = [
        Wave((ubatch((a, Segment(0, 0, 4))), ubatch((b, Segment(1, 0, 5))))),
        Wave((ubatch((a, Segment(0, 4, 1)), (b, Segment(1, 5, 1, keep))),)),
        Wave((ubatch((b, Segment(1, 6, 1, keep)), (a, Segment(0, 5, 1))),)),
        Wave((ubatch((b, Segment(1, 7, 1, moved))),)),
        Wave((ubatch((b, Segment(1, 8, 1, StateRows(3, 3)))),)),
        Wave((ubatch((a, Segment(0, 6, 1)), (b, Segment(1, 9, 1, StateRows(3, 3)))),)),
    ]
    reference = Reference(case.model, n_slots=4, n_cells=12)
    expected = [reference.run(wave) for wave in waves]
    shape, ops = Shape(1, host_layers="none"), make_ops(DEVICE, dtype=torch.float32)
    sizes = {"n_ubatch": 8, "n_ubatches": 2, "n_cells": 12, "n_slots": 2, "n_states": 2}
    with pipe(case.source, shape, **sizes, ops=ops, n_trials=1) as p:
        p.poison()
        schedule = p.schedule(Order.BREADTH_FIRST, Policy.ALL)
        for wave, logits in zip(waves, expected, strict=True):
            for got, wanted in zip(p.runner.run(wave, schedule), logits, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-3)
        assert p.runner._steps is not None
        assert len(p.runner._steps._programs) == 2
