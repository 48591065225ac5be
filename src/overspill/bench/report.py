"""Results as llama-bench prints them: markdown, csv, json, jsonl."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

from overspill.bench.bench import Result

_MIB, _GIB = 1 << 20, 1 << 30


def as_record(result: Result) -> dict[str, Any]:
    """One flat record: llama-bench's names, then ours."""
    test, counters = result.test, result.counters
    return {
        **{k: v for k, v in result.llm.items() if k not in ("schedule", "grain", "n_wave")},
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": result.test_time,
        "avg_ns": result.avg_ns,
        "stddev_ns": result.stddev_ns,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "schedule": result.llm["schedule"],
        "grain": result.llm["grain"],
        "n_wave": result.llm["n_wave"],
        "uploaded_bytes": counters["uploaded_bytes"],
        "placed_bytes": counters["placed_bytes"],
        "experts": counters["experts"],
        "busy": counters["busy"],
        "upload_gbps": counters["upload_gbps"],
        "predicted_ts": result.predicted_ts,
        "device_allocations": counters["device_allocations_after_warmup"],
        "device_syncs": counters["device_syncs_after_warmup"],
        "peak_bytes": counters["peak_bytes"],
        "pinned_bytes": counters["pinned_bytes"],
        "pageable_bytes": counters["pageable_bytes"],
    }


def _full(result: Result) -> dict[str, Any]:
    return as_record(result) | {"samples_ns": list(result.samples_ns), "samples_ts": list(result.samples_ts)}


def to_json(results: Iterable[Result]) -> str:
    """An array of objects."""
    return json.dumps([_full(r) for r in results], indent=1)


def to_jsonl(results: Iterable[Result]) -> str:
    """An object per line."""
    return "\n".join(json.dumps(_full(r)) for r in results)


def to_csv(results: Iterable[Result]) -> str:
    """A header and a quoted row per test."""
    records = [as_record(r) for r in results]
    out = io.StringIO()
    print(",".join(records[0]), file=out)
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows([json.dumps(v) if isinstance(v, dict) else v for v in record.values()] for record in records)
    return out.getvalue().rstrip("\n")


_COLUMNS: dict[str, Callable[[Result], str]] = {
    "model": lambda r: str(r.llm["model_filename"]).rsplit("/", 1)[-1],
    "size": lambda r: _size(r.llm["model_size"]),
    "params": lambda r: _count(r.llm["model_n_params"]),
    "devices": lambda r: str(r.llm["devices"]),
    "schedule": lambda r: str(r.llm["schedule"]),
    "grain": lambda r: str(r.llm["grain"]),
    "n_ubatch": lambda r: str(r.llm["n_ubatch"]),
    "n_wave": lambda r: str(r.llm["n_wave"]),
    "test": lambda r: r.test.name,
    "t/s": lambda r: f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}",
    "predicted": lambda r: f"{r.predicted_ts:.2f}",
    "uploaded": lambda r: f"{r.counters['uploaded_bytes'] / _MIB:,.0f} MiB",
    "hits": lambda r: f"{r.counters['experts']['hit_rate']:.0%}" if r.counters["experts"] else "-",
    "busy": lambda r: " ".join(f"{share:.0%}" for share in r.counters["busy"].values()),
}


def to_md(results: Iterable[Result]) -> str:
    """A markdown table."""
    return table(list(_COLUMNS), [[column(r) for column in _COLUMNS.values()] for r in results])


def table(names: list[str], rows: list[list[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [names, *rows]) for i in range(len(names))]
    lines = [_row(names, widths), _row(["-" * w for w in widths], widths)]
    return "\n".join(lines + [_row(row, widths) for row in rows])


def _row(cells: list[str], widths: list[int]) -> str:
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB" if n_bytes >= _GIB else f"{n_bytes / _MIB:.2f} MiB"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 10**9 else f"{n / 1e6:.2f} M"


OUTPUTS: dict[str, Callable[[Iterable[Result]], str]] = {
    "md": to_md,
    "json": to_json,
    "jsonl": to_jsonl,
    "csv": to_csv,
}
