"""The happens-before proof: right schedules pass, each seeded fault is found and named, random logs agree with a
graph search that knows nothing of clocks."""

from __future__ import annotations

import random

import pytest
import torch

from overspill.device import hazard
from overspill.device.base import Buffer, MemoryKind
from overspill.device.hazard import HOST, Entry, Hazard, HazardKind, Verb
from overspill.device.lane import Lane
from overspill.device.null import NullDevice, NullLog, open_null
from tests.helpers.ring import SLOT_BYTES, Fault, Ring

MIB = 1024**2


def ring_hazards(fault: Fault | None, *, n_devices: int = 2, n_layers: int = 8, n_slots: int = 2) -> list[Hazard]:
    devices, log = open_null([MIB] * n_devices, host_bytes=MIB)
    ring = Ring(devices, n_slots=n_slots, fault=fault)
    arena = devices.host.allocate_pinned(n_layers * SLOT_BYTES, name="arena")
    for _ in range(2):
        ring.read(ring.run(arena, n_layers))
    return hazard.check(log.entries, preinitialised=(arena, *ring.inputs))


@pytest.mark.parametrize("n_devices", [1, 2, 3])
@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_right_schedule_has_no_hazard(n_devices: int, n_slots: int) -> None:
    assert ring_hazards(None, n_devices=n_devices, n_slots=n_slots) == []


@pytest.mark.parametrize(
    ("fault", "kind", "buffer"),
    [
        (Fault.NO_READY_WAIT, HazardKind.READ_AFTER_WRITE, "slot0"),
        (Fault.READY_OF_THE_LAYER_BEFORE, HazardKind.READ_AFTER_WRITE, "slot1"),
        (Fault.NO_FREE_WAIT, HazardKind.WRITE_AFTER_READ, "slot0"),
        (Fault.FREE_TOO_EARLY, HazardKind.WRITE_AFTER_READ, "slot0"),
        (Fault.NO_HAND_OFF_WAIT, HazardKind.READ_AFTER_WRITE, "x0"),
        (Fault.NO_COMPUTED_WAIT, HazardKind.READ_AFTER_WRITE, "x0"),
        (Fault.NO_DOWNLOAD_WAIT, HazardKind.WRITE_AFTER_WRITE, "out0"),
    ],
)
def test_seeded_fault_is_found(fault: Fault, kind: HazardKind, buffer: str) -> None:
    hazards = ring_hazards(fault)
    assert (kind, buffer) in {(h.kind, h.buffer.name) for h in hazards}


def test_a_slot_fault_blames_slots_alone() -> None:
    """With one device and one slot nothing else can go wrong when the wait for `free` is dropped."""
    hazards = ring_hazards(Fault.NO_FREE_WAIT, n_devices=1, n_slots=1)
    assert {h.buffer.name for h in hazards} == {"slot0"}
    assert HazardKind.WRITE_AFTER_READ in {h.kind for h in hazards}


def test_message_names_buffer_work_and_streams() -> None:
    found = next(h for h in ring_hazards(Fault.NO_READY_WAIT) if h.kind is HazardKind.READ_AFTER_WRITE)
    assert str(found) == (
        "read after write of Buffer(slot0, null:0, (1024,)): #8 launch 'step0' on null:0/compute "
        "is not ordered after #4 upload 'w0' on null:0/upload"
    )


def test_host_wait_orders_what_is_issued_later() -> None:
    devices, log = open_null([MIB], host_bytes=MIB)
    device = devices.accelerators[0]
    buffer = device.allocate((4,), torch.float32, kind=MemoryKind.COMPUTE, name="b")
    compute, upload = device.stream(Lane.COMPUTE), device.stream(Lane.UPLOAD)
    compute.launch(_never, label="write", writes=(buffer,))
    compute.record().wait_host()
    upload.launch(_never, label="read", reads=(buffer,))
    assert hazard.check(log.entries) == []
    compute.launch(_never, label="write again", writes=(buffer,))
    assert [h.kind for h in hazard.check(log.entries)] == [HazardKind.WRITE_AFTER_READ]


def test_device_synchronisation_orders_all_lanes() -> None:
    devices, log = open_null([MIB], host_bytes=MIB)
    device = devices.accelerators[0]
    buffer = device.allocate((4,), torch.float32, kind=MemoryKind.COMPUTE, name="b")
    device.stream(Lane.COMPUTE).launch(_never, label="write", writes=(buffer,))
    device.synchronize_host()
    device.stream(Lane.UPLOAD).launch(_never, label="read", reads=(buffer,))
    assert hazard.check(log.entries) == []


