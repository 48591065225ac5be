"""Load modes and the pinned budget: the same logits wherever the host keeps weights, and the bytes that were told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import pytest
import torch

from overspill.device import hazard
from overspill.device.base import Buffer, Devices, MemoryKind
from overspill.device.virtual import VirtualDevice, VirtualHost
from overspill.errors import OutOfMemory
from overspill.gguf.source import ModelSource
from overspill.models.layouts import Relaid
from overspill.pipeline import arena, host_budget
from overspill.pipeline.reading import LoadMode
from overspill.pipeline.schedule import Order, Policy
from tests.helpers.pipe import ORDERS_AND_POLICIES, Pipe, Shape, cut_wave, cut_waves, pipe, rare_delays, run_all
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_moe import N_VOCAB, tiny_model, tiny_source

SIZES = (3, 3, 1)
N_TOKENS = sum(SIZES)
IDS = [(7 * i + 3) % N_VOCAB for i in range(N_TOKENS)]
EXPERT_BYTES = 4 * 3 * 4 * 720  # layers, parts, experts
CHUNK_BYTES = 500  # less than an expert, and no divisor of one
EMBED_BYTES = 40 * 20 * 4


def devices_of(n: int, host_bytes: int | None = None, host: type[VirtualHost] = VirtualHost) -> Devices:
    def one_thread() -> None:
        torch.set_num_threads(1)

    accelerators = tuple(VirtualDevice(i, total_bytes=1 << 30, thread_init=one_thread) for i in range(n))
    return Devices(accelerators, host(cap_bytes=host_bytes, thread_init=one_thread))


@pytest.fixture(autouse=True)
def small_chunks() -> Iterator[None]:
    with patch.object(arena, "_CHUNK_BYTES", CHUNK_BYTES), patch.object(host_budget, "MIN_CHUNK_BYTES", CHUNK_BYTES):
        yield


def open_pipe(shape: Shape, source: ModelSource | None = None, **options: object) -> AbstractContextManager[Pipe]:
    source = source or tiny_source()
    return pipe(source, shape, n_ubatch=3, n_ubatches=3, n_cells=N_TOKENS, **options)  # type: ignore[arg-type]


def expected() -> torch.Tensor:
    return reference_logits(tiny_model(), cut_waves(IDS, SIZES, 1), n_cells=N_TOKENS)


def assert_logits(p: Pipe, wanted: torch.Tensor) -> None:
    for seed, (order, policy) in enumerate(ORDERS_AND_POLICIES):
        p.poison()
        with rare_delays(seed):
            logits = run_all(p, IDS, SIZES, p.schedule(order, policy), 1 + seed % 2)
        assert torch.equal(logits, wanted), (order, policy)


def host_weights(p: Pipe) -> int:
    """Bytes that the host has allocated for weights; what stays in the file is not among them."""
    return p.devices.host.allocated_bytes[MemoryKind.WEIGHTS]


# --- modes


@pytest.mark.parametrize("mode", list(LoadMode))
def test_modes_give_the_same_logits(mode: LoadMode) -> None:
    with open_pipe(Shape(2, n_layers_on_cpu=1), mode=mode) as p:
        assert_logits(p, expected())
        r = p.residence
        on_host = EXPERT_BYTES * 3 // 4
        assert (r.mode, r.pinned_bytes, r.pageable_bytes) == (mode, on_host, 0)
        assert (r.mapped_bytes > EXPERT_BYTES // 4 + EMBED_BYTES) == mode.is_mapped
        matrices = r.mapped_bytes if mode.is_mapped else host_weights(p) - on_host
        assert EXPERT_BYTES // 4 + EMBED_BYTES < matrices < EXPERT_BYTES // 4 + EMBED_BYTES + 20_000
        assert host_weights(p) == on_host + (0 if mode.is_mapped else matrices)
        assert (r.locked_bytes >= r.mapped_bytes > 0) == mode.is_locked


@pytest.mark.parametrize("mode", [LoadMode.NONE, LoadMode.DIO])
def test_modes_that_copy_compute_with_nothing_of_the_file(mode: LoadMode) -> None:
    """What is made of tensors cut out of others, as some files need, is no part of the file either."""
    with open_pipe(Shape(0), mode=mode) as p:
        assert p.residence.mapped_bytes == 0
        assert p.residence.copied_bytes > EXPERT_BYTES
    relaid = Relaid(tiny_source(), {})
    with open_pipe(Shape(0), relaid, mode=mode) as p:
        assert p.residence.mapped_bytes == 0


def test_loading_leaves_no_memory_of_its_own() -> None:
    with open_pipe(Shape(2)) as p:
        held = sum(b.n_bytes for b in p.buffers() if b.device is p.devices.host)
        assert sum(p.devices.host.allocated_bytes.values()) == held + host_weights(p)


# --- the budget


def other_host_bytes(shape: Shape) -> int:
    """What the host holds beside experts."""
    with open_pipe(shape, devices=devices_of(shape.n_devices)) as p:
        return sum(p.devices.host.allocated_bytes.values()) - EXPERT_BYTES


@pytest.mark.parametrize(
    ("mode", "room_bytes", "is_enough"),
    [
        (LoadMode.MMAP, 60_000, True),
        (LoadMode.MMAP, EXPERT_BYTES, False),
        (LoadMode.MMAP, EXPERT_BYTES // 2, False),
        (LoadMode.MMAP, 8_000, False),
        (LoadMode.NONE, 60_000, True),
        (LoadMode.NONE, EXPERT_BYTES + 4_000, False),
    ],
)
def test_what_cannot_be_pinned_goes_up_through_the_ring(
    mode: LoadMode, room_bytes: int, is_enough: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for the experts, their rings and the reserve. In memory of its own, what is pageable takes room as well."""
    shape = Shape(2, slab_experts=3, embeds=True)
    host_bytes = other_host_bytes(shape) + room_bytes
    with caplog.at_level(logging.WARNING), open_pipe(shape, devices=devices_of(2, host_bytes), mode=mode) as p:
        r = p.residence
        assert r.pinned_bytes + r.pageable_bytes == EXPERT_BYTES
        assert (r.pageable_bytes == 0) == is_enough
        assert r.pinned_bytes >= min(EXPERT_BYTES, room_bytes - 12_000)
        reserve = host_bytes // 16 if mode is LoadMode.MMAP else 0
        assert p.devices.host.peak_bytes <= host_bytes - reserve
        assert_logits(p, expected())
    told = [record.getMessage() for record in caplog.records]
    if is_enough:
        assert told == []
    else:
        (message,) = told
        mib = 1 << 20
        assert f"{r.pinned_bytes / mib:.1f} MiB of experts are pinned" in message
        assert f"{r.pageable_bytes / mib:.1f} MiB are not" in message


