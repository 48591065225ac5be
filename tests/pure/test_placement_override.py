"""What -ot, --cpu-moe and --n-cpu-moe catch, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from overspill.errors import UserError
from overspill.options import Options
from overspill.placement.budget import SLOT_PADDING
from overspill.placement.plan import Placement, place
from overspill.placement.shape import ModelShape, sized_tensors
from tests.pure.placement_models import MIB, make_machine

HOST = 2
STYLES = {
    "separate": ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"],
    "fused": ["ffn_gate_up_exps.weight", "ffn_down_exps.weight"],
    "channel": ["ffn_up_chexps.weight", "ffn_down_chexps.weight"],
    "single": [f"ffn_{part}.{e}.weight" for part in ("gate", "up", "down") for e in range(4)],
}
SMALL = [
    "attn_q.weight",
    "ffn_norm.weight",
    "ffn_gate_inp.weight",
    "exp_probs_b.bias",
    "ffn_gate_exps.bias",
    "ffn_down_exps.scale",
    "ffn_up_shexp.weight",
]


def shape_of(experts: Iterable[str], n_layer: int = 4) -> ModelShape:
    names = [("token_embd.weight", MIB), ("output_norm.weight", 64), ("output.weight", MIB)]
    for l in range(n_layer):
        names += [(f"blk.{l}.{name}", 1000) for name in SMALL] + [(f"blk.{l}.{name}", 4 * MIB) for name in experts]
    zeros = (0,) * n_layer
    return ModelShape(
        name="tiny",
        arch="qwen3moe",
        n_layer=n_layer,
        n_embd=16,
        n_vocab=100,
        n_expert=4,
        n_expert_used=2,
        n_ctx_train=512,
        tensors=sized_tensors(names, n_layer=n_layer),
        kv_bytes_per_cell=zeros,
        state_bytes=zeros,
        flops_per_token=zeros,
        attention_flops=zeros,
        output_flops=0.0,
        x_dim=64,
    )


def placed(options: Options, experts: Iterable[str] = STYLES["separate"], free_gib: float = 1) -> Placement:
    return place(shape_of(experts), make_machine(free_gib, free_gib), options, n_ubatch=8, n_wave=8, grain=1)


def on_host(placement: Placement) -> set[str]:
    return {name for name, home in placement.home.items() if home == HOST and name.startswith("blk.")}


@pytest.mark.parametrize("mode", ["on", "off"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("flag", [Options(cpu_moe=True), Options(override_tensor=("exps=CPU",)), Options(n_cpu_moe=4)])
def test_routed_weights_go_to_host_and_nothing_else_does(style: str, flag: Options, mode: str) -> None:
    options = Options(cpu_moe=flag.cpu_moe, override_tensor=flag.override_tensor, n_cpu_moe=flag.n_cpu_moe, fit=mode)
    if style == "single" and options.override_tensor:
        options = Options(override_tensor=(r"ffn_(gate|up|down)\.\d+\.=CPU",), fit=mode)
    placement = placed(options, STYLES[style])
    assert on_host(placement) == {f"blk.{l}.{name}" for l in range(4) for name in STYLES[style]}
    assert placement.layer_device == (0, 1, 0, 1)
    assert placement.host_expert_bytes == 4 * len(STYLES[style]) * 4 * MIB


def test_caught_biases_stay_and_are_told() -> None:
    notes = placed(Options(override_tensor=("exps=CPU",))).notes
    assert any(note.startswith("-ot exps=CPU: 8 tensors other than routed experts stay") for note in notes)
    assert "blk.0.ffn_gate_exps.bias" in " ".join(notes)


def test_first_match_wins_over_all_flags() -> None:
    options = Options(
        override_tensor=(r"blk\.0\..*up_exps=CUDA0", "blk.0.*exps=CPU,up_exps=CPU", r"blk\.2.*down_exps=CUDA0"),
        cpu_moe=True,
    )
    resident = {"blk.0.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight"}
    every = {f"blk.{l}.{name}" for l in range(4) for name in STYLES["separate"]}
    assert on_host(placed(options)) == every - resident


def test_exception_before_cpu_moe() -> None:
    placement = placed(Options(override_tensor=(r"blk\.[01]\.ffn_.*_exps=CUDA1",), cpu_moe=True))
    assert on_host(placement) == {f"blk.{l}.{name}" for l in (2, 3) for name in STYLES["separate"]}
    assert placement.layer_device == (1, 1, 0, 1)
    assert "-ot: layers 0-1 compute on CUDA1" in placement.notes


def test_whole_layers_move_with_all_their_weights() -> None:
    placement = placed(Options(override_tensor=(r"blk\.(1|2)\..*=CUDA1,blk\..*=CPU",)))
    assert placement.layer_device == (HOST, 1, 1, HOST)
    assert {name for name, home in placement.home.items() if home == 1 and name.startswith("blk.")} == {
        f"blk.{l}.{name}" for l in (1, 2) for name in (*SMALL, *STYLES["separate"])
    }
    assert placement.host_expert_bytes == 0
    assert placement.staging == (None, None)


def test_part_of_the_experts_on_host() -> None:
    placement = placed(Options(override_tensor=("down_exps=CPU",)))
    assert on_host(placement) == {f"blk.{l}.ffn_down_exps.weight" for l in range(4)}
    assert placement.upload_bytes == (8 * MIB, 8 * MIB)
    plan = placement.staging[0]
    assert plan is not None
    assert (plan.slab_experts, plan.slot_bytes) == (4, 4 * MIB + SLOT_PADDING)


def test_output_follows_its_matrix() -> None:
    assert placed(Options()).output_device == 1
    placement = placed(Options(override_tensor=(r"^output\.weight=CUDA0",)))
    assert placement.output_device == 0
    assert placement.home["output_norm.weight"] == 0
    assert placed(Options(override_tensor=("output=CPU",))).output_device == HOST


def test_embeddings_stay_on_the_host() -> None:
    placement = placed(Options(override_tensor=("token_embd=CUDA0",)))
    assert placement.home["token_embd.weight"] == HOST
    assert any(note.startswith("-ot token_embd=CUDA0: 1 tensors") for note in placement.notes)
    assert placed(Options(override_tensor=("token_embd=CPU",))).notes == ()


@pytest.mark.parametrize(
    ("pattern", "closest"),
    [
        (r"blk\.\d+\.ffn_gate_exp\.weight", "blk.0.ffn_gate_exps.weight"),
        (r"blk\.7\.ffn_down_exps", "blk.0.ffn_down_exps.weight"),
        (r"tok_embd\.weight", "token_embd.weight"),
    ],
)
def test_pattern_that_matches_nothing_is_told_with_the_closest_names(pattern: str, closest: str) -> None:
    notes = placed(Options(override_tensor=(f"{pattern}=CPU",))).notes
    note = next(note for note in notes if "matches no tensor" in note)
    assert note.startswith(f"-ot {pattern}=CPU: ")
    assert closest in note


def test_item_behind_a_wider_one_is_told() -> None:
    notes = placed(Options(override_tensor=("exps=CPU", "up_exps=CUDA0"))).notes
    assert "-ot up_exps=CUDA0: earlier items take all it matches; put it first" in notes


@pytest.mark.parametrize("target", ["CPU", "cpu", "host", "Host"])
def test_names_of_the_host(target: str) -> None:
    assert len(on_host(placed(Options(override_tensor=(f"up_exps={target}",))))) == 4


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("exps=CUDA7",), "-ot exps=CUDA7: no such device; there are CUDA0, CUDA1, CPU"),
        (("exps=disk",), "-ot exps=disk: no such device"),
        (("up_exps=CUDA0", "down_exps=CUDA1"), "-ot puts routed experts of layer 0 on CUDA0 and CUDA1"),
        ((r"blk\.0\..*exps\.weight=CUDA0", r"blk\.0\.=CUDA1"), "-ot puts the routed experts of layer 0 on CUDA0"),
    ],
)
def test_impossible_items(items: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        placed(Options(override_tensor=items))
    assert str(error.value).startswith(message)


def test_experts_that_are_named_resident_are_not_moved_by_fit() -> None:
    options = Options(override_tensor=(r"blk\.0\..*exps=CUDA0",))
    placement = placed(options, free_gib=0.02)
    assert placement.home["blk.0.ffn_up_exps.weight"] == 0
    assert placement.host_expert_bytes > 0
    with pytest.raises(UserError, match="CUDA0 needs"):
        placed(options, free_gib=0.01)


def test_override_reaches_a_device_without_share() -> None:
    options = Options(tensor_split=(1, 0), override_tensor=(r"blk\.3\.=CUDA1",))
    placement = placed(options)
    assert placement.layer_device == (0, 0, 0, 1)
    assert placement.budgets[1].compute_bytes > 0
