"""Whatever the model, machine and flags: a placement whose bytes add up and fit, or one line that says why not."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.errors import UserError
from overspill.options import Options, parse_tensor_split
from overspill.placement.budget import SLOT_PADDING, activation_bytes
from overspill.placement.machine import DeviceSpec, Machine
from overspill.placement.plan import Placement, place
from overspill.placement.shape import ModelShape, Role
from tests.pure.placement_models import MIB, host_bytes_by_device, make_shape

N_PARALLEL = 2
N_STATES = N_PARALLEL * Options().n_states


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    n_layer = draw(st.sampled_from([6, 14, 9, 3, 1]))
    shape = make_shape(
        n_layer,
        dense_bytes=draw(st.integers(4, 40 * MIB)),
        expert_bytes=draw(st.sampled_from([300 * MIB, 300 * MIB, 37 * MIB + 11, 0])),
        n_lead=draw(st.integers(0, 3)),
        n_expert=draw(st.sampled_from([3, 16])),
        n_expert_used=2,
        n_embd=64,
        output_bytes=draw(st.integers(1, 30 * MIB)),
        is_tied=draw(st.booleans()),
        kv_per_cell=draw(st.sampled_from([0, 600, 4096])),
        n_ctx_train=draw(st.sampled_from([512, 5000, 40000])),
    )
    scale = draw(st.lists(st.integers(1, 3), min_size=n_layer, max_size=n_layer))
    tensors = tuple(t if t.layer is None else t._replace(n_bytes=t.n_bytes * scale[t.layer]) for t in shape.tensors)
    states = draw(st.sampled_from([0, 100_000]))
    return replace(shape, tensors=tensors, state_bytes=tuple(states * (l % 2) for l in range(n_layer)))


FRACTIONS = [0.0, 0.04, 0.1, 0.2, 0.3, 0.5, 0.8, 1.3]


@st.composite
def situations(draw: st.DrawFn) -> tuple[ModelShape, Machine]:
    """A model, and a machine whose devices hold given fractions of it."""
    shape = draw(shapes())
    need = shape.total_bytes + sum(shape.kv_bytes_per_cell) * 512
    n_device = draw(st.sampled_from([2, 1, 3, 4, 0]))
    fractions = [draw(st.sampled_from(FRACTIONS[::-1])) for _ in range(n_device)]
    devices = tuple(DeviceSpec(f"CUDA{i}", int(need * f), int(need * f), 50.0, 100.0) for i, f in enumerate(fractions))
    host_bytes = int(need * draw(st.sampled_from([4.0, 4.0, 4.0, 0.7])))
    return shape, Machine(host_bytes, devices, 100.0, 300.0, 100.0)


@st.composite
def options(draw: st.DrawFn) -> Options:
    return Options(
        fit=draw(st.sampled_from(["on", "on", "balanced", "off"])),
        n_gpu_layers=draw(st.sampled_from([-1, -1, "all", 0, 1, 3])),
        tensor_split=draw(st.sampled_from([(), (), (), (), (1.0,), (0.0, 2.0), (3.0, 1.0)])),
        split_mode=draw(st.sampled_from(["layer", "layer", "layer", "none"])),
        override_tensor=draw(
            st.sampled_from([(), (), (), ("exps=CPU",), (r"blk\.[02]\.=CPU",), (r"blk\.1\..*exps=CUDA1", "ffn_=CPU")])
        ),
        cpu_moe=draw(st.sampled_from([False, False, False, True])),
        n_cpu_moe=draw(st.sampled_from([0, 0, 0, 1, 4, 9])),
        fit_target_mib=draw(st.sampled_from([None, (0,), (50,)])),
        fit_ctx=draw(st.sampled_from([256, 4096])),
        n_ctx=draw(st.sampled_from([0, 0, 512, 20000])),
        n_parallel=N_PARALLEL,
        slab_mib=draw(st.sampled_from([None, None, 8])),
        n_staging_slots=draw(st.integers(2, 3)),
    )


def check_sums(shape: ModelShape, placement: Placement) -> None:
    """The budgets, recomputed from `home` and `layer_device` alone."""
    host = placement.host_index
    weights = [0] * (host + 1)
    for t in shape.tensors:
        weights[placement.home[t.name]] += t.n_bytes
    if placement.output_device != host:
        weights[placement.output_device] += shape.tied_bytes
    kv = [0] * (host + 1)
    for l, device in enumerate(placement.layer_device):
        kv[device] += shape.kv_bytes_per_cell[l] * placement.n_ctx + shape.state_bytes[l] * N_STATES
    assert [b.weights_bytes for b in placement.budgets] == weights
    assert [b.kv_bytes for b in placement.budgets] == kv
    for device, budget in enumerate(placement.budgets):
        has_output = device == placement.output_device
        is_used = has_output or device in placement.layer_device
        buffers = activation_bytes(shape, n_ubatch=placement.n_ubatch, n_wave=placement.n_wave, has_output=has_output)
        assert budget.compute_bytes == (buffers.total if is_used else 0)


def check_staging(shape: ModelShape, placement: Placement) -> None:
    uploads = host_bytes_by_device(shape, placement.layer_device, dict(placement.home), placement.host_index)
    assert list(placement.upload_bytes) == uploads
    assert placement.host_expert_bytes == sum(uploads)
    for device, plan in enumerate(placement.staging):
        assert (plan is not None) == (uploads[device] > 0)
        if plan is None:
            assert placement.budgets[device].staging_bytes == 0
            continue
        per_layer = [
            sum(t.n_bytes for t in shape.tensors if t.layer == l and placement.home[t.name] == placement.host_index)
            for l in placement.layers_of(device)
        ]
        assert plan.n_slots >= 2
        assert 1 <= plan.slab_experts <= shape.n_expert
        assert plan.slot_bytes == plan.slab_experts * -(-max(per_layer) // shape.n_expert) + SLOT_PADDING
        assert placement.budgets[device].staging_bytes == plan.n_slots * plan.slot_bytes


def check_homes(shape: ModelShape, placement: Placement) -> None:
    assert set(placement.home) == set(shape.names)
    for t in shape.tensors:
        home = placement.home[t.name]
        if t.role is Role.EMBED:
            assert home == placement.host_index
        elif t.role is Role.OUTPUT:
            assert home == placement.output_device
        elif t.layer is not None:
            device = placement.layer_device[t.layer]
            assert home == device or (t.role is Role.EXPERT and home == placement.host_index)


def placed(
    shape: ModelShape, machine: Machine, options: Options, n_ubatch: int, n_wave: int, grain: int
) -> Placement | None:
    """The placement, or None where it is refused; any other exception is a failure."""
    with suppress(UserError):
        return place(shape, machine, options, n_ubatch=n_ubatch, n_wave=n_wave, grain=grain)
    return None


@settings(max_examples=200, deadline=None)
@given(situations(), options(), st.integers(1, 8), st.sampled_from([(64, 64), (64, 1000), (512, 4096)]))
def test_placement_adds_up_and_fits_or_is_refused(
    situation: tuple[ModelShape, Machine], options: Options, grain: int, batch: tuple[int, int]
) -> None:
    shape, machine = situation
    n_ubatch, n_wave = batch
    placement = placed(shape, machine, options, n_ubatch, n_wave, grain)
    if placement is None:
        return
    margin = 0 if options.fit == "off" or not options.fit_target_mib else options.fit_target_mib[0] * MIB
    for budget in placement.budgets:
        is_device = budget is not placement.budgets[-1] and budget.used_bytes > 0
        assert budget.spare_bytes >= (margin if is_device else 0)
    assert sum(len(placement.layers_of(d)) for d in range(placement.host_index + 1)) == shape.n_layer
    check_homes(shape, placement)
    check_sums(shape, placement)
    check_staging(shape, placement)
    assert place(shape, machine, options, n_ubatch=n_ubatch, n_wave=n_wave, grain=grain) == placement


@settings(max_examples=100, deadline=None)
@given(situations(), st.integers(1, 8), st.sampled_from(["on", "balanced"]))
def test_open_flags_always_find_a_placement(situation: tuple[ModelShape, Machine], grain: int, fit: str) -> None:
    shape, machine = situation
    placement = place(
        shape, replace(machine, host_bytes=1 << 50), Options(fit=fit), n_ubatch=64, n_wave=256, grain=grain
    )
    assert all(budget.spare_bytes >= 0 for budget in placement.budgets)


@settings(max_examples=100, deadline=None)
@given(situations(), options(), st.integers(1, 8))
def test_flags_of_a_plan_give_the_same_plan(
    situation: tuple[ModelShape, Machine], options: Options, grain: int
) -> None:
    shape, machine = situation
    placement = placed(shape, machine, options, 64, 256, grain)
    if placement is None:
        return
    same = replace(parsed(placement.flags), n_parallel=N_PARALLEL, slab_mib=options.slab_mib)
    same = replace(same, n_staging_slots=options.n_staging_slots)
    again = place(shape, machine, same, n_ubatch=64, n_wave=256, grain=grain)
    assert (again.layer_device, again.output_device, again.home, again.n_ctx) == (
        placement.layer_device,
        placement.output_device,
        placement.home,
        placement.n_ctx,
    )


def parsed(flags: tuple[str, ...]) -> Options:
    """The options that `Placement.flags` stand for."""
    words = shlex.split(shlex.join(flags))
    values = dict(pairwise(words))
    return Options(
        fit=values["-fit"],
        n_gpu_layers=int(values["-ngl"]),
        n_ctx=int(values["-c"]),
        tensor_split=parse_tensor_split(values["-ts"]) if "-ts" in values else (),
        split_mode=values.get("-sm", "layer"),
        main_gpu=int(values.get("-mg", 0)),
        override_tensor=(values["-ot"],) if "-ot" in values else (),
        n_cpu_moe=int(values.get("-ncmoe", 0)),
        cpu_moe="-cmoe" in words,
    )
