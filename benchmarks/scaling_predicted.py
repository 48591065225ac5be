"""Hosts with 1, 2, 4 and 8 H200s as `overspill plan` predicts them, with the settings of `scaling.py --devices cuda`.

    python benchmarks/scaling_predicted.py [--shape qwen3-30b-a3b] [--layers N] [--out FILE]

Links and hand-offs are as measured on two H200s (docs/performance.md). The rate of products is the one with which the
prediction for one GPU, 53248 tokens and experts in host RAM is what was measured. What all links of a larger host reach
together is not known, so it is assumed; 105 GB/s is what two reached. Microseconds of the issuing thread per split:
600 is what the simulation counts, 60 about what replayed work takes (`--record-prompts`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from scaling import COUNTS, SHAPES, Row, Setting, document, gpu_settings, with_efficiency

from overspill.bench.bench import Test
from overspill.bench.report import table
from overspill.commands.plan import make_plan
from overspill.pipeline.choose import Plan

HOST_GBPS, ISSUE_US, UBATCHES = (105.0, 200.0, 400.0), (600.0, 60.0), (4096, 2048)
_LINK_GBPS, _TFLOPS, _H200_BYTES = 53.6, 510.0, 150_000_000_000


def described(host_gbps: float, issue_us: float) -> dict[str, object]:
    """A host with eight H200s, as `--machine` takes it; `-dev` leaves some of them out."""
    gpu = {"total_bytes": _H200_BYTES, "free_bytes": _H200_BYTES, "h2d_gbps": _LINK_GBPS, "tflops": _TFLOPS}
    return {
        "host_bytes": 512 << 30,
        "devices": [{"name": f"cuda:{i}", **gpu} for i in range(max(COUNTS))],
        "h2d_total_gbps": host_gbps,
        "peer_gbps": 395.0,
        "cpu_gbps": 87.0,
        "cpu_gflops": 2000.0,
        "issue_us": issue_us,
    }


def plan_of(setting: Setting, machine: dict[str, object]) -> Plan:
    """The plan of a setting for a described machine."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(machine, file)
        file.flush()
        return make_plan(setting.source, Path(file.name), setting.options | {"schedule": setting.schedule}).plan


def predicted(shape: str, n_layer: int | None, host_gbps: float, issue_us: float, n_ubatch: int) -> Iterator[Row]:
    """Prompts on each number of devices; with resident experts for one of the hosts, as nothing goes up."""
    machine = described(host_gbps, issue_us)
    for n in COUNTS:
        for setting in gpu_settings(shape, n, n_layer, n_ubatch):
            if setting.experts_home == "resident" and host_gbps != HOST_GBPS[0]:
                continue
            plan = plan_of(setting, machine)
            for test in (test for test in setting.tests if not test.n_gen):
                yield {
                    "n_devices": n,
                    "experts_home": setting.experts_home,
                    "model_filename": setting.source.name,
                    "schedule": setting.schedule,
                    "grain": plan.placement.grain,
                    "n_ubatch": n_ubatch,
                    "n_prompt": test.n_prompt,
                    "n_gen": 0,
                    "host_gbps": host_gbps,
                    "issue_us": issue_us,
                    "predicted_ts": round(1e6 * test.n_prompt / plan.prompt_us(test.n_prompt), 1),
                }


def shown(rows: Sequence[Row]) -> str:
    """A line for each prompt and host: tokens/s and efficiency by number of devices."""
    names = ["experts", "schedule", "test", "ubatch", "issue us", "host GB/s", *(f"{n} GPU" for n in COUNTS)]
    kinds: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        test = Test(row["n_prompt"], 0, 0).name
        numbers = tuple(f"{row[name]:g}" for name in ("n_ubatch", "issue_us", "host_gbps"))
        kind = (row["experts_home"], row["schedule"], test, *numbers)
        kinds.setdefault(kind, []).append(f"{row['predicted_ts']:.0f} ({row['efficiency']:.2f})")
    return table(names, [[*kind, *cells] for kind, cells in kinds.items()])


def main(argv: Sequence[str]) -> None:
    """Predicts, prints a table, writes rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for of_host in product(HOST_GBPS, ISSUE_US, UBATCHES):
        rows += with_efficiency(list(predicted(args.shape, args.layers, *of_host)), "predicted_ts")
    command = shlex.join(["python", "benchmarks/scaling_predicted.py", *argv])
    if args.out:
        args.out.write_text(document(command, rows))
    print(shown(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
