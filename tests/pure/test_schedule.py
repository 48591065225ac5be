"""Schedules as values: over random layouts every action is there once, in an order in which it can be computed.

Actions are also run, on symbols: hidden states are the list of what was done to them. Whatever interleaving of the
streams the ledger's waits allow, each ubatch must come out as if one device had computed it alone.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.pipeline.ledger import Ledger, Resource, StreamId
from overspill.pipeline.schedule import Action, Order, Policy, Verb, WaveSchedule, actions
from overspill.pipeline.split import Layout, Slab, Split, SplitKind, cut

N_EXPERT = 6


def slabs_of(n_slabs: int) -> tuple[Slab, ...]:
    return tuple(Slab(N_EXPERT * i // n_slabs, N_EXPERT * (i + 1) // n_slabs) for i in range(n_slabs))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Up to four accelerators and seven layers, anywhere; slabs, mixed layers and the embedding as they come."""
    n = draw(st.integers(1, 4))
    where = draw(st.lists(st.integers(0, n), min_size=1, max_size=7))
    slabs = [() if d == n else slabs_of(k) if (k := draw(st.integers(0, 3))) else () for d in where]
    mixed = frozenset(i for i, s in enumerate(slabs) if s and draw(st.booleans()))
    embed_on = draw(st.none() | st.integers(0, n - 1))
    return Layout(n, tuple(where), draw(st.integers(0, n)), tuple(slabs), mixed, embed_on)


schedules = st.builds(
    WaveSchedule,
    order=st.sampled_from(Order),
    policy=st.sampled_from([policy for policy in Policy if policy is not Policy.SPREAD]),
    n_staging_slots=st.integers(1, 4),
    widen=st.booleans(),
)
chunks = st.lists(st.integers(0, 3), min_size=1, max_size=5)


def policy_of(layout: Layout, schedule: WaveSchedule, i_layer: int) -> Policy:
    return Policy.ALL if i_layer in layout.mixed else schedule.policy


def of(issued: Sequence[Action], *verbs: Verb) -> list[Action]:
    return [a for a in issued if a.verb in verbs]


