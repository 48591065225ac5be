"""What files may say about an architecture: variants that must load, and defects that must be named."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.source import ModelSource
from overspill.models.base import HParams
from overspill.models.check import understand
from overspill.models.registry import names
from overspill.models.specs.deepseek2 import LatentHParams
from overspill.models.specs.gemma3 import GemmaHParams
from overspill.models.specs.granitemoe import GraniteHParams
from overspill.models.specs.llama4 import Llama4HParams
from overspill.models.specs.router import Gating
from tests.helpers.edited import Edited
from tests.helpers.plain import plain_logits, plain_model
from tests.models.fixtures import fixture

IDS = [(11 * i + 5) % 500 for i in range(40)]


def original(name: str) -> Edited:
    return Edited.of(open_gguf(fixture(f"{name}.gguf")))


def logits(source: ModelSource) -> torch.Tensor:
    return plain_logits(plain_model(source), IDS, 16)


def hparams(source: ModelSource) -> HParams:
    return understand(source).hparams


def test_every_architecture_has_both_modules() -> None:
    from overspill.models.registry import architecture

    for name in names():
        assert architecture(name).Model.__name__ == "Model"


def test_the_text_of_qwen3vlmoe_is_qwen3moe() -> None:
    source = original("qwen3moe")
    other = source.with_arch("qwen3vlmoe").with_keys({"qwen3vlmoe.n_deepstack_layers": 3})
    assert hparams(other).arch == "qwen3vlmoe"
    assert torch.equal(logits(other), logits(source))


# --- prediction layers


def test_prediction_layers_are_counted_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    source = original("glm4_moe-mtp")
    n_behind = sum(name.startswith("blk.4.") for name in source.tensors)
    with caplog.at_level(logging.INFO):
        understood = understand(source)
    assert understood.hparams.n_layer == 4
    assert not any(spec.name.startswith("blk.4.") for spec in understood.specs)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", f"{n_behind} tensor(s) of prediction layers are not loaded")
    ]
    assert torch.equal(logits(source), logits(original("glm4_moe")))


def test_prediction_layers_may_be_announced_and_missing() -> None:
    source = original("glm4_moe-mtp")
    source = source.without([name for name in source.tensors if name.startswith("blk.4.")])
    assert torch.equal(logits(source), logits(original("glm4_moe")))


def test_layers_counted_as_prediction_layers_are_run_if_they_are_none(caplog: pytest.LogCaptureFixture) -> None:
    """Converters have copied the count of DeepSeek-V4's configuration without the layer itself."""
    source = original("deepseek_v4").with_keys({"deepseek4.nextn_predict_layers": 1})
    with caplog.at_level(logging.WARNING):
        assert hparams(source).n_layer == 6
    assert "deepseek4.nextn_predict_layers is 1, but the file has no prediction layers" in caplog.text
    assert torch.equal(logits(source), logits(original("deepseek_v4")))


def test_layers_behind_the_last_are_refused_if_they_predict_nothing() -> None:
    source = original("qwen3moe").with_keys({"qwen3moe.block_count": 3})
    with pytest.raises(UserError, match=r"12 tensor name\(s\) unknown to this architecture.*: blk\.3\.attn_k"):
        understand(source)


def test_more_prediction_layers_than_layers() -> None:
    source = original("glm4_moe").with_keys({"glm4moe.nextn_predict_layers": 4})
    with pytest.raises(UserError, match=r"glm4moe\.nextn_predict_layers is 4: must be below block_count, 4"):
        hparams(source)


# --- gpt-oss


def test_windows_by_default_in_every_other_layer() -> None:
    assert [hparams(original("gpt-oss")).window(i) for i in range(4)] == [16, None, 16, None]


def test_windows_by_flags_and_by_period() -> None:
    source, key = original("gpt-oss"), "gpt-oss.attention.sliding_window_pattern"
    flags = source.with_flags(key, [False, True, True, False])
    assert [hparams(flags).window(i) for i in range(4)] == [None, 16, 16, None]
    for period, expected in ((0, [16] * 4), (1, [None] * 4), (3, [16, 16, None, 16])):
        assert [hparams(source.with_keys({key: period})).window(i) for i in range(4)] == expected
    with pytest.raises(UserError, match=r"sliding_window_pattern is an array of 3 values, expected .* 4 layers"):
        hparams(source.with_flags(key, [True] * 3))


def test_no_window_is_refused() -> None:
    with pytest.raises(UserError, match=r"gpt-oss\.attention\.sliding_window is 0"):
        hparams(original("gpt-oss").with_keys({"gpt-oss.attention.sliding_window": 0}))


def test_windows_may_have_a_base_of_their_own() -> None:
    hp = hparams(original("gpt-oss").with_keys({"gpt-oss.rope.freq_base_swa": 5000.0}))
    assert [hp.rope_of(i).base for i in range(2)] == [5000.0, 150000.0]  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"gpt-oss\.rope\.freq_base_swa is 1: must be above 1"):
        hparams(original("gpt-oss").with_keys({"gpt-oss.rope.freq_base_swa": 1.0}))


