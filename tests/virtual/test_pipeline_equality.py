"""The heart: whatever the plan and whatever the timing, logits are those of the plain model, bit for bit.

Cases cover every pair of values of their options; each is run under every order and policy and 20 seeds of random
delays. Before each run all memory is poisoned, so that nothing is right because an earlier run was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from unittest.mock import patch

import pytest
import torch

from overspill.gguf import TensorType, open_gguf
from overspill.kernels import ref
from overspill.models.base import Model
from overspill.pipeline.schedule import Order, Policy
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor
from tests.helpers import pipe as helper
from tests.helpers.covering import covering, pairs_of
from tests.helpers.pipe import (
    EXACT_POLICIES,
    OPS,
    ORDERS_AND_POLICIES,
    Pipe,
    Shape,
    cut_waves,
    pipe,
    rare_delays,
    run_all,
)
from tests.helpers.plain import DATA, plain_model
from tests.helpers.reference import reference_logits
from tests.helpers.tiny_moe import N_EXPERT, N_LAYER, N_VOCAB, tiny_model, tiny_source

N_SEEDS = 20
DELAYED_SHARE = 0.12
CUTS = {"equal": (2, 2, 2), "ragged": (2, 1, 3), "last-of-one": (2, 1), "all-of-one": (1, 1, 1)}
HOMES = {
    "all": Shape(1),
    "none": Shape(1, host_layers="none"),
    "odd": Shape(1, host_layers="odd"),
    "even": Shape(1, host_layers="even"),
    "layers-on-cpu": Shape(1, n_layers_on_cpu=2),
    "mixed": Shape(1, mixed_layers="even"),
}
OPTIONS: dict[str, tuple[int | str, ...]] = {
    "n_devices": (1, 2, 3, 4),
    "grain": (1, 2, "L/N"),
    "cuts": tuple(CUTS),
    "n_staging": (2, 3),
    "slab_experts": (1, 3, N_EXPERT),
    "homes": tuple(HOMES),
    "n_waves": (1, 2, 3),
    "max_in_flight": (1, 2, 7, 64),
    "embeds": ("host", "device"),
    "slabs": ("blocks", "widened"),
}


@dataclass(frozen=True)
class Case:
    """One value of each option."""

    n_devices: int
    grain: int | str
    cuts: str
    n_staging: int
    slab_experts: int
    homes: str
    n_waves: int
    max_in_flight: int
    embeds: str
    slabs: str

    def __str__(self) -> str:
        return (
            f"{self.n_devices}dev-grain{self.grain}-{self.cuts}-staging{self.n_staging}-slab{self.slab_experts}-"
            f"{self.homes}-{self.n_waves}wave-flight{self.max_in_flight}-embed-on-{self.embeds}-{self.slabs}"
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        return CUTS[self.cuts]

    @property
    def shape(self) -> Shape:
        grain = max(1, N_LAYER // self.n_devices) if self.grain == "L/N" else int(self.grain)
        return replace(
            HOMES[self.homes],
            n_devices=self.n_devices,
            grain=grain,
            slab_experts=self.slab_experts,
            n_staging=self.n_staging,
            embeds=self.embeds == "device",
            widens=self.slabs == "widened",
        )

    def schedules(self) -> list[tuple[Order, Policy]]:
        """Without host experts the policies are the same."""
        return [(o, p) for o, p in ORDERS_AND_POLICIES if self.homes != "none" or p is Policy.ALL]

    def open(self) -> AbstractContextManager[Pipe]:
        n_tokens = sum(self.sizes)
        return pipe(
            tiny_source(),
            self.shape,
            n_ubatch=max(self.sizes),
            n_ubatches=len(self.sizes),
            n_cells=n_tokens,
            max_in_flight=self.max_in_flight,
        )


CASES = [Case(*row) for row in covering(list(OPTIONS.values()), seed=11)]


DTYPES = {TensorType.F32: torch.float32, TensorType.BF16: torch.bfloat16}


def quick_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Keeps values in bounds, as a norm does."""
    return x.tanh() * weight


def quick_dequantize(weight: QTensor) -> torch.Tensor:
    """Plain weights copied without going through blocks."""
    return weight.data.clone().view(DTYPES[weight.type]).float()


