"""Measures at what rates links and CPU read experts in host RAM while all of them do: as a decoding step has them.

Every device reads over its own link, in the kernel that fetches experts for a step (devices made of threads upload
instead, for their link to count); the CPU computes with the call that a step prepares. Everybody has an equal part of
the experts that some tokens meet, at random, and so many calls come before one comes again that no cache helps.
"""

from __future__ import annotations

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from overspill.device.base import Buffer, Device, Event, HostDevice, MemoryKind, Part
from overspill.device.lane import Lane
from overspill.kernels import Ops
from overspill.models.base import Routing
from overspill.pipeline.host_share import HostShare
from overspill.pipeline.parties import n_experts_met
from overspill.pipeline.upload import HostExperts, upload_parts
from overspill.placement.rates import PartyRates
from overspill.quant.experts import NO_VECTORS, ExpertWeights

N_TOKENS = (1, 4, 16)
_CYCLE_BYTES = 512 << 20
_MAX_CALLS, _MIN_CALLS = 64, 4
_LEAST_OF_A_CALL = 0.1
_LOOK_S = 5e-5


class Experts(Protocol):
    """What computes a layer's experts; a model does."""

    def experts(self, i_layer: int, x: torch.Tensor, routing: Routing, weights: ExpertWeights, ops: Ops) -> None: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What is measured.

    devices: those whose links read. tables: their kernels. rooms: memory of each for the experts that it reads, of at
    least its part. layers: experts in pinned memory, by number of the layer. experts: computes them. n_used: experts of
    a token. seconds: of one measurement.
    """

    host: HostDevice
    devices: Sequence[Device]
    tables: Sequence[Ops]
    rooms: Sequence[Buffer]
    layers: Mapping[int, HostExperts]
    experts: Experts
    host_ops: Ops
    n_used: int
    seconds: float


class Alone(NamedTuple):
    """Rates of one party while the others rest, GB/s."""

    links_gbps: tuple[float, ...]
    cpu_gbps: float


def measure_together(setting: Setting, n_tokens: int) -> PartyRates:
    """All links, without the CPU and beside it."""
    cpu, links = _parties(setting, n_tokens)
    try:
        links_gbps, _ = _run(links, (), setting.seconds)
        beside_gbps, call_s = _run(links, cpu.calls, setting.seconds)
        _, empty_s = _run(links, [cpu.empty], setting.seconds / 4)
    finally:
        for link in links:
            link.close()
    return PartyRates(n_tokens, links_gbps, beside_gbps, _rate(cpu, call_s, empty_s), 1e6 * empty_s)


def measure_alone(setting: Setting, n_tokens: int) -> Alone:
    """Each party by itself, with the same work."""
    cpu, links = _parties(setting, n_tokens)
    try:
        links_gbps = tuple(_run([link], (), setting.seconds)[0][0] for link in links)
    finally:
        for link in links:
            link.close()
    call_s, empty_s = (_median_s(calls, setting.seconds) for calls in (cpu.calls, [cpu.empty]))
    return Alone(links_gbps, _rate(cpu, call_s, empty_s))


class Pick(NamedTuple):
    """Work for everybody: a layer; which experts the tokens chose, int32 `[T, K]`; whose each is, int32 `[E]`."""

    layer: int
    ids: npt.NDArray[np.int32]
    who: npt.NDArray[np.int32]


def picks(
    layers: Sequence[int], n_expert: int, n_used: int, n_tokens: int, n_links: int, part_bytes: int
) -> list[Pick]:
    """Enough for no cache to help. Links are parties 0 and up, the CPU comes after the last; parts are of equal size.

    The CPU's experts are named by the ids; those of links need not be, and are others where there are enough.
    """
    random = np.random.default_rng(n_tokens)
    part = n_experts_in_part(n_expert, n_used, n_tokens, n_links)
    found = []
    for _ in range(min(_MAX_CALLS, max(_MIN_CALLS, -(-_CYCLE_BYTES // part_bytes)))):
        ids = np.array([random.permutation(n_expert)[:n_used] for _ in range(n_tokens)], np.int32)
        own = random.permutation(np.unique(ids))[:part]
        others = random.permutation(np.setdiff1d(np.arange(n_expert), own))
        who = np.full(n_expert, -1, np.int32)
        for link, of_link in zip(
            random.permutation(n_links), np.array_split(others[: part * n_links], n_links), strict=True
        ):
            who[of_link] = link
        who[own] = n_links
        found.append(Pick(layers[int(random.integers(len(layers)))], ids, who))
    return found


def n_experts_in_part(n_expert: int, n_used: int, n_tokens: int, n_links: int) -> int:
    """Experts of each of the links and of the CPU."""
    return math.ceil(n_experts_met(n_expert, n_used, n_tokens) / (n_links + 1) - 1e-9)


# --- parties


class _Cpu:
    """The CPU's calls, and one that finds no expert to compute. call_bytes: what each reads, on average."""

    def __init__(self, setting: Setting, work: Sequence[Pick]) -> None:
        self._setting = setting
        self._party = len(setting.devices)
        self.calls = [self._call(pick) for pick in work]
        self.empty = self._call(work[0]._replace(who=np.full_like(work[0].who, -1)))
        self.call_bytes = _read_bytes(setting, work, self._party) / len(work)
        for first in (self.calls[0], self.empty):
            first()  # compiles

    def _call(self, pick: Pick) -> Callable[[], None]:
        layer = self._setting.layers[pick.layer]
        n_tokens, n_model = len(pick.ids), next(layer.host_parts).shape[2]
        normed = torch.rand(n_tokens, n_model).to(torch.bfloat16)
        mix = torch.full(pick.ids.shape, 1.0 / self._setting.n_used)
        boxes = [normed, torch.from_numpy(pick.ids), mix, torch.from_numpy(pick.who)]
        words = [box.contiguous().view(-1).view(torch.int32) for box in boxes]
        answer = torch.zeros(n_tokens * n_model, dtype=torch.int32)
        share = HostShare(words, answer, n_tokens, self._party)
        # The contract of a model is all that a share asks for.
        model, ops = self._setting.experts, self._setting.host_ops
        if share.prepare(model, pick.layer, layer, ops):  # type: ignore[arg-type]
            return share.run
        routing, out = Routing(normed.float(), boxes[1], mix), answer.view(torch.float32).view(n_tokens, n_model)
        return partial(model.experts, pick.layer, out, routing, layer.of_party(boxes[3], self._party), ops)


