"""Loading of a real file: a 32.5 GB GGUF on tmpfs, experts pinned, in several modes, with what each part takes.

    python benchmarks/gpu_load.py [--layers 48] [--dir /dev/shm] [--out FILE]

Needs a GPU and 75 GB of free host RAM; about two minutes. The file has Qwen3-30B-A3B's shape in Q8_0. Parts, in
seconds: `index` opens the file and reads its header and table; `machine` measures links and compute; `plan`; `buffers`
reserves activations, cells and staging; `dense` is what goes to the devices; `experts` are brought into host memory:
the time of the thread that reserves and registers it is `of which pin`, reading goes on beside it. The first run, which
warms up CUDA, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from model_file import write

from overspill import LLM

SHAPE, QUANT = "qwen3-30b-a3b", "Q8_0"


class Parts:
    """Seconds spent in functions, under the names of parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, targets: dict[str, str]) -> Iterator[None]:
        """Time functions, given as what they are called where they are looked up, by part."""
        with ExitStack() as patches:
            for target, part in targets.items():
                path, _, name = target.rpartition(".")
                owner: Any = pkgutil.resolve_name(path)
                patches.enter_context(patch.object(owner, name, self._wrap(getattr(owner, name), part)))
            yield

    def _wrap(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

        return timed


_PARTS = {
    "overspill.llm.open_gguf": "index",
    "overspill.llm.understand": "index",
    "overspill.llm.machine_for": "machine",
    "overspill.llm.choose": "plan",
    "overspill.llm.Memory": "buffers",
    "overspill.pipeline.weights._Loader.block": "dense",
    "overspill.pipeline.weights._Loader.free_ring_host": "dense",
    "overspill.pipeline.weights.Arena.fill": "experts",
    "overspill.pipeline.weights.Arena._pinned": "of which pin",
}


def load(path: Path, **options: Any) -> dict[str, Any]:
    """Load once, and compute a token so that all is there."""
    parts = Parts()
    started = time.perf_counter()
    with parts.timed(_PARTS):
        llm = LLM(path, **options)
    seconds = time.perf_counter() - started
    with llm:
        first = time.perf_counter()
        llm.logits([1, 2, 3])
        pinned = llm.counters()["pinned_bytes"]
        first = time.perf_counter() - first
    rounded = {name: round(value, 2) for name, value in parts.seconds.items()}
    rest = round(seconds - sum(s for part, s in parts.seconds.items() if not part.startswith("of which")), 2)
    return {
        "seconds": round(seconds, 2),
        **rounded,
        "rest": rest,
        "pinned_bytes": pinned,
        "first_wave": round(first, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--devices", default=f"cuda:0{',cuda:1' * (torch.cuda.device_count() > 1)}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wanted = round(32.5e9 * args.layers / 48)
    free = os.statvfs(args.dir)
    if free.f_bavail * free.f_frsize < wanted:
        raise SystemExit(f"--dir {args.dir}: {wanted / 1e9:.1f} GB are needed and not free")
    path = args.dir / "overspill-load.gguf"
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row)

    try:
        started = time.perf_counter()
        n_bytes = write(path, SHAPE, quant=QUANT, n_layer=args.layers)
        note({"file_bytes": n_bytes, "written_in": round(time.perf_counter() - started, 2)})
        common = {"devices": args.devices, "cpu_moe": True, "n_ctx": 4096, "n_ubatch": 512}
        load(path, **common)
        for n_threads in (4, 8, 16):
            note({"mode": "auto", "threads": n_threads, **load(path, **common, load_threads=n_threads)})
        for mode in ("none", "dio", "mlock"):
            note({"mode": mode, "threads": 8, **load(path, **common, load_mode=mode, load_threads=8)})
        row = load(path, **common, async_load="off", load_threads=8)
        note({"mode": "auto", "threads": 8, "async_load": "off", **row})
    finally:
        path.unlink(missing_ok=True)
        if args.out:
            args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
