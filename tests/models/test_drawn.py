"""Routing by chance: the distribution asked for, and the same experts for a token in whatever batch."""

from __future__ import annotations

import pytest
import torch

from overspill import LLM
from overspill.errors import UserError
from overspill.models.drawn import draw
from overspill.options import options_from
from overspill.pipeline.wave import Segment, Ubatch, Wave
from tests.helpers.tiny_moe import tiny_source


def shares(exponent: float) -> torch.Tensor:
    """Of 8 experts, how often each is drawn as the first, most often first."""
    rows = draw(20000, 8, 3, exponent, seed=5)
    assert all(len(set(row)) == 3 for row in rows[:200].tolist())
    return torch.bincount(rows[:, 0].long(), minlength=8).sort(descending=True).values / len(rows)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_experts_are_drawn_as_often_as_the_law_says(exponent: float) -> None:
    weights = torch.arange(1, 9, dtype=torch.float64) ** -exponent
    torch.testing.assert_close(shares(exponent).double(), weights / weights.sum(), rtol=0, atol=0.015)


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.2"])
def test_a_token_has_the_same_experts_in_any_batch(routing: str) -> None:
    ids = [5, 9, 30, 17, 2, 8, 8, 21]
    logits = []
    for n_ubatch in (8, 1):
        with LLM(tiny_source(), devices="virtual:2", cpu_moe=True, n_ctx=16, n_ubatch=n_ubatch, routing=routing) as llm:
            logits.append(llm.logits(ids))
            steps = [llm.run_wave(Wave((Ubatch((t,), (Segment(0, i, 1),), (0,)),)))[0] for i, t in enumerate(ids)]
            logits.append(torch.cat(steps))
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-4, atol=1e-4)
    with LLM(tiny_source(), devices="none", n_ctx=16) as llm:
        assert not torch.allclose(llm.logits(ids), logits[0], atol=1e-2)


@pytest.mark.parametrize("routing", ["some", "zipf", "zipf:", "zipf:-1", "zipf:inf", "zipf:a"])
def test_laws_that_do_not_exist(routing: str) -> None:
    with pytest.raises(UserError, match=f"--routing {routing}"):
        options_from({"routing": routing})
