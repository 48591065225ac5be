"""A trained model on a text it has not seen: loss, likeliest tokens and routing as transformers computes them."""

from __future__ import annotations

import json
import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from overspill.gguf import open_gguf
from overspill.kernels import cpu
from overspill.llm import LLM
from overspill.models.base import Routing
from tests.helpers.cli import main
from tests.helpers.plain import SHARED, plain_logits, plain_model

FOLDER = SHARED / "trained"
MODEL, TEXT = FOLDER / "tinycode-moe-Q4_0.gguf", FOLDER / "tinycode-moe.txt"
N_TOKENS = 640
# Both compute in float32 with dequantised weights and add in another order. Logits reach 30, six layers deep: 1e-4 is
# some fifty units in their last place, and was measured as 4e-5. A loss moves by at most twice the largest error.
LOGIT_TOLERANCE = 1e-4
NLL_TOLERANCE = 2 * LOGIT_TOLERANCE
# Every layer computes on a device, and most of the experts find no room there.
SMALL: dict[str, Any] = {
    "devices": "virtual:2",
    "device_memory": "18MiB",
    "n_gpu_layers": "all",
    "n_ubatch": 128,
    "n_wave": 320,
}

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason="the trained model is not here: 30 MB, not in the project")


@pytest.fixture(scope="module")
def oracle() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "tinycode-moe-Q4_0.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def plain(oracle: dict[str, np.ndarray]) -> tuple[torch.Tensor, list[list[list[int]]]]:
    """Logits of the model without any pipeline, and the experts it chose: layer, token, rising ids."""
    model = plain_model(open_gguf(MODEL), cpu.OPS)
    route = model.route
    chosen: list[list[list[int]]] = [[] for _ in range(model.hparams.n_layer)]

    def recording(i_layer: int, *args: Any) -> Routing | None:
        routing = route(i_layer, *args)
        assert routing is not None
        chosen[i_layer] += routing.ids.sort(-1).values.tolist()
        return routing

    with patch.object(model, "route", recording):
        return plain_logits(model, oracle["input_ids"].tolist(), 320), chosen


def losses_of(logits: torch.Tensor, ids: np.ndarray) -> np.ndarray:
    return F.cross_entropy(logits[:-1], torch.tensor(ids[1:]).long(), reduction="none").numpy()


def assert_losses(losses: np.ndarray, oracle: dict[str, np.ndarray]) -> None:
    np.testing.assert_allclose(losses, oracle["nll"], rtol=0, atol=NLL_TOLERANCE)
    assert math.exp(losses.mean()) == pytest.approx(5.573, abs=0.01)


def test_losses_of_the_plain_model(
    plain: tuple[torch.Tensor, list[list[list[int]]]], oracle: dict[str, np.ndarray]
) -> None:
    assert_losses(losses_of(plain[0], oracle["input_ids"]), oracle)


def test_likeliest_tokens(plain: tuple[torch.Tensor, list[list[list[int]]]], oracle: dict[str, np.ndarray]) -> None:
    logits = plain[0].numpy()
    expected_ids = oracle["top8_ids"].astype(np.int64)
    at_ids = np.take_along_axis(logits, expected_ids, 1)
    np.testing.assert_allclose(at_ids, oracle["top8_logits"], rtol=0, atol=LOGIT_TOLERANCE)
    best = torch.from_numpy(logits).topk(9)
    gaps = -np.diff(best.values.numpy(), axis=1)
    is_clear = gaps.min(axis=1) > 2 * LOGIT_TOLERANCE
    assert is_clear.mean() > 0.95
    assert (best.indices.numpy()[is_clear, :8] == expected_ids[is_clear]).all()


def test_routing(plain: tuple[torch.Tensor, list[list[list[int]]]], oracle: dict[str, np.ndarray]) -> None:
    expected = np.sort(oracle["experts"], axis=-1)
    assert expected.shape == (6, N_TOKENS, 4)
    assert (np.array(plain[1]) == expected).all()


@pytest.mark.parametrize("schedule", ["serial", "depth-first", "breadth-first"])
def test_losses_of_each_schedule(schedule: str, oracle: dict[str, np.ndarray]) -> None:
    with LLM(MODEL, schedule=schedule, policy="all", n_ctx=N_TOKENS, **SMALL) as llm:
        assert llm.host_expert_bytes > 10 << 20
        logits = llm.logits(oracle["input_ids"].tolist())
        counters = llm.counters()
    assert_losses(losses_of(logits, oracle["input_ids"]), oracle)
    n_passes = counters["waves" if schedule == "breadth-first" else "ubatches"]
    assert n_passes == (2 if schedule == "breadth-first" else 5)
    assert counters["uploaded_bytes"] == n_passes * counters["host_expert_bytes"]


def test_text_gives_the_ids(oracle: dict[str, np.ndarray]) -> None:
    with LLM(MODEL, devices="cpu", n_ctx=64) as llm:
        ids = llm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert ids[:N_TOKENS] == oracle["input_ids"].tolist()


def test_command(capsys: pytest.CaptureFixture[str], oracle: dict[str, np.ndarray]) -> None:
    ran = main(capsys, "perplexity", "-m", MODEL, "-f", TEXT, "--tokens", "640", "-c", "640", "-dev", "cpu", "--json")
    result = json.loads(ran.out)
    assert result["n_tokens"] == N_TOKENS
    assert result["perplexity"] == pytest.approx(5.573, abs=0.001)
    assert_losses(np.array(result["nll"]), oracle)
