"""Where fit puts layers and routed experts: the situations of public bug reports, as tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.errors import UserError
from overspill.options import Options
from overspill.placement import search
from overspill.placement.budget import SLOT_PADDING, activation_bytes
from overspill.placement.plan import Placement, place
from overspill.placement.shape import CellRing, ModelShape
from tests.pure.placement_models import GIB, MIB, make_machine, make_shape


def placed(shape: ModelShape, free_gib: tuple[float, ...], options: Options, **sizes: int) -> Placement:
    batch = {"n_ubatch": 512, "n_wave": 4096, "grain": 1, **sizes}
    return place(shape, make_machine(*free_gib), options, **batch)


def n_layers(placement: Placement) -> list[int]:
    return [len(placement.layers_of(d)) for d in range(placement.host_index)]


# A model that fits is left alone; one just above the limit loses no more than it must.


@pytest.mark.parametrize("mode", ["on", "balanced"])
@pytest.mark.parametrize("grain", [1, 4, 24])
def test_model_that_fits_is_resident_and_split_by_free_memory(mode: str, grain: int) -> None:
    shape = make_shape(48, expert_bytes=690 * MIB)
    placement = placed(shape, (24, 12), Options(fit=mode, fit_target_mib=(100,)), grain=grain)
    assert 32.8 * GIB < shape.total_bytes < 33 * GIB
    assert placement.host_expert_bytes == 0
    assert placement.staging == (None, None)
    assert placement.budgets[-1].weights_bytes == shape.embed_bytes
    assert n_layers(placement) == [32, 16]
    assert placement.n_ctx == 4096


@pytest.mark.parametrize("grain", [1, 4, 24])
def test_just_above_the_limit_only_the_overflow_leaves(grain: int) -> None:
    layer_bytes = 760 * MIB
    shape = make_shape(48, expert_bytes=layer_bytes)
    placement = placed(shape, (24, 12), Options(fit_target_mib=(100,)), grain=grain)
    overflow = sum(b.weights_bytes for b in placement.budgets) - 36 * GIB
    staging = sum(b.staging_bytes for b in placement.budgets)
    assert overflow > 0
    assert 0 < placement.host_expert_bytes <= overflow + staging + 2 * layer_bytes
    assert len([b for b in placement.upload_bytes if b]) == 2
    for budget in placement.budgets[:-1]:
        assert 100 * MIB <= budget.spare_bytes <= 100 * MIB + layer_bytes + shape.layer_bytes(0)


def test_small_ring_only_where_it_at_least_halves_the_uploads() -> None:
    near = placed(make_shape(48, expert_bytes=760 * MIB), (24, 12), Options())
    far = placed(make_shape(48, expert_bytes=2 * 760 * MIB), (24, 12), Options())
    assert [plan.slab_experts for plan in near.staging if plan] == [2, 2]
    assert [plan.slab_experts for plan in far.staging if plan] == [16, 16]


def test_equal_slices_when_balanced() -> None:
    shape = make_shape(48, expert_bytes=933 * MIB)
    by_memory = placed(shape, (24, 12), Options())
    balanced = placed(shape, (24, 12), Options(fit="balanced"))
    assert n_layers(balanced) == [24, 24]
    assert balanced.upload_bytes == (0, 14 * 933 * MIB)
    assert sorted(by_memory.upload_bytes) == [7 * 933 * MIB, 8 * 933 * MIB]


def test_balanced_keeps_equal_slices_where_all_is_resident_anyway() -> None:
    shape = make_shape(48, expert_bytes=300 * MIB)
    assert n_layers(placed(shape, (24, 16), Options(fit="balanced"))) == [24, 24]
    assert n_layers(placed(shape, (24, 16), Options())) == [29, 19]


# Host experts are spread over every device's slice.


@pytest.mark.parametrize("n_lead", [0, 3])
@pytest.mark.parametrize("grain", [1, 2, 24])
def test_host_layers_are_spread_for_n_cpu_moe(n_lead: int, grain: int) -> None:
    shape = make_shape(48, expert_bytes=933 * MIB, n_lead=n_lead)
    placement = placed(shape, (16, 15), Options(n_cpu_moe=27), grain=grain)
    n_host = 27 - n_lead
    assert placement.host_expert_bytes == n_host * 933 * MIB
    assert max(placement.upload_bytes) - min(placement.upload_bytes) <= 933 * MIB
    assert all(budget.spare_bytes >= 0 for budget in placement.budgets)
    assert any(f"routed experts of {n_host} layers are in host RAM, spread" in note for note in placement.notes)


def test_literal_n_cpu_moe_takes_the_first_layers() -> None:
    shape = make_shape(8, expert_bytes=900 * MIB)
    placement = placed(shape, (24, 24), Options(n_cpu_moe=3, fit="off"), grain=4)
    host = [l for l in range(8) if placement.home[f"blk.{l}.ffn_up_exps.weight"] == placement.host_index]
    assert host == [0, 1, 2]
    assert placement.upload_bytes == (3 * 900 * MIB, 0)
    assert any("host weights on one device only" in note and "CUDA0" in note for note in placement.notes)


def test_literal_flags_that_overflow_name_need_and_limit() -> None:
    shape = make_shape(48, expert_bytes=933 * MIB)
    with pytest.raises(UserError) as error:
        placed(shape, (16, 15), Options(n_cpu_moe=27, fit="off"), grain=24)
    assert "CUDA1 needs 19.59 GiB" in str(error.value)
    assert "may use 15.00 GiB" in str(error.value)
    assert "CUDA0" not in str(error.value)


@pytest.mark.parametrize("free_gib", [(16, 15), (24, 24, 24), (24, 12), (24,) * 8, (40, 20, 10)])
@pytest.mark.parametrize("grain", [1, 3, 100])
def test_fit_spreads_host_layers_without_being_told(free_gib: tuple[float, ...], grain: int) -> None:
    shape = make_shape(94, expert_bytes=2600 * MIB, dense_bytes=60 * MIB, n_expert=128)
    placement = placed(shape, free_gib, Options(), grain=grain)
    assert max(placement.upload_bytes) - min(placement.upload_bytes) <= 2600 * MIB
    assert all(b.spare_bytes >= 0 for b in placement.budgets)
    assert all(b.spare_bytes < 2 * 2660 * MIB for b in placement.budgets[:-1])


def test_all_experts_on_host_means_equal_uploads_even_on_unequal_devices() -> None:
    placement = placed(make_shape(48, expert_bytes=933 * MIB), (24, 12), Options(cpu_moe=True))
    assert placement.upload_bytes == (24 * 933 * MIB, 24 * 933 * MIB)


def test_host_layers_lie_evenly_in_a_slice() -> None:
    placement = placed(make_shape(12, expert_bytes=900 * MIB), (24,), Options(n_cpu_moe=3))
    host = [l for l in range(12) if placement.home[f"blk.{l}.ffn_up_exps.weight"] == 1]
    assert host == [3, 7, 11]


# What is left open yields, what is set does not.


def test_context_yields_before_layers_do() -> None:
    shape = make_shape(16, expert_bytes=500 * MIB, kv_per_cell=4096, n_ctx_train=131072)
    placement = placed(shape, (4,), Options())
    assert placement.layers_of(0) == tuple(range(16))
    assert 4096 < placement.n_ctx < 131072
    assert placement.n_ctx % 256 == 0
    assert placement.staging[0] is not None
    assert placement.staging[0].slab_experts == 16
    more = replace(shape, n_ctx_train=placement.n_ctx + 256)
    assert placed(more, (4,), Options()).n_ctx == placement.n_ctx
    assert any(f"context lowered from 131072 to {placement.n_ctx}" in note for note in placement.notes)


@pytest.mark.parametrize("load_mode", ["none", "mmap"])
def test_a_context_that_nobody_asked_for_leaves_room_in_host_memory(load_mode: str) -> None:
    """Keys and values take at most half of what weights and buffers leave; mapped weights may go again."""
    shape = make_shape(8, n_expert=0, expert_bytes=0, dense_bytes=256 * MIB, kv_per_cell=65536, n_ctx_train=131072)
    machine = make_machine(host_gib=16)
    options = Options(load_mode=load_mode)
    placement = place(shape, machine, options, n_ubatch=128, n_wave=128, grain=8)
    host = placement.budgets[-1]
    room = host.free_bytes - host.compute_bytes - (host.weights_bytes if load_mode == "none" else 0)
    cells = 256 * 8 * 65536
    assert room // 2 - cells < host.kv_bytes <= room // 2
    assert any("context lowered from 131072" in note for note in placement.notes)
    asked = replace(options, n_ctx=placement.n_ctx + 2048)
    assert place(shape, machine, asked, n_ubatch=128, n_wave=128, grain=8).n_ctx == placement.n_ctx + 2048


def test_slightly_short_ring_is_not_given_up_for_a_small_one() -> None:
    shape = make_shape(16, expert_bytes=500 * MIB, kv_per_cell=4096)
    plan = placed(shape, (4,), Options(n_ctx=46592)).staging[0]
    assert plan is not None
    assert plan.slab_experts == 15


@pytest.mark.parametrize(("free_gib", "n_ctx"), [((24, 16) * 4, 230_000), ((48, 24, 24, 24, 16, 16, 12, 12), 180_000)])
def test_layers_shift_to_keep_the_context(free_gib: tuple[float, ...], n_ctx: int) -> None:
    """Counts that suit the lowest context would leave no room for a large one on the smaller devices."""
    shape = make_shape(94, expert_bytes=2 * GIB, dense_bytes=200 * MIB, kv_per_cell=4096, n_ctx_train=262144)
    assert n_ctx <= placed(shape, free_gib, Options()).n_ctx < 262144


def test_context_of_the_user_is_kept_and_layers_move_instead() -> None:
    shape = make_shape(16, dense_bytes=300 * MIB, expert_bytes=500 * MIB, kv_per_cell=4096)
    options = Options(fit="on", cpu_moe=True, n_ctx=131072)
    placement = placed(shape, (8,), options)
    n_cpu = len(placement.layers_of(placement.host_index))
    assert placement.n_ctx == 131072
    assert n_cpu > 0
    assert placement.layer_device == (1,) * n_cpu + (0,) * (16 - n_cpu)
    assert placement.budgets[0].spare_bytes >= 0
    per_layer = 300 * MIB + 4096 * 131072
    assert placement.budgets[0].spare_bytes < per_layer
    assert any(f"layers 0-{n_cpu - 1} are computed by the CPU" in note for note in placement.notes)
    with pytest.raises(UserError, match=r"CUDA0 needs 12\.78 GiB .* may use 8\.00 GiB"):
        placed(shape, (8,), replace(options, n_gpu_layers="all"))


def test_margin_is_kept_free() -> None:
    shape = make_shape(10, expert_bytes=900 * MIB)
    tight = placed(shape, (9.5,), Options(fit_target_mib=(600,)))
    loose = placed(shape, (9.5,), Options())
    assert loose.host_expert_bytes == 0
    assert tight.host_expert_bytes > 0
    assert tight.budgets[0].spare_bytes >= 600 * MIB
    with pytest.raises(UserError, match="-fitt has 3 values for 1 devices"):
        placed(shape, (9.5,), Options(fit_target_mib=(1, 2, 3)))


def test_device_reserve_is_the_default_margin() -> None:
    shape = make_shape(10, expert_bytes=900 * MIB)
    machine = make_machine(9.5)
    reserved = replace(machine, devices=(replace(machine.devices[0], reserve_bytes=GIB),))
    sizes = {"n_ubatch": 512, "n_wave": 4096, "grain": 1}
    assert place(shape, reserved, Options(), **sizes).budgets[0].spare_bytes >= GIB
    assert place(shape, reserved, Options(fit_target_mib=(0,)), **sizes).host_expert_bytes == 0


def test_lower_context_that_would_keep_all_experts_is_told() -> None:
    shape = make_shape(16, expert_bytes=500 * MIB, kv_per_cell=4096, n_ctx_train=65536)
    placement = placed(shape, (10,), Options())
    assert placement.n_ctx == 65536
    assert placement.host_expert_bytes > 0
    note = next(note for note in placement.notes if "would be resident" in note)
    n_ctx = int(note.split()[2])
    assert placed(shape, (10,), Options(n_ctx=n_ctx)).host_expert_bytes == 0
    assert placed(shape, (10,), Options(n_ctx=n_ctx + 512)).host_expert_bytes > 0


def test_host_memory_is_a_limit_too() -> None:
    shape = make_shape(16, expert_bytes=500 * MIB)
    machine = make_machine(4, host_gib=4)
    sizes = {"n_ubatch": 512, "n_wave": 4096, "grain": 1}
    with pytest.raises(UserError, match=r"host needs \d\.\d\d GiB .* may use 4\.00 GiB; .*-lm mmap"):
        place(shape, machine, Options(), **sizes)
    mapped = place(shape, machine, Options(load_mode="mmap"), **sizes)
    assert mapped.budgets[-1].spare_bytes < 0
    assert any("-lm mmap" in note for note in mapped.notes)


def test_no_devices_means_the_cpu_computes() -> None:
    shape = make_shape(4, expert_bytes=500 * MIB)
    placement = placed(shape, (), Options())
    assert placement.layer_device == (0, 0, 0, 0)
    assert placement.output_device == 0
    assert placement.budgets[0].weights_bytes == shape.total_bytes
    assert placement.host_expert_bytes == 0


# Layers on devices count from the end, the output as one.


@pytest.mark.parametrize(
    ("ngl", "layer_device", "output"),
    [
        (0, (2, 2, 2, 2), 2),
        (1, (2, 2, 2, 2), 0),
        (3, (2, 2, 0, 1), 1),
        (5, (0, 1, 0, 1), 1),
        (99, (0, 1, 0, 1), 1),
        ("all", (0, 1, 0, 1), 1),
        (-2, (0, 1, 0, 1), 1),
    ],
)
def test_n_gpu_layers(ngl: int | str, layer_device: tuple[int, ...], output: int) -> None:
    placement = placed(make_shape(4), (24, 24), Options(n_gpu_layers=ngl))
    assert placement.layer_device == layer_device
    assert placement.output_device == output


def test_tied_output_copies_the_embedding() -> None:
    tied = placed(make_shape(4, is_tied=True), (24,), Options())
    own = placed(make_shape(4), (24,), Options())
    assert tied.home["token_embd.weight"] == tied.host_index
    assert tied.budgets[0].weights_bytes == own.budgets[0].weights_bytes
    assert tied.budgets[-1].weights_bytes == own.budgets[-1].weights_bytes


# Buffers are counted for the whole wave and the whole context.


@pytest.mark.parametrize("n_ubatch", [512, 4096])
def test_a_million_cells_on_four_devices_are_counted(n_ubatch: int) -> None:
    shape = make_shape(8, expert_bytes=300 * MIB, kv_per_cell=2048)
    placement = placed(shape, (5,) * 4, Options(n_ctx=1 << 20), n_ubatch=n_ubatch, n_wave=16384)
    assert [b.kv_bytes for b in placement.budgets] == [2 * 2048 << 20] * 4 + [0]
    assert all(b.spare_bytes >= 0 for b in placement.budgets)
    buffers = activation_bytes(shape, n_ubatch=n_ubatch, n_wave=16384, has_output=False)
    assert buffers.n_slots == 16384 // n_ubatch
    assert placement.budgets[0].compute_bytes == 16384 * (4 * 256 + 4 * 256 + 2 * 4 * 4 + 8)
    assert placement.budgets[3].compute_bytes - placement.budgets[0].compute_bytes == 2 * 128 * 1000 * 4


def test_activation_bytes_by_part() -> None:
    moe = activation_bytes(make_shape(2, n_embd=64, n_vocab=500), n_ubatch=100, n_wave=250, has_output=True)
    assert (moe.n_slots, moe.x, moe.normed, moe.expert_ids) == (3, 25600, 25600, 1600)
    assert (moe.expert_weights, moe.positions, moe.logits) == (1600, 800, 400_000)
    assert moe.total == 3 * (25600 + 25600 + 1600 + 1600 + 800) + 400_000
    dense_shape = make_shape(2, n_embd=64, n_expert=0, expert_bytes=0)
    dense = activation_bytes(
        replace(dense_shape, x_dim=4 * dense_shape.n_embd), n_ubatch=100, n_wave=100, has_output=False
    )
    assert (dense.x, dense.slot, dense.logits) == (4 * 25600, 4 * 25600 + 800, 0)


def test_recurrent_state_counts_per_sequence() -> None:
    shape = make_shape(4, state_bytes=10 * MIB)
    one = placed(shape, (24,), Options(n_ctx=4096)).budgets[0].kv_bytes
    four = placed(shape, (24,), Options(n_ctx=4096, n_parallel=4)).budgets[0].kv_bytes
    state_bytes = 4 * 10 * MIB * Options().n_states
    assert four - one == 3 * state_bytes
    none = placed(shape, (24,), Options(n_ctx=4096, ctx_checkpoints=0)).budgets[0].kv_bytes
    assert one - none == 3 * 4 * 10 * MIB


def test_rings_of_cells_do_not_grow_with_the_context() -> None:
    """Two of four layers see 1000 positions: those and a ubatch have cells, in each of two sequences."""
    shape = make_shape(4, kv_per_cell=0)
    shape = replace(shape, kv_bytes_per_cell=(0, 512) * 2, rings=(CellRing(1000, 4096), None) * 2)

    def kv_bytes(n_ctx: int) -> int:
        options = Options(n_ctx=n_ctx, n_parallel=2)
        return placed(shape, (24,), options, n_ubatch=256, n_wave=512).budgets[0].kv_bytes

    assert kv_bytes(2000) == 2000 * 2 * (512 + 4096)
    assert kv_bytes(100_000) == 100_000 * 2 * 512 + 2 * 2 * 1256 * 4096


# Slabs.


@pytest.mark.parametrize(
    ("options", "free_gib", "slab_experts"),
    [
        (Options(cpu_moe=True), 24, 16),
        (Options(cpu_moe=True), 2, 8),
        (Options(cpu_moe=True, n_staging_slots=4), 2, 4),
        (Options(cpu_moe=True, slab_mib=120), 24, 2),
        (Options(cpu_moe=True, slab_mib=1), 24, 1),
        (Options(cpu_moe=True, slab_mib=99999), 24, 16),
        (Options(cpu_moe=True, n_ctx=1_433_600), 2, 5),
    ],
)
def test_slab_sizes(options: Options, free_gib: float, slab_experts: int) -> None:
    """Experts of 56.25 MiB: a slot gets at most a quarter of what is left, and what the KV cache leaves."""
    placement = placed(make_shape(1, expert_bytes=900 * MIB), (free_gib,), options)
    plan = placement.staging[0]
    assert plan is not None
    assert plan.slab_experts == slab_experts
    assert plan.slot_bytes == slab_experts * 900 * MIB // 16 + SLOT_PADDING
    assert plan.n_slots == options.n_staging_slots


def test_not_even_one_expert_fits_the_ring() -> None:
    shape = make_shape(4, expert_bytes=16 * GIB, dense_bytes=MIB)
    with pytest.raises(UserError, match=r"CUDA0 needs 2\.\d\d GiB .* may use 1\.50 GiB"):
        placed(shape, (1.5,), Options(n_gpu_layers="all"))
    assert placed(shape, (1.5,), Options()).layer_device == (1, 1, 1, 1)


def test_plans_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller tries many candidates: 94 layers on 8 devices take few projections (about 0.1 ms each)."""
    n_calls = 0
    project = search.project

    def counted(*args: object, **sizes: int) -> object:
        nonlocal n_calls
        n_calls += 1
        return project(*args, **sizes)  # type: ignore[arg-type]

    monkeypatch.setattr(search, "project", counted)
    shape = make_shape(94, n_lead=3, expert_bytes=2 * GIB, dense_bytes=200 * MIB, n_expert=128, kv_per_cell=4096)
    placed(shape, (24,) * 8, Options())
    assert 0 < n_calls <= 30
