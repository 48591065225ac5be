"""Routing by chance, for measuring: tokens get experts that are drawn from a distribution, not chosen by the router.

How fast decoding is with experts in host RAM depends on which experts tokens name, and random weights route as no
trained model does. The router runs as ever, and what it says of the mixture counts; only its choice is replaced, by a
row of a table on the device that the token's id names. So prompts, steps and recordings all have it, and equal tokens
have equal experts, however they are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch

from overspill.errors import UserError
from overspill.models.base import Block, HParams, Model, Routing, UbatchView

_N_TABLES = 8  # layer i has that of i modulo this
_N_ROWS = 4096

MakeModel = Callable[[HParams, Block, Sequence[Block], Block], Model]


def exponent_of(routing: str) -> float:
    """S of `uniform` (0) or `zipf:S`: the expert of rank r is drawn with a weight of r to the power of -S."""
    return 0.0 if routing == "uniform" else float(routing.removeprefix("zipf:"))


def draw(n_rows: int, n_expert: int, n_used: int, exponent: float, seed: int) -> torch.Tensor:
    """Rows of distinct experts, each drawn from those left; int32 `[n_rows, n_used]`. Chance deals out the ranks."""
    random = np.random.default_rng(seed)
    logs = random.permutation(-exponent * np.log(np.arange(1, n_expert + 1)))
    keys = logs + random.gumbel(size=(n_rows, n_expert))
    return torch.from_numpy(np.argsort(-keys, 1)[:, :n_used].astype(np.int32))


class _Tables:
    """Experts by token, on whatever devices ask."""

    def __init__(self, hp: HParams, exponent: float) -> None:
        rows = torch.from_numpy(np.random.default_rng(0).integers(0, _N_ROWS, hp.n_vocab))
        sizes = (_N_ROWS, hp.n_expert, hp.n_expert_used, exponent)
        self._of_tokens = torch.stack([draw(*sizes, seed=i)[rows] for i in range(_N_TABLES)])
        self._there: dict[torch.device, torch.Tensor] = {}
        self._of_steps: WeakKeyDictionary[UbatchView, torch.Tensor] = WeakKeyDictionary()

    def ids(self, i_layer: int, view: UbatchView) -> torch.Tensor:
        """Experts of tokens, int32 `[T, K]`.

        A step looks up those of all layers at once, since it is not to be measured by what no model does. Prompts may
        not: their views outlive their tokens.
        """
        table, tokens = i_layer % _N_TABLES, view.ids
        if tokens.device not in self._there:
            self._there[tokens.device] = self._of_tokens.to(tokens.device)
        there = self._there[tokens.device]
        if view.steps is None:
            return there[table].index_select(0, tokens)
        if view not in self._of_steps:
            self._of_steps[view] = there.index_select(1, tokens)
        return self._of_steps[view][table]


def routed_by(make: MakeModel, routing: str) -> MakeModel:
    """Models of that kind, routed as `Options.routing` says."""
    if routing == "model":
        return make

    def made(hparams: HParams, embedding: Block, blocks: Sequence[Block], head: Block) -> Model:
        if not hparams.n_expert:
            raise UserError(f"--routing {routing}: the model has no experts; leave it out")
        model = make(hparams, embedding, blocks, head)
        tables, route = _Tables(hparams, exponent_of(routing)), model.route

        def drawn(i_layer: int, x: torch.Tensor, view: UbatchView) -> Routing | None:
            found = route(i_layer, x, view)
            return None if found is None else found._replace(ids=tables.ids(i_layer, view))

        model.route = drawn  # type: ignore[method-assign]
        return model

    return made
