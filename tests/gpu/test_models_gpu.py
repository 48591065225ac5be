"""Every model fixture on GPUs: near the CPU's float32, the same bits replayed as issued, and on two GPUs as on one.

In float32 the GPU's kernels must be as near to the reference as the CPU's. In bfloat16, as the engine runs, models of
random weights are not near it: a router's near-tie that falls the other way changes what follows. So what rounding
alone costs is computed on the CPU, and the GPU may not lose more than about that.

Loading takes most of the time, so a test looks at all that one loaded model can show. Several processes may share the
GPUs: `pytest -n 8`. Numbers are kept as properties of the tests (`--junitxml`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from overspill import LLM
from overspill.gguf import open_gguf
from overspill.models.base import Model
from overspill.pipeline.memory import Precision
from tests.helpers.decoding import N_CELLS, N_SLOTS, N_UBATCH, decoded
from tests.helpers.plain import SHARED, plain_logits, plain_model
from tests.helpers.recorded import issuing
from tests.helpers.reference import Reference
from tests.helpers.rounded import BF16_OPS, rounded_experts
from tests.models.fixtures import MODELS, Case, fixture

ONE, TWO = "cuda:0", "cuda:0,cuda:1"
QUANTS = sorted(path for path in (SHARED / "quants").glob("*.gguf"))
SPREAD = ["gpt-oss", "deepseek_v3", "qwen3next-mtp", "kimi_linear", "deepseek_v4", "qwen4_exp"]
NEAR = 1e-3
SLACK = 3.0
"""How much more than rounding alone the GPU may lose: it rounds in other places, and other near-ties fall."""

Note = Callable[[str, object], None]

needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def opened(path: Path, devices: str, **options: object) -> LLM:
    sizes = {"n_ctx": N_SLOTS * N_CELLS, "n_parallel": N_SLOTS, "n_ubatch": N_UBATCH, "n_wave": 2 * N_CELLS}
    return LLM(path, devices=devices, schedule="breadth-first", grain=1, **sizes, **options)


@contextmanager
def in_float32() -> Iterator[None]:
    """Models that are loaded meanwhile compute and keep everything in float32."""
    from overspill.kernels.triton import make_ops

    with (
        patch("overspill.kernels.triton.make_ops", partial(make_ops, dtype=torch.float32)),
        patch("overspill.llm.precision_on", lambda machine, options: Precision()),
        patch("overspill.llm.widens_dense", lambda machine, source, specs: False),
    ):
        yield


@contextmanager
def issued() -> Iterator[None]:
    """What is recorded meanwhile is issued kernel by kernel, each time; for models that are opened meanwhile."""
    from overspill.device.cuda import CudaDevice, CudaStream

    with issuing(CudaDevice, CudaStream):
        yield


def replayed(llm: LLM, case: Case) -> torch.Tensor:
    """Logits of steps by recordings made anew."""
    assert llm.runner._steps is not None
    llm.runner._steps._programs.clear()
    llm.short_prompts.forget()
    return decoded(llm.run_wave, case)


def expected(case: Case, model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the prompt, and of the steps, by the plain model."""
    prompt = plain_logits(model, case.expected("input_ids_1").tolist(), N_UBATCH)
    return prompt, decoded(Reference(model, n_slots=N_SLOTS, n_cells=N_CELLS).run, case)


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL of each position, nats."""
    p, q = F.log_softmax(wanted, -1), F.log_softmax(found, -1)
    return (p.exp() * (p - q)).sum(-1)


def check_exact(wanted: torch.Tensor, found: torch.Tensor, limit: float) -> None:
    """Within the fixture's tolerance; so is the first choice, where the second is not as near."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    assert float(divergence(wanted, found).max()) <= NEAR
    first, second = wanted.topk(2, -1).values.unbind(-1)
    assert (found.argmax(-1) == wanted.argmax(-1))[first - second > 2 * limit].all()


