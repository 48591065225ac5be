"""A schedule without devices: how long would it take, and what would it look like?

Streams run their actions in order; an action starts when its stream is free and the actions that the ledger names
have finished: the rules of the runner, with durations in place of work. `costs` estimates durations from a machine's
measured rates; `grid` prints a schedule with every action one unit long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from overspill.device.lane import Lane
from overspill.gpu_memory import FEW_TOKENS
from overspill.pipeline.ledger import Ledger, StreamId
from overspill.pipeline.parties import (
    HAND_OFF_US,
    LETTER_US,
    ExpertLoad,
    n_experts_met,
    parties_of,
    text_of_uniform,
)
from overspill.pipeline.schedule import Action, Order, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Layout
from overspill.pipeline.spread import missed
from overspill.placement.machine import Machine
from overspill.placement.shape import ModelShape

_LAUNCH_US = 20.0
_CPU_EMBED_US = 0.1

_STEP_LAYER_US = 34.0
"""Of a layer in a step that is replayed, beyond what its weights take: kernels that are too small for the device. Its
launches cost nothing more, and what passes between devices goes by letter."""

_STEP_US = 600.0
"""Of such a step: starting it, and logits on their way. Both as measured on an H200 (docs/performance.md, Decoding)."""

_REPLAY_US = 60.0
"""Host time of a split that is replayed (docs/performance.md: two take 121 to 128 us)."""

_LAUNCHED = frozenset({Verb.LAYERS, Verb.ATTEND, Verb.EXPERTS, Verb.WIDEN, Verb.SHARE})


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its simulated start and end, microseconds."""

    action: Action
    start_us: float
    end_us: float


def simulate(
    issued: Iterable[Action], cost_us: Callable[[Action], float], *, is_serial: bool = False, issue_us: float = 0.0
) -> list[Timed]:
    """Start and end of each action, in issue order. issue_us: what the host needs to launch one of `_LAUNCHED`."""
    ledger = Ledger()
    host_us = 0.0
    free: dict[StreamId, float] = {}
    timed: list[Timed] = []
    for number, action in enumerate(issued):
        waits = ledger.add(number, action.stream, action.reads, action.writes)
        start = max([free.get(action.stream, 0.0), *(timed[n].end_us for n in waits.values())])
        if is_serial and timed:
            start = max(start, timed[-1].end_us)
        start = max(start, host_us)
        if any(resource[0] == "ids" for resource in action.reads):
            host_us = start  # reads them, to say what goes up
        host_us += issue_us if action.verb in _LAUNCHED else 0.0
        end = start + cost_us(action)
        free[action.stream] = end
        timed.append(Timed(action, start, end))
    return timed


@dataclass(frozen=True)
class WaveShape:
    """A wave by its numbers: tokens of each ubatch, and how many positions stand before the first.

    is_step: it may be recorded: one token of each of some sequences, or a short prompt. is_text: tokens follow each
    other, so they name fewer experts than as many of several sequences.
    """

    n_tokens: tuple[int, ...]
    first_pos: int = 0
    is_step: bool = False
    is_text: bool = True

    @classmethod
    def of_step(cls, n_sequences: int, first_pos: int) -> WaveShape:
        """A decoding step."""
        return cls((n_sequences,), first_pos, is_step=True, is_text=False)

    @classmethod
    def of_prompt(cls, n_tokens: int, n_ubatch: int, first_pos: int = 0) -> WaveShape:
        """A prompt cut at multiples of `n_ubatch`."""
        full, rest = divmod(n_tokens, n_ubatch)
        return cls((n_ubatch,) * full + ((rest,) if rest else ()), first_pos)


def is_replayed_step(layout: Layout, wave: WaveShape, schedule: WaveSchedule) -> bool:
    """Whether a step is replayed: nothing of it goes up."""
    uploads = any(layout.slabs) and schedule.policy not in (Policy.CPU, Policy.SPREAD)
    return wave.is_step and not uploads and not layout.mixed


