"""What a wave is predicted to take, against sums written down by hand; rates measured with a model's own kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.device.factory import open_devices
from overspill.device.topology import Sample, measure
from overspill.gguf import open_gguf
from overspill.gguf.types import TensorType
from overspill.models.check import understand
from overspill.needs import main_weight
from overspill.pipeline.schedule import Order, Policy, WaveSchedule
from overspill.pipeline.simulate import WaveShape, predict
from overspill.pipeline.split import Layout
from overspill.placement.machine import DeviceSpec, Machine
from tests.helpers.plain import DATA
from tests.pure.placement_models import MIB, make_shape

N_LAYER, LAUNCH_US = 4, 20.0
SHAPE = replace(make_shape(N_LAYER, n_expert=0, expert_bytes=0, dense_bytes=40 * MIB), attention_flops=(0.0,) * N_LAYER)
HOST = Machine(
    host_bytes=1 << 40, devices=(), h2d_total_gbps=1, peer_gbps=1, cpu_gbps=10.0, cpu_gflops=50.0, call_us=7.0
)
SCHEDULE = WaveSchedule(Order.BREADTH_FIRST, Policy.ALL, 2, False)


def predicted_us(machine: Machine, device: int, n_tokens: int) -> float:
    n = len(machine.devices)
    layout = Layout(n, (device,) * N_LAYER, device, ((),) * N_LAYER)
    return predict(SHAPE, machine, layout, WaveShape((n_tokens,)), SCHEDULE).wave_us


def test_one_token_on_the_cpu_reads_every_weight_once() -> None:
    """Layers of 3 tensors and 40 MiB, and a head of 20 MiB, at 10 GB/s, and a call for each tensor."""
    reading_us = (N_LAYER * 40 * MIB + 20 * MIB) / 10e9 * 1e6
    total, host = reading_us + N_LAYER * 3 * 7.0 + 2 * LAUNCH_US, replace(HOST, cpu_gflops=1e5)
    assert predicted_us(host, 0, 1) == pytest.approx(total, abs=2.5 * LAUNCH_US)
    assert predicted_us(replace(host, call_us=0.0), 0, 1) == pytest.approx(
        total - N_LAYER * 3 * 7.0, abs=2.5 * LAUNCH_US
    )


def test_many_tokens_on_the_cpu_take_what_their_products_take() -> None:
    """1 GFLOP a layer and token at 50 GFLOP/s."""
    assert predicted_us(HOST, 0, 100) == pytest.approx(N_LAYER * 100 * 1e9 / 50e9 * 1e6, rel=0.02)


@pytest.mark.parametrize(("read_gbps", "gbps"), [(4.0, 4.0), (None, 160.0 * 1e3 / 160)])
def test_one_token_on_a_device(read_gbps: float | None, gbps: float) -> None:
    device = DeviceSpec("virtual:0", 1 << 40, 1 << 40, 25.0, 160.0, read_gbps=read_gbps)
    machine = replace(HOST, devices=(device,), call_us=0.0)
    reading_us = (N_LAYER * 40 * MIB + 20 * MIB) / (gbps * 1e9) * 1e6
    assert predicted_us(machine, 0, 1) == pytest.approx(reading_us + 5 * LAUNCH_US, abs=2.5 * LAUNCH_US)


def test_the_kind_of_weight_that_a_model_has_most_of() -> None:
    _, _, specs, source = understand(open_gguf(DATA / "models" / "qwen3moe.gguf"))
    kind = main_weight(source, specs)
    assert (kind.type, kind.n_columns) == (TensorType.F32, 64)
    infos = [source.tensors[s.name] for s in specs if s.name.startswith("blk.") and len(s.shape) > 1]
    assert kind.n_bytes == sum(info.n_bytes for info in infos if info.shape[-1] == 64)


@pytest.mark.parametrize("n_devices", [0, 2])
def test_rates_come_from_the_work_that_is_given(n_devices: int) -> None:
    n_calls = dict.fromkeys(("many", "one", "call"), 0)

    def count(name: str) -> None:
        n_calls[name] += 1

    sample = Sample(lambda: count("many"), 1e9, lambda: count("one"), 1 << 20, lambda: count("call"))
    devices = open_devices(f"virtual:{n_devices}" if n_devices else "cpu")
    try:
        rates = measure(devices, sample)
    finally:
        devices.close()
    assert min(n_calls.values()) >= 5
    assert len(rates.tflops) == len(rates.read_gbps) == n_devices
    assert all(rate > 0 for rate in (*rates.tflops, *map(float, filter(None, rates.read_gbps)), rates.cpu_gbps))
    assert None not in rates.read_gbps
