"""Every architecture against two oracles: transformers and llama.cpp, on models made by llama.cpp's converter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overspill.cache.cells import Segment
from overspill.kernels import cpu
from overspill.models.base import Model
from overspill.pipeline.wave import Ubatch, Wave
from tests.helpers.plain import Plain, plain_logits, plain_model
from tests.helpers.reference import Reference
from tests.models.fixtures import MODELS, Case

ORACLES = ("hf", "llamacpp")


@pytest.mark.parametrize("n_ubatch", [1000, 16])
@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_logits(case: Case, prompt: int, n_ubatch: int) -> None:
    logits = plain_logits(case.model, case.expected(f"input_ids_{prompt}"), n_ubatch).numpy()
    for oracle in ORACLES:
        expected = case.expected(f"{oracle}_logits_{prompt}")
        np.testing.assert_allclose(logits, expected, rtol=0, atol=case.tolerance(oracle))


@pytest.mark.parametrize("n_ubatch", [1, 3, 64, 133])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_any_ubatch_size(case: Case, n_ubatch: int) -> None:
    logits = plain_logits(case.model, case.expected("input_ids_1"), n_ubatch).numpy()
    for oracle in ORACLES:
        np.testing.assert_allclose(logits, case.expected(f"{oracle}_logits_1"), rtol=0, atol=case.tolerance(oracle))


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_cpu_kernels(case: Case) -> None:
    logits = plain_logits(plain_model(case.source, cpu.OPS), case.expected("input_ids_0"), 16).numpy()
    for oracle in ORACLES:
        np.testing.assert_allclose(logits, case.expected(f"{oracle}_logits_0"), rtol=0, atol=case.tolerance(oracle))


@pytest.mark.parametrize("prompt", [0, 1, 2])
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_greedy_tokens(case: Case, prompt: int) -> None:
    expected = [case.expected(f"{oracle}_greedy_{prompt}").tolist() for oracle in ORACLES]
    assert [_greedy(case.model, case.expected(f"input_ids_{prompt}").tolist(), len(expected[0]))] * 2 == expected


def _greedy(model: Model, ids: list[int], n: int) -> list[int]:
    """`n` tokens after a prompt, one at a time, on the cache of those before."""
    plain, tokens, piece = Plain(model, len(ids) + n), [], ids
    for _ in range(n):
        tokens.append(int(plain(piece)[-1].argmax()))
        piece = tokens[-1:]
    return tokens


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_two_sequences_in_the_same_ubatches(case: Case) -> None:
    """Prompts 0 and 1, so many tokens of each at a time, in slots 1 and 0."""
    prompts = [case.expected(f"input_ids_{i}").tolist() for i in range(2)]
    reference, logits, done = Reference(case.model, n_slots=2, n_cells=133), [[], []], [0, 0]
    for sizes in ((1, 50), (10, 3), (7, 64), (22, 1), (0, 15)):
        segments, ids = [], []
        for i, n in enumerate(sizes):
            segments += [Segment(1 - i, done[i], n)] if n else []
            ids += prompts[i][done[i] : done[i] + n]
            done[i] += n
        (rows,) = reference.run(Wave((Ubatch(tuple(ids), tuple(segments), tuple(range(len(ids)))),)))
        for part, piece in zip(logits, rows.split(sizes), strict=True):
            part.append(piece)
    for i, parts in enumerate(logits):
        expected = case.expected(f"llamacpp_logits_{i}")
        np.testing.assert_allclose(torch.cat(parts).numpy(), expected, rtol=0, atol=case.tolerance("llamacpp"))
