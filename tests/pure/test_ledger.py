"""The ledger: which earlier actions, on other streams, an action has to wait for."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from overspill.device.lane import Lane
from overspill.pipeline.ledger import Ledger, StreamId

A = StreamId(0, Lane.COMPUTE)
B = StreamId(0, Lane.UPLOAD)
C = StreamId(1, Lane.COMPUTE)


def test_read_after_write() -> None:
    ledger = Ledger()
    assert ledger.add(0, A, [], ["x"]) == {}
    assert ledger.add(1, B, ["x"], []) == {A: 0}
    assert ledger.add(2, C, ["x"], []) == {A: 0}


def test_write_after_read() -> None:
    ledger = Ledger()
    ledger.add(0, A, ["x"], [])
    ledger.add(1, B, ["x"], [])
    assert ledger.add(2, C, [], ["x"]) == {A: 0, B: 1}


def test_write_after_write() -> None:
    ledger = Ledger()
    ledger.add(0, A, [], ["x"])
    assert ledger.add(1, B, [], ["x"]) == {A: 0}
    assert ledger.add(2, C, [], ["x"]) == {B: 1}


def test_readers_do_not_wait_for_each_other() -> None:
    ledger = Ledger()
    ledger.add(0, A, ["x"], [])
    assert ledger.add(1, B, ["x"], []) == {}


def test_the_order_of_one_stream_is_free() -> None:
    ledger = Ledger()
    ledger.add(0, A, [], ["x"])
    assert ledger.add(1, A, ["x"], ["x"]) == {}
    assert ledger.add(2, A, [], ["x"]) == {}


def test_other_resources_do_not_matter() -> None:
    ledger = Ledger()
    ledger.add(0, A, ["x"], ["y"])
    assert ledger.add(1, B, ["x", "z"], ["w"]) == {}


def test_a_write_settles_with_the_readers_before_it() -> None:
    """Whoever comes after the write need not know of them."""
    ledger = Ledger()
    ledger.add(0, A, ["x"], [])
    ledger.add(1, B, [], ["x"])
    assert ledger.add(2, C, [], ["x"]) == {B: 1}


def test_one_wait_per_stream_for_the_last_of_its_actions() -> None:
    ledger = Ledger()
    ledger.add(0, A, [], ["x"])
    ledger.add(1, A, [], ["y"])
    ledger.add(2, A, ["z"], [])
    assert ledger.add(3, B, ["x", "y"], ["z"]) == {A: 2}


def test_reading_and_writing_the_same() -> None:
    ledger = Ledger()
    ledger.add(0, A, [], ["x"])
    assert ledger.add(1, B, ["x"], ["x"]) == {A: 0}
    assert ledger.add(2, A, ["x"], []) == {B: 1}


def test_users_are_the_last_writer_and_the_readers_since() -> None:
    ledger = Ledger()
    assert ledger.users("x") == []
    ledger.add(0, A, [], ["x"])
    ledger.add(1, B, [], ["x"])
    ledger.add(2, A, ["x"], [])
    ledger.add(3, A, ["x"], [])
    ledger.add(4, C, ["x"], [])
    assert sorted(ledger.users("x")) == [1, 3, 4]
    assert ledger.live() == {1, 3, 4}


_STREAMS = st.sampled_from([A, B, C])
_RESOURCES = st.lists(st.sampled_from("xyz"), max_size=3, unique=True)
_ACTIONS = st.lists(st.tuples(_STREAMS, _RESOURCES, _RESOURCES), max_size=25)


@given(_ACTIONS)
def test_every_conflict_is_ordered_and_waits_are_live(acts: Sequence[tuple[StreamId, list[str], list[str]]]) -> None:
    """Against all pairs: of two actions that touch one resource, one writing, the later happens after the earlier."""
    ledger = Ledger()
    before: list[set[int]] = []
    last: dict[StreamId, int] = {}
    for number, (stream, reads, writes) in enumerate(acts):
        live = ledger.live()
        waits = ledger.add(number, stream, reads, writes)
        assert set(waits.values()) <= live
        assert stream not in waits
        known = {*waits.values(), *([last[stream]] if stream in last else [])}
        before.append(known.union(*(before[n] for n in known)))
        last[stream] = number
        for earlier, (_, other_reads, other_writes) in enumerate(acts[:number]):
            if {*reads, *writes} & {*other_writes} or {*writes} & {*other_reads}:
                assert earlier in before[number]
