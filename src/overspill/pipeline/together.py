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
from overspill.kernels import Ops, cpu
from overspill.letter_room import room
from overspill.models.base import Routing
from overspill.pipeline.host_share import HostShare, HostShares
from overspill.pipeline.ledger import StreamId
from overspill.pipeline.letters import Letter
from overspill.pipeline.parties import n_experts_met
from overspill.pipeline.schedule import Action, Verb
from overspill.pipeline.upload import HostExperts, upload_parts
from overspill.placement.rates import PartyRates
from overspill.quant.experts import NO_VECTORS, ExpertWeights

N_TOKENS = (1, 4, 16)
_CYCLE_BYTES = 512 << 20
_CALL_BYTES = 64 << 20
_MAX_PICKS, _MIN_PICKS, _MIN_CALLS = 64, 4, 4
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
    a token. n_threads: of the CPU's part. seconds: of one measurement.
    """

    host: HostDevice
    devices: Sequence[Device]
    tables: Sequence[Ops]
    rooms: Sequence[Buffer]
    layers: Mapping[int, HostExperts]
    experts: Experts
    host_ops: Ops
    n_used: int
    n_threads: int
    seconds: float


class Alone(NamedTuple):
    """Rates of one party while the others rest, GB/s."""

    links_gbps: tuple[float, ...]
    cpu_gbps: float


def measure_together(setting: Setting, n_tokens: int) -> PartyRates:
    """All links, without the CPU and beside it."""
    own, links = _parties(setting, n_tokens)
    try:
        links_gbps, _ = _run(links, (), setting.seconds)
        beside_gbps, call_s = _run(links, own.calls, setting.seconds)
        _, empty_s = _run(links, [own.empty], setting.seconds / 4)
    finally:
        for link in links:
            link.close()
    call_us = 1e6 * min(empty_s) / own.n_picks
    return PartyRates(n_tokens, links_gbps, beside_gbps, _rate(own, call_s, empty_s), call_us)


def measure_alone(setting: Setting, n_tokens: int) -> Alone:
    """Each party by itself, with the same work."""
    own, links = _parties(setting, n_tokens)
    try:
        links_gbps = tuple(_run([link], (), setting.seconds)[0][0] for link in links)
    finally:
        for link in links:
            link.close()
    call_s, empty_s = (_times(calls, setting.seconds) for calls in (own.calls, [own.empty]))
    return Alone(links_gbps, _rate(own, call_s, empty_s))


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
    for _ in range(min(_MAX_PICKS, max(_MIN_PICKS, -(-_CYCLE_BYTES // part_bytes)))):
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
    """The CPU's calls, some picks each, and one whose picks leave it nothing to compute.

    n_picks: of each call. pick_bytes: what it reads for one, on average.
    """

    def __init__(self, setting: Setting, work: Sequence[Pick]) -> None:
        self._setting = setting
        self._party = len(setting.devices)
        self._number, self._late = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self.pick_bytes = _read_bytes(setting, work, self._party) / len(work)
        self.n_picks = max(1, min(len(work) // _MIN_CALLS, int(_CALL_BYTES / self.pick_bytes)))
        groups = [work[i : i + self.n_picks] for i in range(0, len(work) - self.n_picks + 1, self.n_picks)]
        cpu.use_threads(setting.n_threads)
        self.calls = [self._call(group) for group in groups]
        self.empty = self._call([pick._replace(who=np.full_like(pick.who, -1)) for pick in groups[0]])
        for first in (self.calls[0], self.empty):
            first()  # compiles

    def _call(self, group: Sequence[Pick]) -> Callable[[], None]:
        """As the CPU's part of a step, where letters have come; or one after the other, where that has to be."""
        shares = [self._share(pick) for pick in group]
        prepared = [share for share in shares if isinstance(share, HostShare)]
        if len(prepared) == len(shares):
            return HostShares(prepared, self._number, self._late, self._setting.n_threads).run
        return partial(_one_by_one, [share for share in shares if not isinstance(share, HostShare)])

    def _share(self, pick: Pick) -> HostShare | Callable[[], None]:
        layer = self._setting.layers[pick.layer]
        n_tokens, n_model = len(pick.ids), next(layer.host_parts).shape[2]
        normed = torch.rand(n_tokens, n_model)
        ids, mix, who = torch.from_numpy(pick.ids), torch.full(pick.ids.shape, 0.1), torch.from_numpy(pick.who)
        told, answer = _letter(normed, ids, mix, who), _letter(torch.zeros_like(normed))
        share = HostShare(told, answer, n_tokens, self._party, torch.float32)
        # The contract of a model is all that a share asks for.
        model, ops = self._setting.experts, self._setting.host_ops
        action = Action(Verb.SHARE, StreamId(self._party, Lane.COMPUTE), (), (), layer=pick.layer)
        if share.prepare(model, action, layer, ops):  # type: ignore[arg-type]
            return share
        weights = layer.of_party(who, self._party)
        return partial(model.experts, pick.layer, torch.zeros_like(normed), Routing(normed, ids, mix), weights, ops)


