"""overspill against llama.cpp on one machine's CPU: same files, same number of threads, in one run.

    python benchmarks/cpu_vs_llamacpp.py -m FILE [-m FILE ...] -t THREADS [--peer-python PYTHON]

Both programs run as processes of their own, one at a time; each round runs both, in an order that alternates, so that a
machine that slows down or a neighbour that wakes up meets both. A sample is one repeat of a prompt (-p) or of a
generation (-n) from an empty context, after a warm-up, with random ids.

Install the peer in any environment (a C++ compiler builds it, five minutes on two cores):
    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
or `pip install -e '.[peers]'` into this one; --peer-python names the interpreter that has it, if it is not this one. It
is measured below its Python layer (`tools/llamacpp_peer.py`).

Prints a table of tokens/s and ratios, and how many CPUs other processes kept busy meanwhile (more than about 0.05: do
not believe the figures); writes all samples and the machine to benchmarks/results/cpu_vs_llamacpp.json. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from overspill.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PEER_SCRIPT = ROOT / "tools" / "llamacpp_peer.py"
RESULTS = ROOT / "benchmarks" / "results" / "cpu_vs_llamacpp.json"

TABLE_WIDTH = 130  # also where the output is no terminal

Samples = tuple[list[float], list[float]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured: tokens of a prompt, tokens generated, repeats in a round, rounds, threads of both programs."""

    n_prompt: int
    n_gen: int
    n_repeats: int
    n_rounds: int
    n_threads: int


@dataclass(kw_only=True)
class Comparison:
    """Samples in tokens/s by program and phase ("pp" prefill, "tg" decode).

    `foreign_cpus`: for each process run, the mean number of CPUs that anything else kept busy.
    """

    model: str
    model_bytes: int
    samples: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {name: {"pp": [], "tg": []} for name in ("overspill", "llama.cpp")}
    )
    foreign_cpus: dict[str, list[float]] = field(default_factory=lambda: {"overspill": [], "llama.cpp": []})

    def add(self, program: str, samples: Samples, foreign_cpus: float) -> None:
        """Appends the samples of one process run."""
        self.foreign_cpus[program].append(foreign_cpus)
        self.samples[program]["pp"] += samples[0]
        self.samples[program]["tg"] += samples[1]

    def ratio(self, phase: str) -> tuple[float, float]:
        """overspill / llama.cpp: ratio of the means, and its standard deviation (independent relative errors added)."""
        ours, peer = self.samples["overspill"][phase], self.samples["llama.cpp"][phase]
        ratio = mean(ours) / mean(peer)
        relative = [stdev(values) / mean(values) if len(values) > 1 else 0.0 for values in (ours, peer)]
        return ratio, ratio * (relative[0] ** 2 + relative[1] ** 2) ** 0.5


class CpuWatch:
    """Counts, between its making and `foreign_cpus`, the CPU time that is not of this process's ended children."""

    def __init__(self) -> None:
        self._start = (time.monotonic(), _busy_seconds(), _children_seconds())

    def foreign_cpus(self) -> float:
        """Mean number of CPUs that others kept busy."""
        seconds, busy, own = self._start
        foreign = _busy_seconds() - busy - (_children_seconds() - own)
        return round(max(0.0, foreign) / (time.monotonic() - seconds), 3)