def test_host_refill_of_an_input_in_flight_is_found() -> None:
    devices, log = open_null([MIB], host_bytes=MIB)
    device, host = devices.accelerators[0], devices.host
    ids = host.allocate_pinned(16, name="ids")
    target = device.allocate((16,), torch.uint8, kind=MemoryKind.COMPUTE, name="ids_on_device")
    stream = device.stream(Lane.UPLOAD)
    ids.host_tensor.fill_(1)
    stream.copy(target, ids, n_bytes=16, label="ids")
    copied = stream.record()
    assert hazard.check(log.entries) == []
    ids.host_tensor.fill_(2)
    assert [(h.kind, h.buffer) for h in hazard.check(log.entries)] == [(HazardKind.WRITE_AFTER_READ, ids)]
    del log.entries[-1]
    copied.wait_host()
    ids.host_tensor.fill_(2)
    assert hazard.check(log.entries) == []


def test_read_of_what_nobody_wrote_is_found_once() -> None:
    devices, log = open_null([MIB], host_bytes=MIB)
    device = devices.accelerators[0]
    weight = device.allocate((4,), torch.float32, kind=MemoryKind.WEIGHTS, name="w")
    for _ in range(3):
        device.stream(Lane.COMPUTE).launch(_never, label="read", reads=(weight,))
    assert [(h.kind, h.i_earlier, h.i_later) for h in hazard.check(log.entries)] == [
        (HazardKind.NEVER_WRITTEN, None, 0)
    ]
    assert hazard.check(log.entries, preinitialised=(weight,)) == []


def test_a_cut_log_is_refused() -> None:
    with pytest.raises(ValueError, match="log entry 0 waits for event 7"):
        hazard.check([Entry(verb=Verb.WAIT, stream="null:0/compute", event=7)])


def _never() -> None:
    raise AssertionError("null devices execute nothing")


# --- random logs against a graph search -----------------------------------------------------------------------------

STREAMS = ("a", "b", "c")


def random_log(rng: random.Random, buffers: list[Buffer], n_entries: int) -> list[Entry]:
    log: list[Entry] = []
    n_events = 0
    for _ in range(n_entries):
        stream = rng.choice(STREAMS)
        choice = rng.random()
        if choice < 0.45:
            touched = rng.sample(buffers, 2)
            log.append(Entry(verb=Verb.LAUNCH, stream=stream, reads=(touched[0],), writes=(touched[1],)))
        elif choice < 0.7:
            log.append(Entry(verb=Verb.RECORD, stream=stream, event=n_events))
            n_events += 1
        elif choice < 0.75:
            log.append(Entry(verb=Verb.TOUCH_HOST, stream=HOST, writes=(rng.choice(buffers),)))
        elif n_events:
            verb, stream = (Verb.WAIT, stream) if choice < 0.97 else (Verb.WAIT_HOST, HOST)
            log.append(Entry(verb=verb, stream=stream, event=rng.randrange(n_events)))
    return log


def ancestors(log: list[Entry]) -> list[set[int]]:
    """For each entry, all entries that happen before it: program order, record -> wait, host -> what it issues."""
    last: dict[str, int] = {}
    recorded: dict[int, int] = {}
    result: list[set[int]] = []
    for i, entry in enumerate(log):
        parents = {last[s] for s in (entry.stream, HOST) if s in last}
        if entry.verb is Verb.RECORD:
            assert entry.event is not None
            recorded[entry.event] = i
        elif entry.event is not None:
            parents.add(recorded[entry.event])
        result.append(parents.union(*(result[p] for p in parents)))
        last[entry.stream] = i
    return result


def conflicts(log: list[Entry]) -> set[tuple[HazardKind, Buffer, str, int]]:
    """(kind, buffer, stream of the earlier access, index of the later one) of every pair that nothing orders."""
    before = ancestors(log)
    found = set()
    for j, later in enumerate(log):
        for i, earlier in enumerate(log[:j]):
            if i in before[j]:
                continue
            pairs = (
                (HazardKind.READ_AFTER_WRITE, set(earlier.writes) & set(later.reads)),
                (HazardKind.WRITE_AFTER_READ, set(earlier.reads) & set(later.writes)),
                (HazardKind.WRITE_AFTER_WRITE, set(earlier.writes) & set(later.writes)),
            )
            found |= {(kind, buffer, earlier.stream, j) for kind, shared in pairs for buffer in shared}
    return found


@pytest.mark.parametrize("seed", range(40))
def test_random_logs_agree_with_a_graph_search(seed: int) -> None:
    device = NullDevice(0, log=NullLog(), total_bytes=MIB)
    buffers = [device.allocate((1,), torch.uint8, kind=MemoryKind.COMPUTE, name=f"b{i}") for i in range(4)]
    log = random_log(random.Random(seed), buffers, 60)
    hazards = hazard.check(log, preinitialised=buffers)
    found = {(h.kind, h.buffer, log[h.i_earlier].stream, h.i_later) for h in hazards if h.i_earlier is not None}
    assert found == conflicts(log)
    assert len(hazards) == len(found)
