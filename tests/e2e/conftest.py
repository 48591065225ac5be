"""A shape so small that weights of it are made in a moment, and models that are opened in one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import pytest

from overspill.bench import shapes
from overspill.device import topology

_TINY_KEYS: dict[str, int | float] = {
    "block_count": 3,
    "context_length": 256,
    "embedding_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
    "vocab_size": 200,
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 96,
}
TINY = {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in _TINY_KEYS.items()}


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)


@pytest.fixture(autouse=True, scope="module")
def _rates_need_not_be_good() -> Iterator[None]:
    """Every model that is opened measures the machine, which takes longer than to open a small one."""
    any_seconds = partial(topology._best_seconds, least_s=0.0)
    with patch.multiple(topology, _FIRST_SECONDS=0.0, _best_seconds=any_seconds):
        yield