def _busy_seconds() -> float:
    """CPU time of the whole machine but idle and waiting for disks; first line of /proc/stat, in clock ticks."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_overspill(path: Path, n_prompt: int, n_gen: int, threads: int, repeats: int) -> Samples:
    """Prefill and decode samples, tokens/s, of `overspill bench` in a process of its own."""
    program = Path(sys.executable).with_name("overspill")
    options = ["-p", str(n_prompt), "-n", str(n_gen), "-r", str(repeats), "-t", str(threads), "-o", "json"]
    rows = json.loads(_output([str(program), "bench", "-m", str(path), *options]))
    by_test = {(row["n_prompt"], row["n_gen"]): row["samples_ts"] for row in rows}
    return by_test[n_prompt, 0], by_test[0, n_gen]


def measure_llamacpp(python: str, path: Path, settings: Settings) -> tuple[Samples, dict[str, str]]:
    """Prefill and decode samples, tokens/s, of llama.cpp in a process of its own; its version and CPU features."""
    options = ["-p", str(settings.n_prompt), "-n", str(settings.n_gen)]
    options += ["-r", str(settings.n_repeats), "-t", str(settings.n_threads)]
    result = json.loads(_output([python, str(PEER_SCRIPT), "-m", str(path), *options]))
    facts = {key: result[key] for key in ("version", "system_info")}
    return (result["pp_samples"], result["tg_samples"]), facts


def compare(path: Path, settings: Settings, peer_python: str) -> tuple[Comparison, dict[str, str]]:
    """All rounds on one file; also what `measure_llamacpp` says of the peer."""
    comparison = Comparison(model=path.name, model_bytes=path.stat().st_size)
    peer_facts: dict[str, str] = {}
    for i_round in range(settings.n_rounds):
        order = ("overspill", "llama.cpp") if i_round % 2 == 0 else ("llama.cpp", "overspill")
        for program in order:
            watch = CpuWatch()
            if program == "overspill":
                sizes = (settings.n_prompt, settings.n_gen, settings.n_threads, settings.n_repeats)
                samples = measure_overspill(path, *sizes)
            else:
                samples, peer_facts = measure_llamacpp(peer_python, path, settings)
            comparison.add(program, samples, watch.foreign_cpus())
    return comparison, peer_facts


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be run ({error.strerror}); check the installation") from error
    if done.returncode:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"{' '.join(command)}: exit status {done.returncode}: {last_line}")
    return done.stdout


def show(comparisons: Sequence[Comparison], settings: Settings) -> None:
    """The table: mean and standard deviation of tokens/s, ratio of the means, ratio of the medians."""
    table = Table("model", "test", "overspill", "llama.cpp", "ratio", "ratio of medians", "foreign CPUs")
    for comparison in comparisons:
        for phase, n_tokens in (("pp", settings.n_prompt), ("tg", settings.n_gen)):
            ours, peer = (comparison.samples[name][phase] for name in ("overspill", "llama.cpp"))
            ratio, deviation = comparison.ratio(phase)
            cells = [_mean_and_deviation(ours), _mean_and_deviation(peer), f"{ratio:.2f} +- {deviation:.2f}"]
            medians = f"{median(ours) / median(peer):.2f}"
            foreign = max(value for values in comparison.foreign_cpus.values() for value in values)
            table.add_row(comparison.model, f"{phase}{n_tokens}", *cells, medians, f"{foreign:.2f}")
    Console(width=TABLE_WIDTH).print(table)


def _mean_and_deviation(samples: Sequence[float]) -> str:
    deviation = stdev(samples) if len(samples) > 1 else 0.0
    return f"{mean(samples):.1f} +- {deviation:.1f}"


def machine() -> dict[str, Any]:
    """CPU model, number of CPUs, versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "n_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "overspill": version("overspill"),
        "torch": version("torch"),
    }


def as_json(comparisons: Sequence[Comparison], settings: Settings, peer_facts: dict[str, str]) -> str:
    """Settings, machine, samples and ratios; file names without their folders."""
    models = " ".join(f"-m {comparison.model}" for comparison in comparisons)
    sizes = f"-p {settings.n_prompt} -n {settings.n_gen} -r {settings.n_repeats} --rounds {settings.n_rounds}"
    document = {
        "command": f"python benchmarks/cpu_vs_llamacpp.py {models} -t {settings.n_threads} {sizes}",
        "machine": machine(),
        "llama.cpp": peer_facts,
        "settings": asdict(settings),
        "results": [
            asdict(comparison) | {"ratio": {phase: comparison.ratio(phase) for phase in ("pp", "tg")}}
            for comparison in comparisons
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="overspill against llama.cpp on this machine's CPU")
    parser.add_argument("-m", "--model", type=Path, action="append", required=True)
    parser.add_argument("-t", "--threads", type=int, required=True)
    parser.add_argument("-p", "--n-prompt", type=int, default=512)
    parser.add_argument("-n", "--n-gen", type=int, default=64)
    parser.add_argument("-r", "--repeats", type=int, default=3, help="samples of each test in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    settings = Settings(
        n_prompt=args.n_prompt,
        n_gen=args.n_gen,
        n_repeats=args.repeats,
        n_rounds=args.rounds,
        n_threads=args.threads,
    )
    try:
        return run(args.model, settings, args.peer_python, args.out)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(paths: Sequence[Path], settings: Settings, peer_python: str, out: Path) -> int:
    """Compares on every file, prints the table, writes `out`."""
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path}: no such file; give a GGUF file with -m")
    comparisons: list[Comparison] = []
    peer_facts: dict[str, str] = {}
    for path in paths:
        comparison, peer_facts = compare(path, settings, peer_python)
        comparisons.append(comparison)
    show(comparisons, settings)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(as_json(comparisons, settings, peer_facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