QUICK_OPS = replace(OPS, rms_norm=quick_norm)


@cache
def quick_model() -> Model:
    return plain_model(tiny_source(), QUICK_OPS)


@pytest.fixture
def _quick_kernels() -> Iterator[None]:
    """What costs the reference kernels most of their time has nothing to do with the order of work."""
    with patch.object(ref, "dequantize", quick_dequantize), patch.object(helper, "OPS", QUICK_OPS):
        yield


@pytest.mark.parametrize("type", DTYPES)
def test_quick_dequantize(type: TensorType) -> None:
    some = QTensor.from_bytes(torch.arange(12 * DTYPES[type].itemsize, dtype=torch.uint8), type, (3, 4))
    assert torch.equal(quick_dequantize(some), dequantize(some))


def test_cases_cover_all_pairs_and_are_at_least_200() -> None:
    covered = set().union(*(pairs_of(tuple(vars(case).values())) for case in CASES))
    values = list(OPTIONS.values())
    wanted = {(i, a, j, b) for i, j in combinations(range(len(values)), 2) for a in values[i] for b in values[j]}
    assert covered == wanted
    assert sum(len(case.schedules()) for case in CASES) >= 200


@pytest.mark.usefixtures("_quick_kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_are_those_of_the_plain_model(case: Case) -> None:
    ids = [(7 * i + 3) % N_VOCAB for i in range(sum(case.sizes))]
    expected = reference_logits(quick_model(), cut_waves(ids, case.sizes, case.n_waves), n_cells=len(ids))
    wrong = []
    with case.open() as p:
        for seed, (order, policy) in product(range(N_SEEDS), case.schedules()):
            p.poison()
            with rare_delays(seed, share=DELAYED_SHARE):
                logits = run_all(p, ids, case.sizes, p.schedule(order, policy), case.n_waves)
            if not torch.equal(logits, expected):
                wrong.append(f"seed {seed}, {order}, {policy}: {_first_difference(logits, expected)}")
    assert wrong == []


def _first_difference(logits: torch.Tensor, expected: torch.Tensor) -> str:
    row = int((logits != expected).any(-1).nonzero()[0])
    return f"row {row} differs by {(logits - expected)[row].abs().max():.3g}"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3moe", Shape(3, grain=1, slab_experts=3)),
        ("mixtral", Shape(2, grain=2, slab_experts=8, host_layers="odd", n_staging=3)),
        ("qwen3", Shape(2, grain=1)),
        ("llama", Shape(2, grain=2, n_layers_on_cpu=1)),
    ],
)
def test_fixture_models(name: str, shape: Shape, seed: int) -> None:
    """Models of real architectures and longer delays; two of them have no experts."""
    source = open_gguf(DATA / "models" / f"{name}.gguf")
    ids, sizes = [(11 * i + 5) % 500 for i in range(19)], (8, 8, 3)
    model = plain_model(source)
    expected = reference_logits(model, cut_waves(ids, sizes, 1), n_cells=len(ids))
    policies = EXACT_POLICIES if model.hparams.n_expert else [Policy.ALL]
    with pipe(source, shape, n_ubatch=8, n_ubatches=3, n_cells=len(ids), chaos_seed=seed) as p:
        for order, policy in ((o, q) for o in Order for q in policies):
            p.poison()
            logits = run_all(p, ids, sizes, p.schedule(order, policy), 1)
            assert torch.equal(logits, expected), (order, policy)


def test_everything_on_the_cpu() -> None:
    """No accelerator at all: the same schedules on streams that compute in place."""
    ids, sizes = [(7 * i + 3) % N_VOCAB for i in range(7)], (3, 3, 1)
    expected = reference_logits(tiny_model(), cut_waves(ids, sizes, 1), n_cells=len(ids))
    with pipe(tiny_source(), Shape(0), n_ubatch=3, n_ubatches=3, n_cells=len(ids)) as p:
        for order, policy in ORDERS_AND_POLICIES:
            p.poison()
            assert torch.equal(run_all(p, ids, sizes, p.schedule(order, policy), 1), expected)
        assert p.devices.host.counters.uploaded_bytes == 0
