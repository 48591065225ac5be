"""Recurrent layers in the pipeline: sequences of unequal length together, states that are kept, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from overspill.cache.cells import StateRows
from overspill.pipeline.schedule import Order, Policy
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.helpers.pipe import Pipe, Shape, cut_wave, pipe, rare_delays, run_all
from tests.helpers.reference import Reference, reference_logits
from tests.models.fixtures import Case

HYBRIDS = [Case("qwen35"), Case("qwen3next-mtp"), Case("kimi_linear"), Case("deepseek_v4"), Case("qwen4_exp")]
CLOSE = 2e-4


@contextmanager
def opened(case: Case, *, n_ubatch: int, n_ubatches: int, n_cells: int, n_slots: int = 1) -> Iterator[Pipe]:
    hp = case.model.hparams
    moe = frozenset(i for i in range(hp.n_layer) if hp.is_moe(i))
    shape = Shape(3, grain=1, slab_experts=3, host_layers=moe)
    with pipe(
        case.source, shape, n_ubatch=n_ubatch, n_ubatches=n_ubatches, n_cells=n_cells, n_slots=n_slots, n_states=3
    ) as p:
        yield p


def prompt(case: Case, n: int, first: int = 0) -> list[int]:
    return [int(i) for i in case.expected("input_ids_1")[first : first + n]]


def ubatch(*pieces: tuple[Sequence[int], Segment]) -> Ubatch:
    """Pieces of sequences in one ubatch, all rows wanted."""
    ids = tuple(i for tokens, s in pieces for i in tokens[s.first_pos : s.end_pos])
    return Ubatch(ids, tuple(s for _, s in pieces), tuple(range(len(ids))))


@pytest.mark.parametrize("case", HYBRIDS, ids=str)
def test_sequences_of_unequal_length_and_their_decoding(case: Case) -> None:
    """Bit for bit the plain model, and close to each sequence alone; prompts shorter than the convolution too."""
    a, b, c = prompt(case, 12), prompt(case, 75, 20), prompt(case, 12, 100)
    waves = [
        Wave((ubatch((a, Segment(2, 0, 5)), (b, Segment(0, 0, 70))), ubatch((c, Segment(1, 0, 2))))),
        Wave((ubatch((a, Segment(2, 5, 1)), (b, Segment(0, 70, 1)), (c, Segment(1, 2, 1))),)),
        Wave((ubatch((c, Segment(1, 3, 1)), (a, Segment(2, 6, 1))), ubatch((b, Segment(0, 71, 3))))),
    ]
    reference = Reference(case.model, n_slots=3, n_cells=80)
    expected = [rows for wave in waves for rows in reference.run(wave)]
    with opened(case, n_ubatch=80, n_ubatches=2, n_cells=80, n_slots=3) as p:
        for policy in (Policy.ALL, Policy.CPU) if case.model.hparams.n_expert else (Policy.ALL,):
            p.poison()
            with rare_delays(3):
                results = [x for w in waves for x in p.runner.run(w, p.schedule(Order.BREADTH_FIRST, policy))]
            assert all(torch.equal(x, y) for x, y in zip(results, expected, strict=True)), policy
    alone = reference_logits(case.model, [cut_wave(a, (7,))], n_cells=8)
    rows_a = torch.cat([expected[0][:5], expected[2][:1], expected[3][1:]])
    torch.testing.assert_close(rows_a, alone, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("n_ubatch", [1, 3, 16, 63, 64, 65, 100, 133])
@pytest.mark.parametrize("case", HYBRIDS, ids=str)
def test_any_ubatch_size_on_three_devices(case: Case, n_ubatch: int) -> None:
    n = 133 if n_ubatch > 3 else 21
    ids, sizes = prompt(case, n), [min(n_ubatch, n - i) for i in range(0, n, n_ubatch)]
    with opened(case, n_ubatch=n_ubatch, n_ubatches=len(sizes), n_cells=n) as p:
        p.poison()
        logits = run_all(p, ids, sizes, p.schedule(Order.BREADTH_FIRST), 1)
    assert torch.equal(logits, reference_logits(case.model, [cut_wave(ids, sizes)], n_cells=n))
    torch.testing.assert_close(logits, torch.from_numpy(case.expected("llamacpp_logits_1")[:n]), rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", [*HYBRIDS, Case("qwen35moe")], ids=str)
def test_a_sequence_goes_on_from_a_kept_state_and_from_no_other(case: Case) -> None:
    """A second prompt with the same first 32 tokens, on the row where the state after them was left."""
    first, second = prompt(case, 48), prompt(case, 32) + prompt(case, 16, 80)
    expected = [reference_logits(case.model, [cut_wave(ids, (16,) * 3)], n_cells=48) for ids in (first, second)]

    def wave(ids: Sequence[int], *steps: tuple[int, StateRows]) -> Wave:
        return Wave(tuple(ubatch((ids, Segment(0, pos, 16, rows))) for pos, rows in steps))

    with opened(case, n_ubatch=16, n_ubatches=3, n_cells=48) as p:
        schedule = p.schedule(Order.BREADTH_FIRST)
        p.poison()
        steps = (0, StateRows(0, 0)), (16, StateRows(0, 1)), (32, StateRows(1, 2))
        assert torch.equal(torch.cat(p.runner.run(wave(first, *steps), schedule)), expected[0])
        for row in (0, 2):
            with pytest.raises(RuntimeError, match=rf"goes on at position 32, but row {row} of its states stands at"):
                p.runner.run(wave(second, (32, StateRows(row, 2))), schedule)
        again = torch.cat(p.runner.run(wave(second, (32, StateRows(1, 2))), schedule))
        assert torch.equal(again, expected[1][32:])
        assert torch.equal(torch.cat(p.runner.run(wave(first, (32, StateRows(1, 0))), schedule)), expected[0][32:])
