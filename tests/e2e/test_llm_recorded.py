"""`--record-prompts`: off, nothing is replayed; on, prompts are from the third time on, with the same bits."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from overspill.device.virtual import VirtualStream
from overspill.llm import LLM
from tests.helpers.plain import DATA

OPTIONS = {"devices": "virtual:2", "cpu_moe": True, "policy": "all", "n_ubatch": 16, "n_wave": 64, "n_ctx": 64}
PROMPTS = [[(step * i + 5) % 500 for i in range(40)] for step in (11, 13)]


@pytest.mark.parametrize(("how", "records"), [("off", False), ("on", True)])
def test_replay_is_asked_for(how: str, records: bool) -> None:
    with (
        patch.object(VirtualStream, "replay", autospec=True, side_effect=VirtualStream.replay) as replay,
        LLM(DATA / "models" / "qwen3moe.gguf", **OPTIONS, record_prompts=how) as llm,
    ):
        first = [llm.logits(ids) for ids in PROMPTS]
        assert replay.call_count == 0
        for ids, wanted in zip(PROMPTS, first, strict=True):
            assert torch.equal(llm.logits(ids), wanted)
        assert (replay.call_count > 0) == records
        assert llm.counters()["device_syncs_after_warmup"] == 0