@given(layouts(), schedules, chunks)
def test_each_piece_of_work_is_there_once(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    issued = list(actions(layout, schedule, n_chunks))
    ubatches = range(len(n_chunks))
    attended = [(i, a.ubatch) for a in of(issued, Verb.ATTEND, Verb.LAYERS) for i in range(a.layer, a.last_layer)]
    assert Counter(attended) == Counter((i, m) for i in range(layout.n_layer) for m in ubatches)
    expected = Counter(
        (i, slab, m)
        for i in filter(layout.has_host_experts, range(layout.n_layer))
        for slab in ([-1] if policy_of(layout, schedule, i) is Policy.CPU else range(len(layout.slabs[i])))
        for m in ubatches
    )
    assert Counter((a.layer, a.slab, a.ubatch) for a in of(issued, Verb.EXPERTS)) == expected
    assert [a.ubatch for a in of(issued, Verb.EMBED)] == list(ubatches)
    outputs = [(m, chunk) for m in ubatches for chunk in range(n_chunks[m])]
    assert [(a.ubatch, a.chunk) for a in of(issued, Verb.OUTPUT)] == outputs
    assert [(a.ubatch, a.chunk) for a in of(issued, Verb.DOWNLOAD)] == outputs


@given(layouts(), schedules, chunks)
def test_work_is_done_where_the_layout_says(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    for a in actions(layout, schedule, n_chunks):
        match a.verb:
            case Verb.ATTEND | Verb.LAYERS:
                assert {layout.layer_device[i] for i in range(a.layer, a.last_layer)} == {a.device}
            case Verb.EXPERTS if a.slab < 0:
                assert a.device == layout.host
            case Verb.EXPERTS | Verb.UPLOAD | Verb.WIDEN | Verb.READ_IDS:
                assert a.device == layout.layer_device[a.layer]
            case Verb.EMBED:
                assert a.device == layout.embed_device
            case Verb.OUTPUT | Verb.DOWNLOAD:
                assert a.device == layout.output_device


@given(layouts(), schedules, chunks)
def test_ubatches_enter_a_layer_in_their_order(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    """What later tokens of a sequence read, its earlier ones have written."""
    seen: dict[Resource, list[int]] = {}
    for a in actions(layout, schedule, n_chunks):
        for resource in a.writes:
            if resource[0] == "kv":
                seen.setdefault(resource, []).append(a.ubatch)
    everything = list(range(len(n_chunks)))
    assert seen == {("kv", i): everything for i in range(layout.n_layer)}


@given(layouts(), schedules, chunks)
def test_inputs_go_once_to_each_device(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    inputs = of(list(actions(layout, schedule, n_chunks)), Verb.INPUTS)
    assert [a.device for a in inputs] == layout.input_devices


@given(layouts(), schedules, chunks)
def test_slots_take_turns_and_hold_the_slab_in_use(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    """A slab is in its slot when it is used, in order of issue; no slab goes up that nobody uses."""
    n_slots = schedule.n_staging_slots
    held: dict[Resource, tuple[int, int]] = {}
    n_uploads: Counter[int] = Counter()
    used: set[tuple[Resource, int]] = set()
    for a in actions(layout, schedule, n_chunks):
        if a.verb is Verb.UPLOAD:
            assert a.slot == n_uploads[a.device] % n_slots
            assert a.writes == (("slot", a.device, a.slot),)
            assert a.writes[0] not in held or (a.writes[0], n_uploads[a.device] - n_slots) in used
            n_uploads[a.device] += 1
            held[a.writes[0]] = (a.layer, a.slab)
        elif a.slab >= 0:
            (weights,) = (r for r in a.reads if r[0] in ("slot", "wide"))
            assert held[weights] == (a.layer, a.slab)
            if a.verb is Verb.WIDEN:
                held["wide", a.device] = (a.layer, a.slab)
            number = max(n for n in range(n_uploads[a.device]) if n % n_slots == a.slot)
            used.add((("slot", a.device, a.slot), number))
    assert len(used) == sum(n_uploads.values())


@given(layouts(), schedules, chunks)
def test_uploads_are_as_many_as_the_order_says(layout: Layout, schedule: WaveSchedule, n_chunks: list[int]) -> None:
    """Breadth-first each slab once a wave, otherwise once a ubatch; none where the CPU computes."""
    n_passes = 1 if schedule.order is Order.BREADTH_FIRST else len(n_chunks)
    issued = list(actions(layout, schedule, n_chunks))
    expected = {
        (i, slab): n_passes
        for i in range(layout.n_layer)
        for slab in range(len(layout.slabs[i]))
        if policy_of(layout, schedule, i) is not Policy.CPU
    }
    assert Counter((a.layer, a.slab) for a in of(issued, Verb.UPLOAD)) == expected
    asked = Counter((a.layer, a.ubatch) for a in of(issued, Verb.READ_IDS))
    assert asked == {
        (i, m): 1
        for i in filter(layout.has_host_experts, range(layout.n_layer))
        for m in range(len(n_chunks))
        if policy_of(layout, schedule, i) is Policy.SELECTED
    }


@given(layouts(), schedules, chunks)
def test_ids_are_read_just_before_what_they_select_goes_up(
    layout: Layout, schedule: WaveSchedule, n_chunks: list[int]
) -> None:
    """The runner takes the ids asked for since the last upload for those of the next upload's layer."""
    n_asked = len(n_chunks) if schedule.order is Order.BREADTH_FIRST else 1
    asked: list[int] = []
    written: tuple[Resource, ...] = ()
    for a in actions(layout, schedule, n_chunks):
        if a.verb is Verb.READ_IDS:
            written = (*written, *a.writes) if asked else a.writes
            asked.append(a.layer)
        if a.verb is Verb.UPLOAD:
            is_selected = policy_of(layout, schedule, a.layer) is Policy.SELECTED
            assert asked == ([a.layer] * n_asked if is_selected and a.slab == 0 else [])
            assert a.reads == (written if is_selected else ())
            asked.clear()


Value = tuple[object, ...]


@dataclass
class Symbols:
    """Memory of symbols. Hidden states are the tuple of what was done to them."""

    layout: Layout
    memory: dict[Resource, Value] = field(default_factory=dict)
    results: dict[tuple[int, int], Value] = field(default_factory=dict)

    def run(self, a: Action, wave: int) -> None:
        """One action. It can only see what it names."""
        seen = {r: self.memory.get(r, ("nothing",)) for r in a.reads}
        match a.verb:
            case Verb.INPUTS:
                done = {a.writes[0]: ("positions", wave)}
            case Verb.EMBED:
                done = {a.writes[0]: ("embed", wave, a.ubatch, *seen.get(("pos", a.device), ()))}
            case Verb.LAYERS | Verb.ATTEND:
                done = self._attend(a, seen)
            case Verb.UPLOAD:
                done = {a.writes[0]: (a.layer, a.slab)}
            case Verb.READ_IDS | Verb.WIDEN | Verb.DOWNLOAD:
                done = {a.writes[0]: seen[a.reads[0]]}
            case Verb.EXPERTS:
                x, route, *weights = (seen[r] for r in a.reads)
                done = {a.writes[0]: (*x, ("experts", *route, *weights))}
            case Verb.HAND_OFF:
                done = dict(zip(a.writes, seen.values(), strict=True))
            case Verb.OUTPUT:
                done = {a.writes[0]: (*seen[a.reads[0]], ("output", a.chunk))}
        assert set(done) == set(a.writes)
        self.memory.update(done)
        if a.verb is Verb.DOWNLOAD:
            self.results[wave, len(self.results)] = self.memory[a.writes[0]]

    def _attend(self, a: Action, seen: dict[Resource, Value]) -> dict[Resource, Value]:
        x = seen["x", a.device, a.ubatch]
        done: dict[Resource, Value] = {}
        for i in range(a.layer, a.last_layer):
            cells = (*seen["kv", i], a.ubatch)
            done["kv", i] = cells
            x = (*x, ("attend", i, seen["pos", a.device], cells))
            if a.verb is Verb.LAYERS:
                x = (*x, ("rest", i))
        done["x", a.device, a.ubatch] = x
        if a.verb is Verb.ATTEND:
            done["route", a.device, a.ubatch] = (a.layer, a.ubatch)
        return done


def plain(layout: Layout, schedule: WaveSchedule, n_chunks: list[int], n_waves: int) -> list[Value]:
    """What one device would compute, ubatch by ubatch."""
    cells: list[list[int]] = [[] for _ in range(layout.n_layer)]
    results = []
    for wave in range(n_waves):
        positions = ("positions", wave)
        for m, n in enumerate(n_chunks):
            x: Value = ("embed", wave, m, *(positions if layout.embed_on is not None else ()))
            for i in range(layout.n_layer):
                cells[i].append(m)
                x = (*x, ("attend", i, positions, ("nothing", *cells[i])))
                if not layout.slabs[i]:
                    x = (*x, ("rest", i))
                elif policy_of(layout, schedule, i) is Policy.CPU:
                    x = (*x, ("experts", i, m))
                else:
                    x = (*x, *(("experts", i, m, (i, slab)) for slab in range(len(layout.slabs[i]))))
            results += [(*x, ("output", chunk)) for chunk in range(n)]
    return results


def interleaved(
    issued: Sequence[tuple[int, Action]], rng: random.Random, *, is_serial: bool
) -> Iterator[tuple[int, Action]]:
    """The actions in a random order that streams and waits allow."""
    ledger = Ledger()
    queues: dict[StreamId, deque[tuple[int, set[int]]]] = {}
    for number, (_, a) in enumerate(issued):
        waits = set(ledger.add(number, a.stream, a.reads, a.writes).values())
        waits |= {number - 1} if is_serial and number else set()
        queues.setdefault(a.stream, deque()).append((number, waits))
    done: set[int] = set()
    while any(queues.values()):
        ready = [q for q in queues.values() if q and q[0][1] <= done]
        assert ready, "every stream waits for another"
        number, _ = rng.choice(ready).popleft()
        done.add(number)
        yield issued[number]


@settings(max_examples=200)
@given(layouts(), schedules, st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, 2**32))
def test_any_timing_computes_the_same(layout: Layout, schedule: WaveSchedule, n_chunks: list[int], seed: int) -> None:
    """Two waves, one behind the other. Logits are looked at when they arrive, which the runner waits for."""
    issued = [(wave, a) for wave in range(2) for a in actions(layout, schedule, n_chunks)]
    symbols = Symbols(layout)
    rng = random.Random(seed)
    for wave, a in interleaved(issued, rng, is_serial=schedule.order is Order.SERIAL):
        symbols.run(a, wave)
    assert list(symbols.results.values()) == plain(layout, schedule, n_chunks, 2)


def test_cut_fuses_resident_neighbours_and_parts_layers_with_host_experts() -> None:
    layout = Layout(2, (0, 0, 1, 1, 2, 0), 0, ((), (), (), slabs_of(2), (), ()))
    assert cut(layout) == (
        Split(SplitKind.EMBED, 2),
        Split(SplitKind.LAYERS, 0, 0, 2),
        Split(SplitKind.LAYERS, 1, 2, 3),
        Split(SplitKind.ATTEND, 1, 3, 4),
        Split(SplitKind.EXPERTS, 1, 3, 4),
        Split(SplitKind.LAYERS, 2, 4, 5),
        Split(SplitKind.LAYERS, 0, 5, 6),
        Split(SplitKind.OUTPUT, 0),
    )
