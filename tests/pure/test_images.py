"""Images of slots: whatever requests come, a loaded cell or state is that of the prompt's own tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.cache.images import BLOCK_BYTES, Image, ImageStore, Save
from overspill.engine.request import Request, SamplingParams
from overspill.engine.scheduler import Scheduler, output_slots
from overspill.engine.slots import Move, PrefixReuse
from overspill.pipeline.wave import Wave
from tests.helpers.traffic import slot_sizes

# --- the store alone


def store(n_blocks: int) -> ImageStore:
    """Ten cells to a block, a state as large as five."""
    return ImageStore(n_blocks, lambda n_cells, n_states: (n_cells + 5 * n_states) * BLOCK_BYTES // 10)


def usable(ids: tuple[int, ...], image: Image) -> int:
    return next((i for i, (a, b) in enumerate(zip(ids, image.ids, strict=False)) if a != b), len(image.ids))


def test_the_image_that_nobody_used_for_longest_gives_way() -> None:
    s = store(3)
    a, b, _ = (s.put([i] * 10, ()) for i in range(3))
    assert a is not None
    assert b is not None
    s.take(a, 10)
    d = s.put([3] * 10, ())
    assert d is not None
    assert d.blocks == b.blocks
    assert s.best(lambda image: usable((1,) * 10, image)) == (None, 0)
    assert s.best(lambda image: usable((0,) * 10, image)) == (a, 10)


def test_blocks_are_rounded_up_and_states_count() -> None:
    s = store(4)
    image = s.put([1] * 11, (11,))
    assert image is not None
    assert len(image.blocks) == 2
    assert (s.counts.n_blocks, s.counts.n_blocks_total) == (2, 4)


def test_what_is_too_large_is_not_saved_and_costs_nobody_anything() -> None:
    s = store(2)
    small = s.put([1] * 10, ())
    assert s.put([2] * 21, ()) is None
    assert s.best(lambda image: usable((1,) * 10, image)) == (small, 10)


def test_what_is_loaded_next_is_spared() -> None:
    s = store(2)
    old, new = s.put([1] * 10, ()), s.put([2] * 10, ())
    assert s.put([3] * 10, (), spared=old) is not None
    assert s.best(lambda image: usable((1,) * 10, image)) == (old, 10)
    assert s.best(lambda image: usable((2,) * 10, image)) == (None, 0)
    assert new is not None
    assert s.put([4] * 20, (), spared=old) is None


def test_an_image_takes_the_place_of_those_it_has_all_of() -> None:
    s = store(10)
    s.put([1] * 10, ())
    s.put([1] * 20, ())
    assert (s.counts.n_images, s.counts.n_blocks, s.counts.n_dropped) == (1, 2, 1)
    assert s.put([1] * 15, ()) is None, "it is there already"
    s.put([1] * 30, (30,))
    s.put([1] * 40, (40,))
    assert s.counts.n_images == 2, "the state at 30 is not in the longer one"


def test_nothing_is_left_of_what_is_not_trusted() -> None:
    s = store(10)
    s.put([1] * 30, ())
    s.clear()
    assert (s.counts.n_images, s.counts.n_blocks) == (0, 0)
    assert s.best(lambda image: len(image.ids)) == (None, 0)


def test_images_need_no_torch() -> None:
    code = "import sys, overspill.cache.images; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- behind a scheduler


class Device:
    """Cells and states as the tokens that went into them, and images block by block."""

    def __init__(self, n_slots: int) -> None:
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.rows: dict[int, tuple[int, ...]] = {}
        self._blocks: dict[int, Image] = {}
        self._images: dict[Image, tuple[list[int], dict[int, tuple[int, ...]]]] = {}

    def move(self, moves: list[Move]) -> None:
        for move in moves:
            image = move.image
            if isinstance(move, Save):
                assert tuple(self.cells[move.slot][: len(image.ids)]) == image.ids
                assert sorted(move.rows) == sorted(image.positions)
                for block in image.blocks:
                    self._blocks[block] = image
                states = {pos: self.rows[row] for pos, row in move.rows.items()}
                self._images[image] = (self.cells[move.slot][: len(image.ids)], states)
                continue
            assert all(self._blocks[block] is image for block in image.blocks), "something else lies there now"
            cells, states = self._images[image]
            self.cells[move.slot] = cells[: move.n_cells]
            assert len(set(move.rows.values())) == len(move.rows)
            self.rows.update({row: states[pos] for pos, row in move.rows.items()})

    def run(self, wave: Wave) -> None:
        for ubatch in wave.ubatches:
            first = 0
            for segment in ubatch.segments:
                ids = ubatch.ids[first : first + segment.n_tokens]
                cells = self.cells[segment.slot]
                assert len(cells) >= segment.first_pos
                cells[segment.first_pos :] = ids
                if segment.rows is not None:
                    before = self.rows[segment.rows.before] if segment.first_pos else ()
                    assert len(before) == segment.first_pos
                    self.rows[segment.rows.after] = before + ids
                    assert self.rows[segment.rows.after] == tuple(cells)
                first += segment.n_tokens


@st.composite
def traffic(draw: st.DrawFn) -> tuple[dict[str, object], int, list[tuple[list[int], int, bool]]]:
    sizes = draw(slot_sizes(n_ubatch=5, n_slots=3)) | {"n_states": draw(st.integers(0, 4))}
    head = st.sampled_from([[1] * 12, [2] * 15, [1] * 8 + [2] * 12])
    prompts = st.builds(lambda a, b: a + b, head, st.lists(st.integers(0, 1), min_size=1, max_size=14))
    request = st.tuples(prompts, st.integers(0, 6), st.booleans())
    return sizes, draw(st.integers(1, 9)), draw(st.lists(request, min_size=2, max_size=14))


@given(traffic())
@settings(deadline=None, max_examples=300)
def test_every_cell_is_that_of_the_sequences_own_tokens(case: tuple[dict[str, object], int, list]) -> None:
    sizes, n_blocks, waiting = case
    images = store(n_blocks)
    scheduler, device = Scheduler(**sizes, images=images), Device(int(sizes["n_slots"]))  # type: ignore[call-overload, arg-type]
    n_waves = 0
    while waiting or scheduler.has_work:
        if waiting and n_waves % 3 != 2:
            prompt, max_tokens, reuses = waiting.pop()
            params = SamplingParams(max_tokens=max_tokens)
            scheduler.add(Request(str(len(waiting)), tuple(prompt), params, reuses_cells=reuses))
        wave = scheduler.next_wave()
        device.move(scheduler.take_moves())
        if wave is None:
            n_waves += 1
            continue
        device.run(wave)
        for sequence in scheduler.sequences_in(wave):
            last = max(s.end_pos for u in wave.ubatches for s in u.segments if s.slot == sequence.slot)
            assert device.cells[sequence.slot or 0][:last] == sequence.ids[:last]
        n_waves += 1
        scheduler.commit(wave, dict.fromkeys(output_slots(wave), n_waves % 2))
    counts = scheduler.image_counts
    assert counts.n_blocks <= n_blocks
    assert counts.n_saved - counts.n_dropped == counts.n_images


SIZES = {"n_vocab": 100, "n_ctx_slot": 64, "n_slots": 2, "n_ubatch": 4, "n_wave": 64}


def serve(s: Scheduler, ids: list[int], slot: int | None = None) -> tuple[int | None, int]:
    """The slot a prompt got, and how many of its cells were there."""
    sequence = s.add(Request("a", tuple(ids), SamplingParams(max_tokens=1), slot=slot))
    while (wave := s.next_wave()) is not None:
        s.take_moves()
        used = sequence.slot
        s.commit(wave, dict.fromkeys(output_slots(wave), 9))
    return used, sequence.n_reused


@pytest.mark.parametrize(("reuse", "n"), [(PrefixReuse.ANY_POINT, 30), (PrefixReuse.WHOLE_UBATCHES, 28)])
def test_a_conversation_comes_back_after_others_took_its_slot(reuse: PrefixReuse, n: int) -> None:
    s = Scheduler(**SIZES, reuse=reuse, images=store(10))
    for i in range(4):
        assert serve(s, [i] * 30)[1] == 0
    assert s.image_counts.n_saved == 2
    assert serve(s, [0] * 40) == (0, n)
    assert s.image_counts.n_saved == 3, "what was in that slot"
    assert serve(s, [3] * 40) == (1, n), "this one is still in its slot"
    assert s.image_counts.n_loaded == 1
    assert s.image_counts.n_tokens_loaded == n


def test_states_beyond_what_is_loaded_are_not_taken_for_those_of_another_prompt() -> None:
    """The image has states at 8, 12 and 14; the second prompt shares 12 tokens and has its own at 14; the third goes on
    from there."""
    sizes = SIZES | {"n_slots": 1}
    s, device = Scheduler(**sizes, reuse=PrefixReuse.ANY_POINT, n_states=8, images=store(10)), Device(1)
    heads = [1] * 14, [2] * 20, [1] * 12 + [3] * 9, [1] * 12 + [3] * 4
    reused = []
    for head in heads:
        sequence = s.add(Request("a", tuple(head), SamplingParams(max_tokens=1)))
        while (wave := s.next_wave()) is not None:
            device.move(s.take_moves())
            device.run(wave)
            s.commit(wave, dict.fromkeys(output_slots(wave), 9))
        reused.append(sequence.n_reused)
    assert reused == [0, 0, 12, 12]


def test_an_image_ends_with_its_last_state() -> None:
    s = Scheduler(**SIZES | {"n_slots": 1}, reuse=PrefixReuse.WHOLE_UBATCHES, n_states=1, images=store(10))
    serve(s, [1] * 14)
    serve(s, [2] * 14)
    assert s.image_counts.n_saved == 0, "the one state is that of the end, and the cells are cut before it"
    s = Scheduler(**SIZES | {"n_slots": 1}, reuse=PrefixReuse.ANY_POINT, n_states=1, images=store(10))
    serve(s, [1] * 14)
    serve(s, [2] * 14)
    assert serve(s, [1] * 20)[1] == 14


def test_what_a_prompt_leaves_most_of_is_not_saved() -> None:
    s = Scheduler(**SIZES, reuse=PrefixReuse.ANY_POINT, images=store(10))
    serve(s, [1] * 30)
    assert serve(s, [1] * 20 + [2] * 10) == (0, 20)
    assert s.image_counts.n_saved == 0
    assert serve(s, [1] * 9 + [3] * 21) == (0, 9)
    assert s.image_counts.n_saved == 1


def test_a_slot_with_as_much_is_taken_before_an_image() -> None:
    s = Scheduler(**SIZES, reuse=PrefixReuse.ANY_POINT, images=store(10))
    for i in range(3):
        serve(s, [i] * 30)
    assert serve(s, [0] * 40, slot=0) == (0, 30)
    assert serve(s, [0] * 40) == (0, 39)
    assert s.image_counts.n_loaded == 1


def test_requests_that_reuse_nothing_load_nothing_but_save_what_they_overwrite() -> None:
    s = Scheduler(**SIZES | {"n_slots": 1}, reuse=PrefixReuse.ANY_POINT, images=store(10))
    serve(s, [1] * 30)
    sequence = s.add(Request("b", (2,) * 30, SamplingParams(max_tokens=0), reuses_cells=False))
    assert s.next_wave() is not None
    assert sequence.n_reused == 0
    assert [type(move) for move in s.take_moves()] == [Save]