def costs(
    shape: ModelShape, machine: Machine, layout: Layout, wave: WaveShape, schedule: WaveSchedule
) -> Callable[[Action], float]:
    """Duration of each action of a wave in microseconds: FLOPs / rate, bytes / bandwidth, plus a launch."""
    return _Costs(shape, machine, layout, wave, schedule)


class _Costs:
    def __init__(
        self, shape: ModelShape, machine: Machine, layout: Layout, wave: WaveShape, schedule: WaveSchedule
    ) -> None:
        self._shape = shape
        self._machine = machine
        self._layout = layout
        self._wave = wave
        self._schedule = schedule
        is_replayed = is_replayed_step(layout, wave, schedule)
        self._step_layer_us = _STEP_LAYER_US if is_replayed else 0.0
        self._launch_us, self._pass_us = (0.0, LETTER_US) if is_replayed else (_LAUNCH_US, HAND_OFF_US)
        self._past = [wave.first_pos + sum(wave.n_tokens[:m]) for m in range(len(wave.n_tokens))]
        # A call takes the CPU's time wherever it computes; the launches of GPUs are priced by split (`issue_us`).
        self._call_us = 0.0 if machine.issue_us else machine.call_us
        n_uploading = len({d for i, d in enumerate(layout.layer_device) if layout.has_host_experts(i)})
        self._link_gbps = [min(d.h2d_gbps, machine.h2d_total_gbps / max(1, n_uploading)) for d in machine.devices]

    def __call__(self, action: Action) -> float:
        match action.verb:
            case Verb.UPLOAD:
                return self._upload_us(action)
            case Verb.HAND_OFF:
                return self._pass_us + self._hand_off_us(action)
            case Verb.HAND_DOWN | Verb.HAND_UP:
                return HAND_OFF_US + self._tile_us(action)
            case Verb.LAYERS | Verb.ATTEND:
                layers = range(action.layer, max(action.last_layer, action.layer + 1))
                return self._launch_us + sum(self._layer_us(action, i) for i in layers)
            case Verb.EXPERTS:
                return self._launch_us + self._experts_us(action)
            case Verb.SHARE:
                return self._launch_us + self._share_us(action)
            case Verb.DIVIDE | Verb.ADD:
                return 0.0
            case Verb.PLACE:
                return self._launch_us + self._place_us(action)
            case Verb.WIDEN:
                return self._launch_us + self._slab_bytes(action) * 3 / self._rate_gbps(action.device) / 1e3
            case Verb.OUTPUT:
                n_rows = self._wave.n_tokens[action.ubatch] if action.chunk > 0 else 1
                n_bytes = self._shape.output_bytes
                return self._launch_us + self._compute_us(action.device, n_rows * self._shape.output_flops, n_bytes)
            case Verb.EMBED:
                return _CPU_EMBED_US * self._wave.n_tokens[action.ubatch]
            case _:
                return HAND_OFF_US

    def _share_of_slab(self, action: Action) -> float:
        slab = self._layout.slabs[action.layer][action.slab]
        return slab.n_experts / self._shape.n_expert

    def _n_experts_in(self, action: Action) -> float:
        share = self._share_of_slab(action)
        if self._schedule.policy is not Policy.SELECTED:
            return share
        return share * self._share_met(sum(self._wave.n_tokens))

    def _slab_bytes(self, action: Action) -> float:
        return self._shape.expert_bytes(action.layer) * self._n_experts_in(action)

    def _upload_us(self, action: Action) -> float:
        n_bytes = self._slab_bytes(action) * missed(self._schedule, self._shape, action.device)
        return n_bytes / self._link_gbps[action.device] / 1e3

    def _place_us(self, action: Action) -> float:
        """Read and written."""
        n_bytes = self._slab_bytes(action) * (1.0 - missed(self._schedule, self._shape, action.device))
        return 2 * n_bytes / self._rate_gbps(action.device) / 1e3

    def _hand_off_us(self, action: Action) -> float:
        n_bytes = 4 * self._shape.x_dim * self._wave.n_tokens[action.ubatch] * len(action.reads)
        is_peer = action.source != self._layout.host and action.writes[0][1] != self._layout.host
        gbps = self._machine.peer_gbps if is_peer else self._link_gbps[action.device]
        return n_bytes / gbps / 1e3

    def _tile_us(self, action: Action) -> float:
        detour, n_bytes = self._layout.detour, 4 * self._shape.x_dim * self._wave.n_tokens[action.ubatch]
        n_left = n_bytes - action.chunk * detour.tile_bytes
        return min(detour.tile_bytes, n_left) / self._link_gbps[action.device] / 1e3

    def _layer_us(self, action: Action, i_layer: int) -> float:
        n = self._wave.n_tokens[action.ubatch]
        n_keys = self._past[action.ubatch] + (n + 1) / 2
        weights = self._shape.flops_per_token[i_layer]
        if action.verb is Verb.ATTEND:
            weights -= self._shape.expert_flops(i_layer)
        flops = n * (weights + self._shape.attention_flops[i_layer] * n_keys)
        n_bytes = self._weight_bytes(i_layer, action.verb, n)
        fixed_us = self._call_us * self._shape.n_tensors[i_layer] + self._step_layer_us
        return fixed_us + self._compute_us(action.device, flops, n_bytes)

    def _weight_bytes(self, i_layer: int, verb: Verb, n_tokens: int) -> float:
        dense = self._shape.layer_bytes(i_layer)
        if verb is Verb.ATTEND:
            return dense
        return dense + self._shape.expert_bytes(i_layer) * self._share_met(n_tokens)

    def _experts_us(self, action: Action) -> float:
        n = self._wave.n_tokens[action.ubatch]
        met = self._share_met(n)
        share = 1.0 if action.slab < 0 else self._share_of_slab(action)
        flops = n * self._shape.expert_flops(action.layer) * share
        return self._compute_us(action.device, flops, self._shape.expert_bytes(action.layer) * met * share)

    def _share_us(self, action: Action) -> float:
        """A party's part of the experts met, read from host memory; its letters are hand-offs of their own."""
        owner, party = self._layout.layer_device[action.layer], action.device
        shares = dict(self._schedule.shares[owner])
        n_tokens, n_expert = self._wave.n_tokens[action.ubatch], self._shape.n_expert
        n_met = self._share_met(n_tokens) * n_expert
        flops = n_tokens * self._shape.expert_flops(action.layer) / n_met
        expert = ExpertLoad(self._shape.expert_bytes(action.layer) / n_expert, flops)
        helpers = [p for p in shares if p != owner]
        readers = {*shares} - {self._layout.host}
        parties = parties_of(self._machine, owner, helpers, readers, n_tokens, expert)
        n_met *= missed(self._schedule, self._shape, owner)
        (mine,) = (p for p in parties if p.number == party)
        return mine.work_us(n_met * shares[party] / sum(shares.values()))

    def _share_met(self, n_tokens: int) -> float:
        """Share of a layer's experts that at least one of so many tokens picks."""
        n_met = n_experts_met(self._shape.n_expert, self._shape.n_expert_used, n_tokens)
        is_text = n_tokens > FEW_TOKENS and self._wave.is_text
        return (text_of_uniform(n_tokens) if is_text else 1.0) * n_met / max(1, self._shape.n_expert)

    def _rate_gbps(self, device: int) -> float:
        """Bandwidth at which a device reads its own weights."""
        return self._machine.cpu_gbps if device == self._layout.host else self._machine.devices[device].weights_gbps

    def _compute_us(self, device: int, flops: float, weight_bytes: float) -> float:
        if device == self._layout.host:
            gflops = self._machine.cpu_gflops
        else:
            gflops = self._machine.devices[device].tflops * 1e3
        return max(flops / gflops / 1e3, weight_bytes / self._rate_gbps(device) / 1e3)


