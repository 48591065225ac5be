"""One token through layers that are one call: the bits of layer after layer, and only where a layer is nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from overspill.cache.cells import CellType, Segment
from overspill.cache.kv import KvCache
from overspill.kernels import Ops, TokenEnds, TokenLayer, TokenLayers, cpu
from overspill.models.base import Model, UbatchView, forward_layer
from tests.helpers.plain import new_caches, plain_model
from tests.models.fixtures import MODELS, Case

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def view(i: int) -> UbatchView:
    return UbatchView((Segment(0, i, 1),), torch.tensor([i], dtype=torch.int32), torch.tensor([IDS[i]]))


def embedded(model: Model, i: int) -> torch.Tensor:
    before = torch.zeros(1, model.hparams.n_before, dtype=torch.int32)
    return model.embed(torch.tensor([IDS[i]]), before)


def one_by_one(model: Model, i: int, caches: Sequence[KvCache]) -> torch.Tensor:
    x, seen = embedded(model, i), view(i)
    for i_layer, cache in enumerate(caches):
        x = forward_layer(model, i_layer, x, cache, seen)
    return x


@pytest.mark.parametrize("cells", [CellType.F32, CellType.F16], ids=str)
@pytest.mark.parametrize("case", MODELS, ids=str)
def test_layers_together_have_the_bits_of_layers_one_by_one(case: Case, cells: CellType) -> None:
    model = plain_model(case.source, cpu.OPS)
    ours, theirs = (new_caches(model, len(IDS), cells=cells) for _ in range(2))
    for i in range(len(IDS)):
        assert torch.equal(model.layers(0, embedded(model, i), ours, view(i)), one_by_one(model, i, theirs))


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_a_token_in_one_call_has_the_logits_of_layers_one_by_one(case: Case) -> None:
    model = plain_model(case.source, cpu.OPS)
    ours, theirs = (new_caches(model, len(IDS)) for _ in range(2))
    for i, token in enumerate(IDS):
        found = model.token_logits(token, Segment(0, i, 1), ours)
        if found is None:
            assert case.name not in ("qwen3moe", "mixtral")
            return
        assert torch.equal(found, model.output(one_by_one(model, i, theirs)))


class Spy:
    """Counts calls by how many layers they are of."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.ops: Ops = replace(cpu.OPS, token_layers=self.make)

    def make(self, layers: Sequence[TokenLayer], ends: TokenEnds | None) -> TokenLayers | None:
        call = cpu.token_layers(layers, ends)
        assert call is not None

        def counted(*args: object) -> torch.Tensor:
            self.calls.append(len(layers))
            return call(*args)

        return counted


def plain_case() -> Case:
    return next(case for case in MODELS if case.name == "qwen3moe")


def test_layers_that_follow_each_other_are_one_call() -> None:
    spy = Spy()
    model = plain_model(plain_case().source, spy.ops)
    caches, n_layer = new_caches(model, len(IDS)), model.hparams.n_layer
    model.layers(0, embedded(model, 0), caches, view(0))
    model.layers(1, embedded(model, 0), caches[1:], view(0))
    assert spy.calls == [n_layer, n_layer - 1]


def test_a_model_is_one_call_unless_its_head_was_replaced() -> None:
    spy = Spy()
    model = plain_model(plain_case().source, spy.ops)
    caches = new_caches(model, len(IDS))
    assert model.token_logits(3, Segment(0, 0, 1), caches) is not None
    assert spy.calls == [model.hparams.n_layer]
    other = plain_model(plain_case().source, spy.ops)
    other.output = lambda x: x
    assert other.token_logits(3, Segment(0, 0, 1), caches) is None


def test_a_part_that_was_replaced_is_asked() -> None:
    """Bench replaces `route`, for one."""
    spy = Spy()
    model = plain_model(plain_case().source, spy.ops)
    route, asked = model.route, []

    def replaced(i_layer: int, x: torch.Tensor, seen: UbatchView):
        asked.append(i_layer)
        return route(i_layer, x, seen)

    model.route = replaced
    model.layers(0, embedded(model, 0), new_caches(model, len(IDS)), view(0))
    assert asked == list(range(model.hparams.n_layer))
    assert spy.calls == [1] * model.hparams.n_layer
