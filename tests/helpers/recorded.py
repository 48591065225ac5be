"""Recordings that are lists of work, done again each time: on virtual devices, with what that needs of ops; and on
GPUs, where they tell what a graph has kept from what each step computes.

Recorded work names no buffers, so what it touches is not checked: that the letters between devices are order enough
shows in the results, under chaos.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch

from overspill.device.backend import WorkRecording
from overspill.device.base import Buffer, Device, Recording, Stream, running_on
from overspill.device.virtual import VirtualDevice, VirtualStream
from overspill.kernels import Ops, Steps
from overspill.kernels.numba.mail import look_for_flags, raise_flags
from overspill.kernels.ref import OPS
from overspill.kernels.sharing import Mail, Term
from overspill.letter_room import FLAG_STRIDE, room
from overspill.models.base import UbatchView
from overspill.models.rope import Rope
from overspill.pipeline.schedule import Action
from overspill.pipeline.step_work import StepWork
from overspill.pipeline.wave import Ubatch
from overspill.pipeline.work import Work
from overspill.quant.q8_rows import decode

_PATIENCE_S = 30.0


@contextmanager
def issuing(device_class: type[Device], stream_class: type[Stream]) -> Iterator[None]:
    """While it lasts, such devices issue what they would have recorded, every time it is asked for; what they have
    recorded before is replayed."""
    real = stream_class.replay

    def record(self: Device, works: Iterable[Callable[[], None]], *, kept: Sequence[object] = ()) -> WorkRecording:
        return WorkRecording(works, kept)

    def replay(
        self: Stream,
        recorded: Recording,
        *,
        label: str,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> None:
        if isinstance(recorded, WorkRecording):
            self.launch(recorded.run, label=label, reads=reads, writes=writes)
        else:
            real(self, recorded, label=label, reads=reads, writes=writes)

    def angles(self: UbatchView, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Layers share them within a step; a list of work has no other way to begin the next one without them."""
        return rope.angles(self.positions)

    def views_of(self: StepWork, action: Action, ubatch: Ubatch) -> list[UbatchView]:
        """And layers share a view, which the next step, of other rows, must not find."""
        return []

    def embed(self: StepWork, action: Action, ubatch: Ubatch) -> Callable[[], None]:
        """Nor what the step before left where hidden states begin."""
        self._latest.pop(action.writes[0], None)
        return Work._embed(self, action, ubatch)

    with (
        patch.object(UbatchView, "angles", angles),
        patch.object(StepWork, "_views_of", views_of),
        patch.object(StepWork, "_embed", embed),
        patch.object(device_class, "record", record),
        patch.object(stream_class, "replay", replay),
    ):
        yield


@contextmanager
def recording() -> Iterator[None]:
    """While it lasts, virtual devices can record steps."""

    def run(self: VirtualStream, work: Callable[[], None], reads: object, writes: object) -> None:
        with running_on(self.device):
            work()

    with (
        issuing(VirtualDevice, VirtualStream),
        patch.object(VirtualStream, "_run_work", run),
    ):
        yield


def _prepare(q, k, v, caches, steps, angles, gains, *, eps, is_interleaved) -> torch.Tensor:  # type: ignore[no-untyped-def]
    assert OPS.prepare_heads is not None
    rows = []
    for t, (slot, position) in enumerate(zip(*(x.tolist() for x in steps), strict=True)):
        cell = position % caches[0].shape[2]
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
    value_dim: int,
    steps: Steps,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if k.dtype == torch.uint8:
        k, v = decode(k, q.shape[2]), decode(v, q.shape[2] if v is k else value_dim)[..., :value_dim]
    rows = []
    for t, (slot, position) in enumerate(zip(*(x.tolist() for x in steps), strict=True)):
        first = 0 if chunk is None else position // chunk * chunk
        first = first if window is None else max(first, position - window + 1)
        cells = torch.arange(first, position + 1) % k.shape[2]
        heads = q[t : t + 1], k[slot, :, cells], v[slot, :, cells]
        rows.append(OPS.attention(*heads, scale=scale, window=window, sinks=sinks))
    return torch.cat(rows)


def _boxes(box: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The boxes of parts, as words."""
    found, at = [], 0
    for n in (part.numel() * part.element_size() // 4 for part in parts):
        found.append(box[at : at + n])
        at += room(n)
    return found


def _wait(step: torch.Tensor, flags: torch.Tensor, late: torch.Tensor) -> None:
    """Between looks others go on, of whom there are more than cores."""
    end_s, wanted = time.monotonic() + _PATIENCE_S, int(step)
    while flags[::FLAG_STRIDE].min() < wanted and time.monotonic() < end_s:
        time.sleep(0.0001)
    if not look_for_flags(flags.data_ptr(), len(flags), wanted):
        late.fill_(wanted)


def _put(step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor) -> None:
    for part, letter in zip(parts, _boxes(box, parts), strict=True):
        letter.copy_(part.view(-1).view(torch.int32))
    raise_flags(flags.data_ptr(), len(flags), int(step))


def _take(
    step: torch.Tensor, parts: Sequence[torch.Tensor], box: torch.Tensor, flags: torch.Tensor, late: torch.Tensor
) -> None:
    _wait(step, flags, late)
    for part, letter in zip(parts, _boxes(box, parts), strict=True):
        part.view(-1).view(torch.int32).copy_(letter)


def _add(step: torch.Tensor, out: torch.Tensor, terms: Sequence[Term], late: torch.Tensor) -> None:
    total = torch.full_like(out, -0.0)
    for term in terms:
        if term.flags is not None:
            _wait(step, term.flags, late)
        total += term.numbers.view(-1)[: out.numel()].view(torch.float32).view(out.shape)
    out.copy_(total)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


STEP_OPS: Ops = replace(OPS, prepare_steps=_prepare, attend_steps=_attend, mail=Mail(_put, _take, _add, _copy))