class _Link(ABC):
    """A device that reads its experts of each pick, over and over. cycle_bytes: of all of them."""

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        self.device, self._room = setting.devices[i_device], setting.rooms[i_device]
        self.cycle_bytes = _read_bytes(setting, work, i_device)

    @abstractmethod
    def give(self, n_cycles: int) -> Event:
        """Have it read; the event is the end of it."""

    def close(self) -> None:  # noqa: B027
        """Give back what was allocated."""


class _KernelLink(_Link):
    """Reads in a kernel, recorded as steps are."""

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        super().__init__(setting, work, i_device)
        table, stream = setting.tables[i_device], self.device.stream(Lane.COMPUTE)
        who = torch.from_numpy(np.stack([pick.who for pick in work]))
        self._who = self.device.allocate(tuple(who.shape), torch.int32, kind=MemoryKind.COMPUTE, name="rates")
        source = setting.host.allocate_pinned(self._who.n_bytes, name="rates")
        source.host_tensor.view(torch.int32).copy_(who.view(-1))
        stream.copy(self._who, source, n_bytes=self._who.n_bytes, label="measure")

        def fetch(i: int) -> None:
            experts, room = setting.layers[work[i].layer].in_place(), self._room.tensor
            table.fetch(experts, self._who.tensor[i], i_device, room, NO_VECTORS)

        works = [partial(fetch, i) for i in range(len(work))]
        for one in works:
            stream.launch(one, label="measure")
        stream.record().wait_host()
        setting.host.free(source)
        self._recording = self.device.record_host(works)

    def give(self, n_cycles: int) -> Event:
        stream = self.device.stream(Lane.COMPUTE)
        for _ in range(n_cycles):
            stream.replay(self._recording, label="measure")
        return stream.record()

    def close(self) -> None:
        self.device.free(self._who)


