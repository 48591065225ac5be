"""Cells in rings: whatever requests come, every key that a token must see is that of its own sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.cache.cells import BlockShape, KvShape, Segment
from overspill.cache.images import BLOCK_BYTES, ImageStore, Save
from overspill.cache.rings import RingGuard, Rings
from overspill.engine.request import Request, SamplingParams
from overspill.engine.scheduler import Scheduler, output_slots
from overspill.engine.slots import Move, PrefixReuse
from overspill.pipeline.wave import Wave
from tests.helpers.traffic import slot_sizes


def test_a_layer_with_a_window_has_cells_for_it_and_for_a_ubatch() -> None:
    shape = KvShape(2, 8, 4, blocks=(BlockShape(4, 6),), reach=16)
    assert shape.tensor_shapes(3, 100, 10) == ((3, 2, 26, 8), (3, 2, 26, 4), (3, 1, 25, 6))
    assert shape.tensor_shapes(3, 20, 10)[0] == (3, 2, 20, 8), "no more than there are positions"
    assert shape.tensor_shapes(3, 100) == shape._replace(reach=None).tensor_shapes(3, 100, 10)


def test_rings_of_a_model_are_bounded_by_the_smallest() -> None:
    shapes = [KvShape(2, 8, 4, reach=reach) for reach in (None, 30, 16)]
    assert Rings.of(shapes, 100, 10) == Rings(26, 11)
    assert Rings.of(shapes, 26, 10) is None, "all positions have cells"
    assert Rings.of(shapes, 100, None) is None
    assert Rings.of(shapes[:1], 100, 10) is None


def test_the_guard_knows_how_far_back_a_slot_goes() -> None:
    guard = RingGuard(Rings.of([KvShape(1, 8, 8, reach=16)], 100, 10) or Rings(0, 0))
    for first, n in ((0, 10), (10, 10), (20, 6), (3, 10), (13, 10), (23, 4), (16, 10)):
        guard.advance(Segment(0, first, n))
    with pytest.raises(RuntimeError, match=r"slot 0 goes on at position 15, .* before position 16"):
        guard.advance(Segment(0, 15, 1))
    guard.advance(Segment(1, 0, 10))
    guard.advance(Segment(0, 0, 5))
    guard.advance(Segment(0, 2, 5))
    guard.put(0, 4)
    with pytest.raises(RuntimeError, match="before position 4"):
        guard.advance(Segment(0, 3, 1))


class Device:
    """The tokens of cells: of a layer that has all positions, and of a ring; and images of both."""

    def __init__(self, n_slots: int, n_positions: int, reach: int, n_ubatch: int) -> None:
        shape = KvShape(1, 1, 1, reach=reach)
        self.rings = Rings.of([shape], n_positions, n_ubatch)
        self._n, self._reach = shape.n_cells(n_positions, n_ubatch), reach
        self._all = [[-1] * n_positions for _ in range(n_slots)]
        self._ring = [[-1] * self._n for _ in range(n_slots)]
        self._images: dict[object, tuple[list[int], list[int]]] = {}
        self._guard = None if self.rings is None else RingGuard(self.rings)

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            if isinstance(move, Save):
                n = len(move.image.ids)
                self._images[move.image] = self._all[move.slot][:n], self._ring[move.slot][:n]
                continue
            for target, source in zip((self._all, self._ring), self._images[move.image], strict=True):
                target[move.slot][: move.n_cells] = source[: move.n_cells]
            if self._guard is not None:
                self._guard.put(move.slot, move.image.floor)

    def run(self, wave: Wave) -> None:
        for ubatch in wave.ubatches:
            row = 0
            for segment in ubatch.segments:
                if self._guard is not None:
                    self._guard.advance(segment)
                everything, ring = self._all[segment.slot], self._ring[segment.slot]
                positions = range(segment.first_pos, segment.end_pos)
                for pos, token in zip(positions, ubatch.ids[row : row + segment.n_tokens], strict=True):
                    everything[pos] = ring[pos % self._n] = token
                row += segment.n_tokens
                for pos in positions:
                    seen = range(max(0, pos - self._reach + 1), pos + 1)
                    assert [ring[p % self._n] for p in seen] == [everything[p] for p in seen]


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, object], int, int, list[tuple[list[int], int]], list[int]]:
    """Sizes, a window, blocks for images, prompts and lengths of answers, and waves that are given up."""
    sizes = draw(slot_sizes(n_ubatch=5, n_slots=3))
    prompt = st.builds(
        lambda head, n, tail: head[:n] + tail,
        st.sampled_from([list(range(30)), list(range(30, 60))]),
        st.integers(1, 30),
        st.lists(st.integers(60, 61), min_size=1, max_size=6),
    )
    requests = st.lists(st.tuples(prompt, st.integers(0, 5)), min_size=2, max_size=14)
    given_up = st.lists(st.integers(0, 40), max_size=4)
    return sizes, draw(st.integers(1, 8)), draw(st.integers(0, 9)), draw(requests), draw(given_up)


@given(traffic())
@settings(deadline=None, max_examples=400)
def test_every_key_that_is_seen_is_there(case: tuple[dict[str, object], int, int, list, list[int]]) -> None:
    sizes, reach, n_blocks, waiting, given_up = case
    images = ImageStore(n_blocks, lambda n_cells, n_states: n_cells * BLOCK_BYTES // 10) if n_blocks else None
    device = Device(sizes["n_slots"], sizes["n_ctx_slot"], reach, sizes["n_ubatch"])  # type: ignore[arg-type]
    scheduler = Scheduler(**sizes, images=images, rings=device.rings)  # type: ignore[arg-type]
    n_waves = 0
    while waiting or scheduler.has_work:
        if waiting and n_waves % 3 != 2:
            prompt, max_tokens = waiting.pop()
            scheduler.add(Request(str(len(waiting)), tuple(prompt), SamplingParams(max_tokens=max_tokens)))
        n_waves += 1
        wave = scheduler.next_wave()
        device.move(scheduler.take_moves())
        if wave is None:
            continue
        device.run(wave)
        if n_waves in given_up:
            for sequence in scheduler.sequences_in(wave):
                scheduler.drop(sequence, keep_cells=True)
        else:
            scheduler.commit(wave, dict.fromkeys(output_slots(wave), 60 + n_waves % 2))


SIZES = {"n_vocab": 100, "n_ctx_slot": 400, "n_slots": 1, "n_ubatch": 10, "n_wave": 40, "reuse": PrefixReuse.ANY_POINT}


def reused(scheduler: Scheduler, ids: list[int]) -> int:
    sequence = scheduler.add(Request("a", tuple(ids), SamplingParams(max_tokens=1)))
    while (wave := scheduler.next_wave()) is not None:
        scheduler.take_moves()
        scheduler.commit(wave, dict.fromkeys(output_slots(wave), 9))
    return sequence.n_reused


def test_prompts_go_on_as_far_back_as_the_ring_holds() -> None:
    """A window of 16 and ubatches of 10: from position 100 back to 89 and no further, until a prompt begins anew."""
    rings = Rings.of([KvShape(1, 1, 1, reach=16)], 400, 10)
    scheduler = Scheduler(**SIZES, rings=rings)  # type: ignore[arg-type]
    long = [1] * 100
    lengths, expected = (99, 89, 88, 78, 26, 20, 5, 3), [0, 89, 0, 78, 0, 20, 0, 3]
    assert [reused(scheduler, [*long[:n], 2]) for n in lengths] == expected


def test_what_was_saved_earlier_serves_where_the_slot_does_not() -> None:
    rings = Rings.of([KvShape(1, 1, 1, reach=16)], 400, 10)
    images = ImageStore(90, lambda n_cells, n_states: n_cells * BLOCK_BYTES // 10)
    scheduler = Scheduler(**SIZES, images=images, rings=rings)  # type: ignore[arg-type]
    first, other = [1] * 100, [2] * 100
    assert [reused(scheduler, ids) for ids in (first, other, first + [3] * 50)] == [0, 0, 100]
    assert reused(scheduler, other) == 99
    assert reused(scheduler, [*first, 4]) == 100, "of the first image; the longer one goes back to 139 only"
    assert scheduler.image_counts.n_saved == 3


def test_a_loaded_image_goes_no_further_back_than_the_slot_it_was_made_of() -> None:
    rings = Rings.of([KvShape(1, 1, 1, reach=16)], 400, 10)
    images = ImageStore(90, lambda n_cells, n_states: n_cells * BLOCK_BYTES // 10)
    scheduler = Scheduler(**SIZES, images=images, rings=rings)  # type: ignore[arg-type]
    long, short = [1] * 100, [2] * 5
    assert [reused(scheduler, ids) for ids in (long, short, [*long[:90], 3], [*long[:85], 4])] == [0, 0, 90, 0]


def test_a_slot_that_cannot_be_cut_back_is_saved_though_prompts_begin_alike() -> None:
    """The second prompt shares 80 tokens, but the slot goes back to 89 only: nothing of it is left."""
    rings = Rings.of([KvShape(1, 1, 1, reach=16)], 400, 10)
    images = ImageStore(90, lambda n_cells, n_states: n_cells * BLOCK_BYTES // 10)
    scheduler = Scheduler(**SIZES, images=images, rings=rings)  # type: ignore[arg-type]
    long = [1] * 100
    assert [reused(scheduler, ids) for ids in (long, [*long[:80], 2], [*long, 3])] == [0, 0, 100]