@dataclass(frozen=True)
class Prediction:
    """What a simulated wave takes. busy: share of the time each accelerator (or the host alone) computes."""

    wave_us: float
    uploaded_bytes: float
    busy: dict[int, float]


def predict(shape: ModelShape, machine: Machine, layout: Layout, wave: WaveShape, schedule: WaveSchedule) -> Prediction:
    """Simulate one wave; the last ubatch wants one row of logits."""
    n_chunks = [0] * (len(wave.n_tokens) - 1) + [1]
    n_tiles = [layout.detour.n_tiles(4 * shape.x_dim * n) for n in wave.n_tokens]
    cost_us = costs(shape, machine, layout, wave, schedule)
    issued = actions(layout, schedule, n_chunks, n_tiles)
    is_replayed = is_replayed_step(layout, wave, schedule)
    issue_us = 0.0 if is_replayed else _issue_us(machine, schedule)
    timed = simulate(issued, cost_us, is_serial=schedule.order is Order.SERIAL, issue_us=issue_us)
    total = max(t.end_us for t in timed) + (_STEP_US if is_replayed else 0.0)
    busy: dict[int, float] = {}
    for t in timed:
        if t.action.stream.lane is Lane.COMPUTE:
            busy[t.action.device] = busy.get(t.action.device, 0.0) + (t.end_us - t.start_us) / total
    uploads = [t.action for t in timed if t.action.verb is Verb.UPLOAD]
    uploaded = sum(
        shape.expert_bytes(a.layer)
        * (layout.slabs[a.layer][a.slab].n_experts / shape.n_expert)
        * missed(schedule, shape, a.device)
        for a in uploads
    )
    return Prediction(total, uploaded, busy)


