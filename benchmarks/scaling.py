"""Prefill and decoding over 1, 2, 4 and 8 devices: what each device more is worth, through `overspill.bench`.

    python benchmarks/scaling.py --devices virtual [--counts 1,2,4,8] [--out FILE]
    python benchmarks/scaling.py --devices cuda [--shapes qwen3-30b-a3b,gpt-oss-120b] [--layers 24] [--out FILE]

cuda: pp8192, pp53248 and tg64 of random models, experts in host RAM and resident, for as many of the counts as there
are GPUs. Needs 40 GB of free host RAM for qwen3-30b-a3b, 70 GB for gpt-oss-120b; fewer `--layers` need less.

virtual: devices of threads whose links are throttled until uploads take far longer than all the computing together, so
that two cores are enough for eight devices: what scales then is the schedule and the code that issues it.

Every row is a record of `overspill bench -o json` with the number of devices and the efficiency: its rate over N times
that of one device.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.bench.bench import BenchRequest, Test, bench_all
from overspill.bench.families import qwen3moe
from overspill.bench.report import as_record, table
from overspill.bench.synth import SyntheticModel, synthetic
from overspill.errors import UserError
from overspill.gguf.keys import Keys
from overspill.gguf.source import ModelSource
from overspill.gguf.types import TensorType

SHAPES = {"qwen3-30b-a3b": "Q8_0", "gpt-oss-120b": "MXFP4"}
LONG, UBATCH = (8192, 53248), 4096
COUNTS = (1, 2, 4, 8)

_N_LAYER, _N_EXPERT, _N_TOKENS, _N_UBATCHES, _LINK_GBPS = 16, 48, 16, 4, 0.0025

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model under one schedule on so many devices. experts_home: where they lie, `host` or `resident`."""

    source: ModelSource
    n_devices: int
    experts_home: str
    schedule: str
    tests: tuple[Test, ...]
    options: dict[str, Any]


def gpu_settings(shape: str, n_devices: int, n_layer: int | None = None, n_ubatch: int = UBATCH) -> Iterator[Setting]:
    """Long prompts, and decoding, on GPUs."""
    tests = (*(Test(n, 0, 0) for n in LONG), Test(0, 64, 0))
    common = {
        "devices": ",".join(f"cuda:{i}" for i in range(n_devices)),
        "n_ctx": LONG[-1],
        "n_wave": LONG[-1],
        "n_ubatch": n_ubatch,
    }
    source = synthetic(shape, quant=SHAPES[shape], n_layer=n_layer)
    yield from _settings(source, n_devices, ("host", "resident"), tests, common)


def virtual_settings(n_devices: int, link_gbps: float = _LINK_GBPS) -> Iterator[Setting]:
    """A model of 2.5 MB of experts a layer, and one prompt: with the default link a layer goes up in a second."""
    values = dict(qwen3moe(_N_LAYER, 128, heads=(2, 1), n_ff=128, rope_base=1e6))
    values |= {"qwen3moe.expert_count": _N_EXPERT, "qwen3moe.expert_used_count": 2, "qwen3moe.vocab_size": 64}
    source = SyntheticModel("scaling", Keys.of(values, "scaling"), TensorType.Q8_0)
    common = {
        "devices": f"virtual:{n_devices}",
        "device_memory": "12MiB",  # rates are measured by copies of an eighth
        "h2d_gbps": link_gbps,
        "host_stage": "0",  # testing all pairs over such links takes minutes
        "n_ctx": _N_TOKENS,
        "n_wave": _N_TOKENS,
        "n_ubatch": _N_TOKENS // _N_UBATCHES,
        "policy": "all",
    }
    yield from _settings(source, n_devices, ("host",), (Test(_N_TOKENS, 0, 0),), common)