@pytest.mark.parametrize(
    "tensor", ["blk.0.attn_sinks.weight", "blk.1.ffn_up_exps.bias", "blk.2.attn_output.bias", "output.weight"]
)
def test_gpt_oss_needs_all_its_tensors(tensor: str) -> None:
    with pytest.raises(UserError, match=tensor.replace(".", r"\.")):
        understand(original("gpt-oss").without([tensor]))


def test_order_of_tensors_does_not_matter() -> None:
    source = original("gpt-oss")
    turned = Edited(source.name, source.keys, dict(reversed(source.tensors.items())), source.data)
    assert torch.equal(logits(turned), logits(source))


# --- tensors that nobody listed


@pytest.mark.parametrize(
    "name", ["blk.1.attn_q.bias", "blk.2.post_ffw_norm.weight", "output.bias", "rope_freqs.weight"]
)
def test_what_would_change_the_text_is_refused(name: str) -> None:
    source = original("qwen3moe").with_array(name, np.ones(16, np.float32))
    with pytest.raises(UserError, match=f"1 tensor name.s. unknown to this architecture.*: {name}") as error:
        understand(source)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["v.blk.0.attn_q.weight", "mm.0.bias", "blk.0.attn_q.input_scale", "blk.1.exp_probs_b_vl.bias"]
)
def test_what_text_does_not_need_is_not_loaded(name: str) -> None:
    source = original("qwen3moe")
    assert torch.equal(logits(source.with_array(name, np.ones(1, np.float32))), logits(source))


# --- the others


def test_qwen2_may_have_a_bias_on_its_head() -> None:
    source = original("qwen2")
    bias = np.linspace(-1, 1, 512, dtype=np.float32)
    assert torch.equal(logits(source.with_array("output.bias", bias)), logits(source) + torch.from_numpy(bias))


def test_llama_may_have_biases_in_its_feed_forward() -> None:
    """Without weights in front, what comes out is the same for all tokens, and may be a bias of the last product."""
    source = original("llama")
    shape = source.tensors["blk.0.ffn_gate.weight"].shape
    gate, up = np.linspace(-2, 2, shape[0], dtype=np.float32), np.linspace(1, -1, shape[0], dtype=np.float32)
    for i in range(4):
        for name in ("gate", "up"):
            source = source.with_array(f"blk.{i}.ffn_{name}.weight", np.zeros(shape, np.float32))
    before, after = source, source
    for i in range(4):
        before = before.with_array(f"blk.{i}.ffn_gate.bias", gate).with_array(f"blk.{i}.ffn_up.bias", up)
        hidden = gate / (1 + np.exp(-gate)) * up
        after = after.with_array(f"blk.{i}.ffn_down.bias", source.array(f"blk.{i}.ffn_down.weight") @ hidden)
    assert not torch.allclose(logits(before), logits(source), atol=0.1)
    torch.testing.assert_close(logits(before), logits(after), rtol=0, atol=1e-4)


def test_deepseek_keys() -> None:
    hp = cast(LatentHParams, hparams(original("deepseek_v3")))
    magnitude = 1 + 0.1 * math.log(8)
    assert hp.attention_scale == pytest.approx(magnitude**2 / math.sqrt(32))
    assert (hp.rope.magnitude, hp.n_plain, hp.n_ff_shared, hp.n_layer_dense) == (1.0, 16, 64, 1)
    assert hp.router is not None
    assert (hp.router.gating, hp.router.n_best) == (Gating.SIGMOID, 2)
    v2 = hparams(original("deepseek_v2-qlora"))
    assert v2.router is not None
    assert (v2.router.gating, v2.router.n_best) == (Gating.SOFTMAX, 1)


def test_deepseek_without_log_multiplier_rotates_with_the_usual_magnitude() -> None:
    source = original("deepseek_v3").with_keys({"deepseek2.rope.scaling.yarn_log_multiplier": None})
    hp = cast(LatentHParams, hparams(source))
    assert hp.attention_scale == pytest.approx(1 / math.sqrt(32))
    assert hp.rope.magnitude == pytest.approx(1 + 0.1 * math.log(8))


def test_granite_factors_default_to_none() -> None:
    gone = dict.fromkeys(f"granitemoe.{name}" for name in ("attention.scale", "embedding_scale", "residual_scale"))
    hp = cast(GraniteHParams, hparams(original("granitemoe").with_keys(gone)))
    assert (hp.embedding_scale, hp.residual_scale, hp.attention_scale) == (1.0, 1.0, 0.25)
    assert hp.rope_of(0) is hp.rope
    still = original("granitemoe").with_keys({"granitemoe.rope.scaling.finetuned": False})
    assert hparams(still).rope_of(0) is None