def check_rounded(name: str, wanted: torch.Tensor, found: torch.Tensor, rounded: torch.Tensor, note: Note) -> None:
    """As near as bfloat16 lets it be."""
    assert found.isfinite().all()
    lost, usual = divergence(wanted, found), divergence(wanted, rounded)
    first, second = wanted.topk(2, -1).values.unbind(-1)

    def n_missed(x: torch.Tensor, other: torch.Tensor) -> int:
        """Where the other's error is less than what parts the first from the second: others are near-ties."""
        is_clear = first - second > (other - wanted).abs().amax(-1)
        return int((is_clear & (x.argmax(-1) != wanted.argmax(-1))).sum())

    # Each is judged by the other's error: by its own it would miss none.
    misses = [n_missed(found, rounded), n_missed(rounded, found)]
    for key, kl, n in (("gpu", lost, misses[0]), ("rounding", usual, misses[1])):
        median, mean = float(kl.median()), float(kl.mean())
        note(f"{name} {key}", f"KL median {median:.1e} mean {mean:.1e}, {n} of {len(kl)} missed")
    assert float(lost.median()) <= max(NEAR, SLACK * float(usual.median()))
    # What a router's near-tie has changed stays in the states of recurrent layers: misses come in rows.
    assert misses[0] <= SLACK * misses[1] + max(3, len(wanted) // 16)


# --- tests


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_float32(case: Case, record_property: Note) -> None:
    """A prompt, and recorded steps: the logits of the CPU."""
    wanted = expected(case, case.model)
    with in_float32(), opened(fixture(f"{case.name}.gguf"), ONE, record_prompts="on") as llm:
        prompt = case.expected("input_ids_1").tolist()
        found = llm.logits(prompt), replayed(llm, case)
        for how in ("recorded", "replayed"):
            assert torch.equal(llm.logits(prompt), found[0]), how
    for name, a, b in zip(("prompt", "steps"), wanted, found, strict=True):
        record_property(f"{name} max", f"{float((a - b).abs().max()):.1e}")
    for a, b in zip(wanted, found, strict=True):
        check_exact(a, b, 5 * case.hf)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_bfloat16(case: Case, record_property: Note) -> None:
    """Near the CPU; the same bits replayed and issued, and on two GPUs."""
    ids, path = case.expected("input_ids_1").tolist(), fixture(f"{case.name}.gguf")
    with opened(path, ONE) as llm:
        prompt, steps = llm.logits(ids), replayed(llm, case)
    with issued(), opened(path, ONE) as llm:
        again = replayed(llm, case)
    with rounded_experts():
        rounded = expected(case, plain_model(case.source, BF16_OPS))
    for name, *rows in zip(("prompt", "steps"), expected(case, case.model), (prompt, steps), rounded, strict=True):
        check_rounded(name, *rows, record_property)
    assert torch.equal(steps, again), "replayed steps are not those that are issued"
    if torch.cuda.device_count() > 1:
        with opened(path, TWO) as llm:
            assert torch.equal(llm.logits(ids), prompt), "two GPUs do not give the bits of one"
            assert torch.equal(replayed(llm, case), steps), "two GPUs do not give the steps of one"


@needs_two
@pytest.mark.parametrize("name", SPREAD)
def test_spread_experts(name: str, record_property: Note) -> None:
    """Experts in host RAM, those of steps shared out among both GPUs and the CPU."""
    case = next(case for case in MODELS if case.name == name)
    with opened(fixture(f"{name}.gguf"), TWO, cpu_moe=True, policy="spread") as llm:
        assert llm.plan.n_spread_tokens >= N_SLOTS
        found = replayed(llm, case)
    with rounded_experts():
        _, rounded = expected(case, plain_model(case.source, BF16_OPS))
    check_rounded("steps", expected(case, case.model)[1], found, rounded, record_property)


@pytest.mark.parametrize("path", QUANTS or [None], ids=lambda path: "none" if path is None else path.stem)
def test_quantised_files(path: Path | None, record_property: Note) -> None:
    """Experts on the GPU, and in host RAM: what the CPU computes, in float32, and in bfloat16 as near as that is."""
    if path is None:
        pytest.skip(f"there is no {SHARED}/quants")
    ids = [(37 * i + 11) % 500 for i in range(80)]
    wanted = plain_logits(plain_model(open_gguf(path)), ids, N_UBATCH)
    with rounded_experts():
        rounded = plain_logits(plain_model(open_gguf(path), BF16_OPS), ids, N_UBATCH)
    with in_float32(), opened(path, ONE) as llm:
        check_exact(wanted, llm.logits(ids), 1e-3)
    for name, options in (("resident", {}), ("host", {"cpu_moe": True, "policy": "all"})):
        with opened(path, ONE, **options) as llm:
            check_rounded(name, wanted, llm.logits(ids), rounded, record_property)