def _letter(*parts: torch.Tensor) -> Letter:
    """One that has come."""
    stream, flags = StreamId(0, Lane.HAND_OFF), torch.ones(1, dtype=torch.int64)
    words = [part.reshape(-1).view(torch.int32) for part in parts]
    letter = Letter(
        Action(Verb.HAND_OFF, stream, (), ()),
        torch.zeros(sum(room(len(of_part)) for of_part in words), dtype=torch.int32),
        flags,
        [len(of_part) for of_part in words],
    )
    for box, of_part in zip(letter.boxes, words, strict=True):
        box.copy_(of_part)
    return letter


def _one_by_one(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


class _Link(ABC):
    """A device that reads its experts of each pick, over and over. cycle_bytes: of all of them."""

    lane: Lane

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        self.device, self._room = setting.devices[i_device], setting.rooms[i_device]
        self._stream = self.device.stream(self.lane)
        self.cycle_bytes = _read_bytes(setting, work, i_device)

    @abstractmethod
    def give(self, n_cycles: int) -> Event:
        """Have it read; the event is the end of it."""

    def busy_s(self) -> float:
        """How long it has been at work so far; it must be idle."""
        self.device.settle_host()
        return self.device.counters.busy_us[self.lane] / 1e6

    def close(self) -> None:  # noqa: B027
        """Give back what was allocated."""


class _KernelLink(_Link):
    """Reads in a kernel, recorded as steps are."""

    lane = Lane.COMPUTE

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        super().__init__(setting, work, i_device)
        table, stream = setting.tables[i_device], self._stream
        who = torch.from_numpy(np.stack([pick.who for pick in work]))
        self._who = self.device.allocate(tuple(who.shape), torch.int32, kind=MemoryKind.COMPUTE, name="rates")
        source = setting.host.allocate_pinned(self._who.n_bytes, name="rates")
        source.host_tensor.view(torch.int32).copy_(who.view(-1))
        stream.copy(self._who, source, n_bytes=self._who.n_bytes, label="measure")

        def fetch(i: int) -> None:
            experts, into = setting.layers[work[i].layer].in_place(), self._room.tensor
            table.fetch(experts, self._who.tensor[i], i_device, into, NO_VECTORS)

        works = [partial(fetch, i) for i in range(len(work))]
        for one in works:
            stream.launch(one, label="measure")
        stream.record().wait_host()
        setting.host.free(source)
        self._recording = self.device.record(works)

    def give(self, n_cycles: int) -> Event:
        for _ in range(n_cycles):
            self._stream.replay(self._recording, label="measure")
        return self._stream.record()

    def close(self) -> None:
        self.device.free(self._who)


class _UploadLink(_Link):
    """Reads by copies, on devices whose kernels would not use their link."""

    lane = Lane.UPLOAD

    def __init__(self, setting: Setting, work: Sequence[Pick], i_device: int) -> None:
        super().__init__(setting, work, i_device)
        self._parts: list[list[Part]] = [
            upload_parts(setting.layers[pick.layer], np.flatnonzero(pick.who == i_device).tolist()) for pick in work
        ]

    def give(self, n_cycles: int) -> Event:
        for _ in range(n_cycles):
            for parts in self._parts:
                self._stream.upload(self._room, parts, label="measure")
        return self._stream.record()


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
) -> tuple[tuple[float, ...], list[float]]:
    """About so long: rates of links, and the seconds of calls, which end when a link does."""
    started = time.perf_counter()
    for event in [link.give(1) for link in links]:
        event.wait_host()
    n_cycles = max(1, math.ceil(seconds / (time.perf_counter() - started)))
    before_s = [link.busy_s() for link in links]
    events = [link.give(n_cycles) for link in links]
    call_s: list[float] = []
    for call in cycle(calls or [partial(time.sleep, _LOOK_S)]):
        begin = time.perf_counter()
        call()
        call_s.append(time.perf_counter() - begin)
        if any(event.is_done() for event in events):
            break
    for event in events:
        event.wait_host()
    busy_s = [link.busy_s() - before for link, before in zip(links, before_s, strict=True)]
    gbps = [n_cycles * link.cycle_bytes / seconds / 1e9 for link, seconds in zip(links, busy_s, strict=True)]
    return tuple(gbps), call_s


def _times(calls: Sequence[Callable[[], None]], seconds: float) -> list[float]:
    """Of calls in turn, about so long."""
    call_s: list[float] = []
    started = time.perf_counter()
    for call in cycle(calls):
        begin = time.perf_counter()
        call()
        call_s.append(time.perf_counter() - begin)
        if time.perf_counter() - started > seconds:
            return call_s
    raise AssertionError("no calls")


def _rate(own: _Cpu, call_s: Sequence[float], empty_s: Sequence[float]) -> float:
    """What the CPU reads beyond what any call takes; where nearly all is that, at most so much can be said.

    An empty call cannot be too short, only disturbed: once the median of a few was eighty times the usual.
    """
    usual_s = statistics.median(call_s)
    return own.n_picks * own.pick_bytes / max(usual_s - min(empty_s), _LEAST_OF_A_CALL * usual_s) / 1e9
