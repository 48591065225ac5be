"""`overspill calibrate`: rates of links and CPU with all at work, as a table or JSON, and kept for this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from overspill.bench.report import table
from overspill.calibration import QWEN3_30B, Calibration, ExpertShape, calibrate, hardware_of
from overspill.errors import UserError
from overspill.gguf.types import TensorType
from overspill.hardware import n_threads_for, open_for, ops_for
from overspill.options import options_from
from overspill.saved_rates import Hardware, save_rates


def run_calibrate(quant: str, *, as_json: bool, options: Mapping[str, Any], shape: ExpertShape = QWEN3_30B) -> str:
    """Measure every type, save, and say what was found."""
    types = [_type(name.strip()) for name in quant.split(",")]
    chosen = options_from(options)
    devices = open_for(chosen)
    try:
        if not devices.accelerators or devices.accelerators[0].name.startswith("null"):
            raise UserError(f"calibrate: no links to measure with --devices {chosen.devices}; give GPUs or virtual:N")
        n_threads = n_threads_for(chosen)
        found = [calibrate(devices, ops_for(devices), type, n_threads, shape) for type in types]
        names = [device.name for device in devices.accelerators]
        hardware = hardware_of(devices.accelerators, devices.host, n_threads)
    finally:
        devices.close()
    path = save_rates(hardware, {of_type.type.name: of_type.together for of_type in found})
    if as_json:
        return json.dumps({"file": str(path), "hardware": hardware.as_record(), "rates": _records(found)}, indent=1)
    return "\n".join([*_about(hardware), *(_text(of_type, names) for of_type in found), f"saved: {path}"])


def _type(name: str) -> TensorType:
    if name not in TensorType.__members__:
        raise UserError(f"--quant {name}: no such tensor type; give names such as Q8_0,Q4_K")
    return TensorType[name]


def _records(found: Sequence[Calibration]) -> dict[str, Any]:
    return {
        of_type.type.name: {
            "party_rates": [rates.as_record() for rates in of_type.together],
            "alone": [
                {"n_tokens": rates.n_tokens, "links_gbps": list(alone.links_gbps), "cpu_gbps": alone.cpu_gbps}
                for rates, alone in zip(of_type.together, of_type.alone, strict=True)
            ],
        }
        for of_type in found
    }


def _about(hardware: Hardware) -> list[str]:
    return [
        *(f"{i}: {device}" for i, device in enumerate(hardware.devices)),
        f"CPU: {hardware.cpu}, {hardware.n_threads} threads, {hardware.memory_gib} GiB",
    ]


def _text(found: Calibration, names: Sequence[str]) -> str:
    """A table in GB/s: alone, all links without the CPU, all links beside it."""
    columns = ["tokens", *(f"{name} alone / together / beside the CPU" for name in names)]
    columns += ["CPU alone / beside links", "a call of the CPU, us"]
    rows = []
    for rates, alone in zip(found.together, found.alone, strict=True):
        links = zip(alone.links_gbps, rates.links_gbps, rates.links_beside_cpu_gbps, strict=True)
        rows.append(
            [
                str(rates.n_tokens),
                *(" / ".join(f"{gbps:.1f}" for gbps in link) for link in links),
                f"{alone.cpu_gbps:.1f} / {rates.cpu_gbps:.1f}",
                f"{rates.cpu_call_us:.0f}",
            ]
        )
    return f"\nexperts in {found.type.name}, GB/s\n{table(columns, rows)}\n"