def _settings(
    source: ModelSource, n_devices: int, homes: Sequence[str], tests: tuple[Test, ...], common: dict[str, Any]
) -> Iterator[Setting]:
    """Breadth-first with layers dealt out one by one, depth-first with contiguous ones."""
    arch = source.keys.arch
    contiguous = -(-source.keys.scoped(arch).u32("block_count") // n_devices)
    for home in homes:
        for schedule, grain in (("breadth-first", 1), ("depth-first", contiguous)):
            options = common | {"cpu_moe": home == "host", "grain": grain}
            yield Setting(
                source=source,
                n_devices=n_devices,
                experts_home=home,
                schedule=schedule,
                tests=tests,
                options=options,
            )


def measured(setting: Setting, repetitions: int) -> Iterator[Row]:
    """The tests of a setting."""
    request = BenchRequest(setting.tests, (setting.schedule,), repetitions)
    for result in bench_all(setting.source, request, setting.options):
        yield {"n_devices": setting.n_devices, "experts_home": setting.experts_home, **as_record(result)}


def with_efficiency(rows: Sequence[Row], rate: str = "avg_ts") -> list[Row]:
    """Rows with `efficiency`: None where the same was not measured on one device."""
    alone = {_kind(row): row[rate] for row in rows if row["n_devices"] == 1}
    return [row | {"efficiency": _efficiency(row[rate], row["n_devices"], alone.get(_kind(row)))} for row in rows]


def _kind(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("model_filename", "experts_home", "schedule", "n_prompt", "n_gen"))


def _efficiency(rate: float, n_devices: int, alone: float | None) -> float | None:
    return None if alone is None else round(rate / (n_devices * alone), 3)


def document(command: str, rows: Sequence[Row]) -> str:
    """JSON, a line for each row."""
    lines = ",\n".join(map(json.dumps, rows))
    return f'{{"command": {json.dumps(command)},\n"rows": [\n{lines}\n]}}\n'


def shown(rows: Sequence[Row]) -> str:
    """A markdown table; busy share and rate of uploads are the lowest and the highest of all devices."""
    names = ["model", "experts", "schedule", "grain", "test", "devices", "t/s", "predicted", "busy", "GB/s up", "eff."]
    return table(names, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    busy, up = row["busy"].values(), row["upload_gbps"].values()
    return [
        row["model_filename"],
        row["experts_home"],
        row["schedule"],
        str(row["grain"]),
        Test(row["n_prompt"], row["n_gen"], row["n_depth"]).name,
        str(row["n_devices"]),
        f"{_rate(row['avg_ts'])} ± {_rate(row['stddev_ts'])}",
        _rate(row["predicted_ts"]),
        f"{min(busy):.0%} to {max(busy):.0%}",
        f"{min(up):.3g} to {max(up):.3g}",
        "-" if row["efficiency"] is None else f"{row['efficiency']:.2f}",
    ]


def _rate(per_second: float) -> str:
    return f"{per_second:.0f}" if per_second >= 1000 else f"{per_second:.2f}"


def _n_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def all_settings(args: argparse.Namespace) -> Iterator[Setting]:
    """Of the counts that there are devices for."""
    counts = [int(n) for n in args.counts.split(",")]
    if args.devices == "virtual":
        for n in counts:
            yield from virtual_settings(n, args.link_gbps)
        return
    n_gpus = _n_gpus()
    for shape in args.shapes.split(","):
        for n in counts:
            if n <= n_gpus:
                yield from gpu_settings(shape, n, args.layers, args.ubatch)


def main(argv: Sequence[str]) -> None:
    """Measures, prints a table, writes all rows after each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=("cuda", "virtual"), required=True)
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of cuda")
    parser.add_argument("--layers", type=int, help="of cuda: fewer than the shape has")
    parser.add_argument("--ubatch", type=int, default=UBATCH, help="of cuda")
    parser.add_argument("--link-gbps", type=float, default=_LINK_GBPS, help="of virtual")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    command = shlex.join(["python", "benchmarks/scaling.py", *argv])
    rows: list[Row] = []
    for setting in all_settings(args):
        try:
            rows += measured(setting, args.repetitions)
        except UserError as error:
            print(
                f"{setting.source.name}, {setting.n_devices} devices, experts {setting.experts_home}: {error}",
                file=sys.stderr,
            )
        if args.out:
            args.out.write_text(document(command, with_efficiency(rows)))
    print(shown(with_efficiency(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