class _UploadLink(_Link):
    """Reads by copies, on devices whose kernels would not use their link."""

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        super().__init__(setting, work, i_device)
        self._parts: list[list[Part]] = [
            upload_parts(setting.layers[pick.layer], np.flatnonzero(pick.who == i_device).tolist()) for pick in work
        ]

    def give(self, n_cycles: int) -> Event:
        stream = self.device.stream(Lane.UPLOAD)
        for _ in range(n_cycles):
            for parts in self._parts:
                stream.upload(self._room, parts, label="measure")
        return stream.record()


def _parties(setting: Setting, n_tokens: int) -> tuple[_Cpu, list[_Link]]:
    layer, n_links = next(iter(setting.layers.values())), len(setting.devices)
    part = n_experts_in_part(layer.n_experts, setting.n_used, n_tokens, n_links)
    part_bytes = part * layer.n_bytes // layer.n_experts
    work = picks(list(setting.layers), layer.n_experts, setting.n_used, n_tokens, n_links, part_bytes)
    kinds = [_UploadLink if device.torch_device.type == "cpu" else _KernelLink for device in setting.devices]
    return _Cpu(setting, work), [kind(setting, work, i) for i, kind in enumerate(kinds)]


def _read_bytes(setting: Setting, work: Sequence[Pick], party: int) -> int:
    """What a party reads for all picks together."""
    layers = setting.layers
    return sum(
        int((pick.who == party).sum()) * layers[pick.layer].n_bytes // layers[pick.layer].n_experts for pick in work
    )


# --- time


def _run(
    links: Sequence[_Link], calls: Sequence[Callable[[], None]], seconds: float
) -> tuple[tuple[float, ...], float]:
    """About so long: rates of links, and the median of the calls that began while all of them were busy."""
    started = time.perf_counter()
    for event in [link.give(1) for link in links]:
        event.wait_host()
    n_cycles = max(1, math.ceil(seconds / (time.perf_counter() - started)))
    started = time.perf_counter()
    ends: dict[int, float] = {}
    events = [link.give(n_cycles) for link in links]
    call_s: list[float] = []
    for call in cycle(calls or [partial(time.sleep, _LOOK_S)]):
        are_all_busy, begin = not ends, time.perf_counter()
        call()
        now = time.perf_counter()
        if are_all_busy:
            call_s.append(now - begin)
        ends |= {i: now for i, event in enumerate(events) if i not in ends and event.is_done()}
        if len(ends) == len(links):
            break
    for event in events:
        event.wait_host()  # raises what went wrong there
    gbps = [n_cycles * link.cycle_bytes / (ends[i] - started) / 1e9 for i, link in enumerate(links)]
    return tuple(gbps), statistics.median(call_s)


def _median_s(calls: Sequence[Callable[[], None]], seconds: float) -> float:
    call_s: list[float] = []
    started = time.perf_counter()
    for call in cycle(calls):
        begin = time.perf_counter()
        call()
        call_s.append(time.perf_counter() - begin)
        if time.perf_counter() - started > seconds:
            return statistics.median(call_s)
    raise AssertionError("no calls")


def _rate(cpu: _Cpu, call_s: float, empty_s: float) -> float:
    """What the CPU reads beyond what any call takes; where nearly all is that, at most so much can be said."""
    return cpu.call_bytes / max(call_s - empty_s, _LEAST_OF_A_CALL * call_s) / 1e9