def test_granite_shared_expert() -> None:
    """A shared expert is added like the routed ones: one that is all zeros changes nothing."""
    source = original("granitemoe")
    shared = source.with_keys({"granitemoe.expert_shared_feed_forward_length": 48})
    rng = np.random.default_rng(1)
    for i in range(4):
        for part, dims in (("gate", (48, 64)), ("up", (48, 64)), ("down", (64, 48))):
            values = np.zeros(dims) if part == "down" else rng.normal(0, 1, dims)
            shared = shared.with_array(f"blk.{i}.ffn_{part}_shexp.weight", values)
    assert torch.equal(logits(shared), logits(source))
    changed = shared.with_array("blk.0.ffn_down_shexp.weight", rng.normal(0, 1, (64, 48)))
    assert not torch.allclose(logits(changed), logits(source), atol=0.1)


def test_llama4_layers() -> None:
    hp = cast(Llama4HParams, hparams(original("llama4")))
    assert [hp.is_moe(i) for i in range(4)] == [False, True, False, True]
    assert [hp.chunk(i) for i in range(4)] == [8192, 8192, 8192, None]
    assert [hp.rope_of(i) is None for i in range(4)] == [False, False, False, True]
    whole = cast(Llama4HParams, hparams(original("llama4").with_keys({"llama4.attention.sliding_window": 0})))
    assert [whole.chunk(3), whole.is_rotated(3)] == [None, True]


def test_gemma_layers() -> None:
    hp = cast(GemmaHParams, hparams(original("gemma3")))
    assert [hp.window(i) for i in range(8)] == [16] * 5 + [None] + [16] * 2
    assert [(hp.rope_of(i).base, hp.rope_of(i).factor) for i in (4, 5)] == [(1e4, 1.0), (1e6, 8.0)]
    assert hp.softcap == 0.0


@pytest.mark.parametrize("window", [None, 0])
def test_gemma_without_windows_rotates_all_layers_alike(window: int | None) -> None:
    hp = hparams(original("gemma3").with_keys({"gemma3.attention.sliding_window": window}))
    assert {hp.window(i) for i in range(8)} == {None}
    assert {hp.rope_of(i) for i in range(8)} == {hp.rope}


def test_softcap_squeezes_logits() -> None:
    source = original("gemma3")
    capped = source.with_keys({"gemma3.final_logit_softcapping": 5.0})
    torch.testing.assert_close(logits(capped), 5 * torch.tanh(logits(source) / 5))


def test_a_gate_of_shared_experts_may_be_a_vector_or_a_row() -> None:
    source = original("qwen2moe")
    name = "blk.1.ffn_gate_inp_shexp.weight"
    assert source.tensors[name].shape == (1, 64)
    assert torch.equal(logits(source.with_array(name, source.array(name)[0])), logits(source))


DEFECTS: list[tuple[str, Callable[[Edited], Edited], str]] = [
    ("gpt-oss", lambda s: s.with_keys({"gpt-oss.expert_count": 0}), r"gpt-oss\.expert_count is 0"),
    (
        "glm4_moe",
        lambda s: s.with_keys({"glm4moe.expert_shared_count": None}),
        r"glm4moe\.expert_shared_count is missing",
    ),
    ("glm4_moe", lambda s: s.with_keys({"glm4moe.expert_gating_func": 7}), r"glm4moe\.expert_gating_func is 7"),
    ("granitemoe", lambda s: s.with_keys({"granitemoe.logit_scale": 0.0}), r"granitemoe\.logit_scale is 0"),
    ("deepseek_v3", lambda s: s.with_keys({"deepseek2.attention.kv_lora_rank": 0}), r"attention\.kv_lora_rank is 0"),
    (
        "deepseek_v3",
        lambda s: s.with_keys({"deepseek2.attention.key_length_mla": 16}),
        r"key_length_mla is 16: must be above rope\.dimension_count, 16",
    ),
    (
        "deepseek_v3",
        lambda s: s.with_keys({"deepseek2.attention.temperature_scale": 0.1}),
        r"deepseek2\.attention\.temperature_scale: scaling by position is not supported",
    ),
    ("deepseek_v3", lambda s: s.without(["blk.1.attn_k_b.weight"]), r"tensor blk\.1\.attn_k_b\.weight is missing"),
    ("llama4", lambda s: s.with_keys({"llama4.expert_used_count": 2}), r"llama4\.expert_used_count is 2: only 1"),
    ("llama4", lambda s: s.with_keys({"llama4.interleave_moe_layer_step": 0}), r"interleave_moe_layer_step is 0"),
    ("olmoe", lambda s: s.without(["output.weight"]), r"tensor output\.weight is missing"),
]


@pytest.mark.parametrize(("name", "edit", "message"), DEFECTS)
def test_defects_are_named(name: str, edit: Callable[[Edited], Edited], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        understand(edit(original(name)))
    assert "\n" not in str(error.value)