def test_uploads_count_the_same_and_nothing_is_allocated_meanwhile() -> None:
    with open_pipe(Shape(2, slab_experts=1), devices=devices_of(2, 36_000), mode=LoadMode.MMAP) as p:
        assert p.residence.pageable_bytes > EXPERT_BYTES // 4
        p.runner.run(cut_wave(IDS, SIZES), p.schedule(Order.BREADTH_FIRST))
        assert p.uploaded_bytes() == [EXPERT_BYTES // 2] * 2
        assert p.devices.host.counters.n_allocations == 0
        assert sum(d.counters.n_device_syncs for d in p.devices.all) == 0


def test_no_ring_where_all_is_pinned() -> None:
    with open_pipe(Shape(2), devices=devices_of(2)) as p:
        assert p.devices.host.allocated_bytes[MemoryKind.STAGING] == sum(
            b.n_bytes for b in p.buffers() if b.device is p.devices.host and b.kind is MemoryKind.STAGING
        )


class RefusingHost(VirtualHost):
    """Pins this many bytes, then no more, whatever is free; experts alone, or everything."""

    allowed_bytes = EXPERT_BYTES // 3

    def allocate_pinned(self, n_bytes: int, *, name: str, kind: MemoryKind = MemoryKind.STAGING) -> Buffer:
        if kind is MemoryKind.WEIGHTS:
            self.allowed_bytes -= n_bytes
            if self.allowed_bytes < 0:
                raise OutOfMemory(f"pinning {n_bytes} bytes failed")
        return super().allocate_pinned(n_bytes, name=name, kind=kind)


@pytest.mark.parametrize("mode", [LoadMode.AUTO, LoadMode.NONE])
def test_a_refused_pin_moves_no_work_to_the_cpu(mode: LoadMode, caplog: pytest.LogCaptureFixture) -> None:
    devices = devices_of(2, host=RefusingHost)
    with caplog.at_level(logging.WARNING), open_pipe(Shape(2), devices=devices, mode=mode) as p:
        r = p.residence
        assert 0 < r.pinned_bytes <= EXPERT_BYTES // 3
        assert r.pinned_bytes + r.pageable_bytes == EXPERT_BYTES
        (record,) = caplog.records
        assert "pinning 2880 bytes failed" in record.getMessage()
        p.runner.run(cut_wave(IDS, SIZES), p.schedule(Order.BREADTH_FIRST, Policy.ALL))
        assert sum(p.uploaded_bytes()) == EXPERT_BYTES
        assert_logits(p, expected())


# --- the ring


@contextmanager
def nothing_pinned(shape: Shape) -> Iterator[Pipe]:
    """On null devices, experts pageable in memory of their own, whose filling the log shows."""

    def refuse(*args: object, **options: object) -> None:
        return None

    with (
        patch.object(arena.Arena, "_pinned", refuse),
        open_pipe(shape, kind="null", mode=LoadMode.NONE, max_in_flight=1 << 30) as p,
    ):
        assert p.residence.pinned_bytes == 0 < p.residence.pageable_bytes
        for buffer in p.buffers("ids"):
            buffer.raw().zero_()
        yield p


@pytest.mark.parametrize("shape", [Shape(1), Shape(2, slab_experts=1), Shape(3, mixed_layers="odd")], ids=str)
def test_no_hazard(shape: Shape) -> None:
    with nothing_pinned(shape) as p:
        for order, policy in ORDERS_AND_POLICIES:
            p.runner.run(cut_wave(IDS, SIZES), p.schedule(order, policy))
        feeders = {entry.stream for entry in p.log if entry.label.startswith("pin ")}
        assert feeders == {f"null:host/upload:{i}" for i in range(shape.n_devices)}
        assert hazard.check(p.log, preinitialised=p.buffers("kv")) == []


@pytest.mark.parametrize("waits_on_feeder", [True, False])
def test_waits_of_the_ring_are_needed(waits_on_feeder: bool) -> None:
    """Without those of the feeders a chunk is overwritten before it has gone up, without those for them it is empty."""
    with nothing_pinned(Shape(2)) as p:
        p.runner.run(cut_wave(IDS, SIZES), p.schedule(Order.BREADTH_FIRST))
        log = p.log
        fed = {e.event for e in log if e.verb is hazard.Verb.RECORD and "host/upload:" in e.stream}

        def is_kept(entry: hazard.Entry) -> bool:
            is_of_feeder = "host/upload:" in entry.stream
            return entry.verb is not hazard.Verb.WAIT or not (is_of_feeder if waits_on_feeder else entry.event in fed)

        found = hazard.check([e for e in log if is_kept(e)], preinitialised=p.buffers("kv"))
        assert {h.kind for h in found if h.buffer.name.startswith("ring")} == {
            hazard.HazardKind.WRITE_AFTER_READ if waits_on_feeder else hazard.HazardKind.READ_AFTER_WRITE
        }
