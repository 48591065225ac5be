"""The same weights in other layouts: per-expert tensors, fused tensors, scales. Logits are those of the usual one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from overspill.errors import UserError
from overspill.gguf import open_gguf
from overspill.gguf.source import ModelSource
from overspill.gguf.types import TensorType
from overspill.models.check import understand
from overspill.pipeline.schedule import Order
from overspill.quant.dequant import dequantize
from overspill.quant.qtensor import QTensor
from tests.helpers.edited import Edited
from tests.helpers.pipe import EXACT_POLICIES, Shape, cut_waves, pipe, run_all
from tests.helpers.plain import DATA, plain_logits, plain_model
from tests.helpers.reference import reference_logits
from tests.models.fixtures import fixture

IDS = [(11 * i + 5) % 500 for i in range(24)]


def original(name: str) -> Edited:
    return Edited.of(open_gguf(fixture(f"{name}.gguf")))


def logits(source: ModelSource) -> torch.Tensor:
    return plain_logits(plain_model(source), IDS, 10)


def layers_with(source: Edited, tensor: str) -> list[str]:
    """Prefixes of the layers that have a tensor."""
    return [name.removesuffix(tensor) for name in source.tensors if name.endswith("." + tensor)]


def per_expert(source: Edited) -> Edited:
    """`blk.N.ffn_gate.E.weight`, a tensor for each expert."""
    for part in ("gate", "up", "down"):
        for b in layers_with(source, f"ffn_{part}_exps.weight"):
            stack = source.array(f"{b}ffn_{part}_exps.weight")
            source = source.without([f"{b}ffn_{part}_exps.weight"])
            for e, matrix in enumerate(stack):
                source = source.with_array(f"{b}ffn_{part}.{e}.weight", matrix)
    return source


def fused_gate_up(source: Edited) -> Edited:
    """`ffn_gate_up_exps`, and its biases where there are any."""
    for kind in ("weight", "bias"):
        for b in layers_with(source, f"ffn_gate_exps.{kind}"):
            names = [f"{b}ffn_{part}_exps.{kind}" for part in ("gate", "up")]
            fused = np.concatenate([source.array(name) for name in names], axis=1)
            source = source.without(names).with_array(f"{b}ffn_gate_up_exps.{kind}", fused)
    return source


def fused_qkv(source: Edited) -> Edited:
    """`attn_qkv`, and its bias where there is one."""
    for kind in ("weight", "bias"):
        for b in layers_with(source, f"attn_q.{kind}"):
            names = [f"{b}attn_{part}.{kind}" for part in "qkv"]
            fused = np.concatenate([source.array(name) for name in names])
            source = source.without(names).with_array(f"{b}attn_qkv.{kind}", fused)
    return source


def legacy_latent(source: Edited) -> Edited:
    """`attn_kv_b`, heads one after the other, with the keys of that time."""
    for b in layers_with(source, "attn_k_b.weight"):
        k, v = source.array(f"{b}attn_k_b.weight"), source.array(f"{b}attn_v_b.weight")
        joint = np.concatenate([k.transpose(0, 2, 1), v], axis=1)
        source = source.without([f"{b}attn_k_b.weight", f"{b}attn_v_b.weight"])
        source = source.with_array(f"{b}attn_kv_b.weight", joint.reshape(-1, joint.shape[-1]))
    a = "deepseek2.attention."
    sizes: dict[str, int | None] = {"head_count_kv": 4, "key_length": 32, "value_length": 16}
    sizes |= {"key_length_mla": None, "value_length_mla": None}
    return source.with_keys({a + name: size for name, size in sizes.items()})


def both_latent(source: Edited) -> Edited:
    """Some files carry the joint tensor as well as the two made of it."""
    legacy = legacy_latent(source)
    for b in layers_with(source, "attn_k_b.weight"):
        source = source.with_array(f"{b}attn_kv_b.weight", legacy.array(f"{b}attn_kv_b.weight"))
    return source


LAYOUTS = [
    ("mixtral", per_expert),
    ("mixtral", fused_gate_up),
    ("gpt-oss", fused_gate_up),
    ("glm4_moe", fused_gate_up),
    ("glm4_moe", fused_qkv),
    ("qwen3moe", fused_qkv),
    ("deepseek_v3", legacy_latent),
    ("deepseek_v3", both_latent),
    ("deepseek_v3", fused_gate_up),
    ("deepseek_v2-lite", legacy_latent),
]


@pytest.mark.parametrize(("name", "relay"), LAYOUTS)
def test_logits_do_not_depend_on_the_layout(name: str, relay: Callable[[Edited], Edited]) -> None:
    source = original(name)
    other = relay(source)
    assert other.tensors.keys() != source.tensors.keys()
    assert torch.equal(logits(other), logits(source))


@pytest.mark.parametrize("relay", [per_expert, fused_gate_up])
def test_other_layouts_of_host_experts(relay: Callable[[Edited], Edited]) -> None:
    """Through the pipeline, where experts are read into pinned memory and go up slab by slab."""
    source = relay(original("mixtral"))
    expected = reference_logits(plain_model(source), cut_waves(IDS, (8, 8, 8), 1), n_cells=len(IDS))
    with pipe(understand(source).source, Shape(2, slab_experts=3), n_ubatch=8, n_ubatches=3, n_cells=len(IDS)) as p:
        assert torch.equal(run_all(p, IDS, (8, 8, 8), p.schedule(Order.BREADTH_FIRST), 1), expected)


def test_parts_of_quantised_tensors_are_their_blocks() -> None:
    source = Edited.of(open_gguf(DATA / "files" / "ok-base.gguf"))
    fused = source
    for b in layers_with(source, "ffn_gate_exps.weight"):
        names = [f"{b}ffn_{part}_exps.weight" for part in ("gate", "up")]
        E, F, D = source.tensors[names[0]].shape
        raw = np.concatenate([source.bytes_of(name).reshape(E, -1) for name in names], axis=1).reshape(-1)
        type = source.tensors[names[0]].type
        fused = fused.without(names).with_blocks(f"{b}ffn_gate_up_exps.weight", type, (E, 2 * F, D), raw)
    relaid = understand(fused).source
    for name, info in source.tensors.items():
        assert relaid.tensors[name].type is info.type
        assert np.array_equal(relaid.bytes_of(name), source.bytes_of(name))


def test_joint_latent_of_small_blocks_becomes_half_precision() -> None:
    source = legacy_latent(original("deepseek_v3"))
    name = "blk.0.attn_kv_b.weight"
    rows = torch.tensor(source.array(name)).view(-1, 32)
    factors = (rows.abs().amax(-1, keepdim=True) / 127).half()
    blocks = torch.cat(
        [factors.view(torch.uint8).view(-1, 2), (rows / factors.float()).round().char().view(torch.uint8)], 1
    )
    q8_0 = TensorType.Q8_0
    quantised = source.with_blocks(name, q8_0, source.tensors[name].shape, blocks.numpy().reshape(-1))
    relaid = understand(quantised).source
    info = relaid.tensors["blk.0.attn_k_b.weight"]
    k = dequantize(QTensor.from_bytes(torch.tensor(relaid.bytes_of(info.name)), info.type, info.shape))
    exact = torch.tensor(original("deepseek_v3").array(info.name))
    assert info.type.name == "F16"
    assert relaid.tensors["blk.0.attn_v_b.weight"].type is q8_0
    assert (k - exact).abs().max() < 1.1 * factors.max() / 2


def test_scales_multiply_products() -> None:
    """A file that holds a weight divided by a number, and the number beside it."""
    source = original("gpt-oss")
    expected = logits(source)
    for name in ("blk.0.attn_q", "blk.1.attn_output", "blk.2.ffn_gate_inp", "output"):
        scaled = source.array(f"{name}.weight") / 4
        source = source.with_array(f"{name}.weight", scaled).with_array(f"{name}.scale", np.array([4.0]))
    powers = 2.0 ** np.arange(-4, 4)
    for part in ("gate", "up", "down"):
        name = f"blk.3.ffn_{part}_exps"
        scaled = source.array(f"{name}.weight") / powers[:, None, None]
        source = source.with_array(f"{name}.weight", scaled).with_array(f"{name}.scale", powers)
    assert torch.equal(logits(source), expected)
    with pipe(source, Shape(2, slab_experts=3), n_ubatch=8, n_ubatches=3, n_cells=len(IDS)) as p:
        wanted = reference_logits(plain_model(source), cut_waves(IDS, (8, 8, 8), 1), n_cells=len(IDS))
        for policy in EXACT_POLICIES:
            assert torch.equal(run_all(p, IDS, (8, 8, 8), p.schedule(Order.BREADTH_FIRST, policy), 1), wanted)


def test_the_scale_of_a_fused_tensor_is_that_of_its_parts() -> None:
    source = fused_qkv(original("qwen3moe"))
    expected = logits(source)
    name = "blk.1.attn_qkv"
    scaled = source.with_array(f"{name}.weight", source.array(f"{name}.weight") / 8)
    assert torch.equal(logits(scaled.with_array(f"{name}.scale", np.array([8.0]))), expected)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: per_expert(s).without(["blk.2.ffn_up.5.weight"]),
            r"blk\.2\.ffn_up\.5\.weight is missing.*8 experts",
        ),
        (
            lambda s: per_expert(s).with_array("blk.0.ffn_gate.3.weight", np.zeros((64, 32))),
            r"blk\.0\.ffn_gate\.3\.weight: shape \{32, 64\}, expected \{64, 64\}",
        ),
        (
            lambda s: fused_gate_up(s).with_array("blk.1.ffn_gate_up_exps.weight", np.zeros((8, 64, 64))),
            r"blk\.1\.ffn_gate_up_exps\.weight: shape \{64, 64, 8\}, expected \{64, 128, 8\}",
        ),
        (
            lambda s: fused_qkv(s).with_array("blk.1.attn_qkv.weight", np.zeros((100, 64))),
            r"blk\.1\.attn_qkv\.weight: shape \{64, 100\}, expected \{64, 256\}",
        ),
        (lambda s: s.without(["blk.1.ffn_up_exps.weight"]), r"tensor blk\.1\.ffn_up_exps\.weight is missing"),
        (
            lambda s: s.with_array("blk.1.ffn_up_exps.scale", np.ones(3)),
            r"blk\.1\.ffn_up_exps\.scale: shape \{3\}, expected \{8\}",
        ),
    ],
)
def test_defects_are_named(edit: Callable[[Edited], Edited], message: str) -> None:
    with pytest.raises(UserError, match=message):
        understand(edit(original("mixtral")))


@pytest.mark.parametrize("type", [TensorType.F16, TensorType.BF16])
def test_routers_of_half_precision_are_multiplied_as_they_are(type: TensorType) -> None:
    source, name = original("qwen3moe"), "blk.1.ffn_gate_inp.weight"
    router = torch.from_numpy(source.array(name)).to({TensorType.F16: torch.float16}.get(type, torch.bfloat16))
    narrow = source.with_blocks(name, type, tuple(router.shape), router.view(torch.uint8).numpy().reshape(-1))
    assert torch.equal(logits(narrow), logits(source.with_array(name, router.float().numpy())))
