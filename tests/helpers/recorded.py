"""Virtual devices that record: a recording is a list of work, run again in stream order, with what it needs of ops.

Recorded work names no buffers, so what it touches is not checked: that the letters between devices are order enough
shows in the results, under chaos.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from overspill.device.base import Device, Recording, running_on
from overspill.device.virtual import VirtualDevice, VirtualStream
from overspill.kernels import Mail, Ops, Steps
from overspill.kernels.numba.mail import look_for_flags, raise_flags
from overspill.kernels.ref import OPS
from overspill.models.base import UbatchView
from overspill.models.rope import Rope

_STEP_LABELS = ("step", "first step")


class _List(Recording):
    def __init__(self, works: Iterable[Callable[[], None]]) -> None:
        super().__init__(())
        self.works = list(works)

    def run(self) -> None:
        for work in self.works:
            work()


@contextmanager
def recording() -> Iterator[None]:
    """While it lasts, virtual devices can record."""

    def record(self: Device, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> _List:
        return _List(works)

    def replay(self: VirtualStream, recorded: _List, *, label: str) -> None:
        self.launch(recorded.run, label=label)

    def run(self: VirtualStream, work: Callable[[], None], reads: object, writes: object) -> None:
        with running_on(self.device):
            work()

    def angles(self: UbatchView, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers share them within a step; a list of work has no other way to begin the next one without them."""
        return rope.angles(self.positions)

    with (
        patch.object(UbatchView, "angles", angles),
        patch.object(VirtualDevice, "can_record", True),
        patch.object(VirtualDevice, "record_host", record),
        patch.object(VirtualStream, "replay", replay),
        patch.object(VirtualStream, "_run_work", run),
    ):
        yield


def _prepare(q, k, v, caches, steps, angles, gains, *, eps, is_interleaved) -> torch.Tensor:  # type: ignore[no-untyped-def]
    assert OPS.prepare_heads is not None
    rows = []
    for t, (slot, cell) in enumerate(zip(*(x.tolist() for x in steps), strict=True)):
        row, cells = slice(t, t + 1), tuple(cache[slot, :, cell : cell + 1] for cache in caches)
        turned = tuple(angle[row] for angle in angles)
        rows.append(
            OPS.prepare_heads(q[row], k[row], v[row], cells, turned, gains, eps=eps, is_interleaved=is_interleaved)
        )
    return torch.cat(rows)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    steps: Steps,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    assert window is None
    assert chunk is None
    rows = []
    for t, (slot, position) in enumerate(zip(*(x.tolist() for x in steps), strict=True)):
        cells = slice(0, position + 1)
        rows.append(OPS.attention(q[t : t + 1], k[slot, :, cells], v[slot, :, cells], scale=scale, sinks=sinks))
    return torch.cat(rows)


def _put(step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor) -> None:
    words = [part.view(-1).view(torch.int32) for part in parts]
    box[: sum(map(len, words))].copy_(torch.cat(words))
    raise_flags(flags.data_ptr(), len(flags), int(step))


def _take(
    step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor, late: torch.Tensor
) -> None:
    if not any(look_for_flags(flags.data_ptr(), len(flags), int(step)) for _ in range(1000)):
        late.fill_(int(step))
    words = [part.view(-1).view(torch.int32) for part in parts]
    for word, letter in zip(words, box.split([len(word) for word in words]), strict=True):
        word.copy_(letter)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


STEP_OPS: Ops = replace(OPS, prepare_steps=_prepare, attend_steps=_attend, mail=Mail(_put, _take, _copy))