def _issue_us(machine: Machine, schedule: WaveSchedule) -> float:
    """Of a split. Work of experts that ids select is never the same, so it is not replayed."""
    is_replayed = schedule.is_recorded and schedule.policy is Policy.ALL
    return min(machine.issue_us, _REPLAY_US) if is_replayed else machine.issue_us


def grid(layout: Layout, schedule: WaveSchedule, n_ubatches: int) -> str:
    """The schedule as text, one row per stream, one column per unit of time, every action one unit long."""
    issued = actions(layout, schedule, [0] * (n_ubatches - 1) + [1])
    timed = simulate(issued, lambda action: 1.0, is_serial=schedule.order is Order.SERIAL)
    rows: dict[StreamId, dict[int, str]] = {}
    for t in timed:
        rows.setdefault(t.action.stream, {})[int(t.start_us)] = _cell(t.action)
    n_columns = int(max(t.end_us for t in timed))
    width = max(len(cell) for row in rows.values() for cell in row.values())
    return "\n".join(
        f"{_stream_name(layout, stream):<20} "
        + " ".join(rows[stream].get(i, ".").ljust(width) for i in range(n_columns))
        for stream in sorted(rows)
    )


def _stream_name(layout: Layout, stream: StreamId) -> str:
    device = "host" if stream.device == layout.host else f"device {stream.device}"
    return f"{device} {stream.lane}"


_LETTERS = {
    Verb.INPUTS: "in",
    Verb.EMBED: "E",
    Verb.LAYERS: "L",
    Verb.ATTEND: "A",
    Verb.READ_IDS: "i",
    Verb.UPLOAD: "U",
    Verb.PLACE: "P",
    Verb.WIDEN: "W",
    Verb.EXPERTS: "X",
    Verb.DIVIDE: "d",
    Verb.SHARE: "S",
    Verb.ADD: "+",
    Verb.HAND_OFF: "h",
    Verb.HAND_DOWN: "hd",
    Verb.HAND_UP: "hu",
    Verb.OUTPUT: "O",
    Verb.DOWNLOAD: "D",
}


def _cell(action: Action) -> str:
    """Letter of the verb, layer, slab after a slash, ubatch after a dot: `X3/0.1`."""
    text = _LETTERS[action.verb]
    if action.layer >= 0:
        text += str(action.layer)
    if action.slab >= 0:
        text += f"/{action.slab}"
    return text + (f".{action.ubatch}" if action.ubatch >= 0 else "")
