"""Rates of one machine, for plans that are the same on every machine and in every run."""

from __future__ import annotations

from overspill.device.base import Devices
from overspill.device.topology import Rates, Sample, measure


def measured_once(devices: Devices, sample: Sample) -> Rates:
    """In place of `measure`: what it has found for small models, with two cores. GPUs are measured."""
    if any(device.torch_device.type != "cpu" for device in devices.accelerators):
        return measure(devices, sample)
    n = len(devices.accelerators)
    return Rates(
        h2d_gbps=(6.0,) * n,
        h2d_total_gbps=6.5,
        peer_gbps=7.0,
        tflops=(0.0025,) * n,
        read_gbps=(0.14,) * n,
        cpu_gbps=0.5,
        cpu_gflops=5.0,
        call_us=45.0,
    )
