"""Traces: what every stream did and when, as a file that Perfetto and chrome://tracing open, and as a picture.

Format: the Trace Event Format, complete events ("ph": "X"), one process per device and one thread per stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overspill.device.base import Span
from overspill.device.lane import Lane
from overspill.errors import UserError

_LANES = list(Lane)
_COLOURS = {
    "attend": "#4878a8",
    "layers": "#4878a8",
    "experts": "#5fa55a",
    "widen": "#b4a03c",
    "place": "#b4a03c",
    "upload": "#d08040",
    "hand_off": "#9467bd",
    "hand_down": "#9467bd",
    "hand_up": "#9467bd",
    "output": "#c05a5a",
    "embed": "#7f7f7f",
}


def write_trace(spans: Mapping[str, Sequence[Span]], path: Path) -> None:
    """Write the spans of each device, by device name. Times start at the earliest span."""
    origin_us = min((s.start_us for device in spans.values() for s in device), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (device, device_spans) in enumerate(spans.items()):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": device}})
        for tid, lane in enumerate(_LANES):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane.value}})
        events += [_event(span, pid, origin_us) for span in device_spans]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(span: Span, pid: int, origin_us: float) -> dict[str, Any]:
    return {
        "name": span.label,
        "cat": span.label.split()[0],
        "ph": "X",
        "pid": pid,
        "tid": _LANES.index(span.lane),
        "ts": span.start_us - origin_us,
        "dur": span.end_us - span.start_us,
        "args": {"bytes": span.n_bytes},
    }


def draw_trace(path: Path, out: Path) -> None:
    """Picture of a trace file: time to the right, one row per device and stream, small copies left out.

    Needs matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UserError("drawing a trace needs matplotlib: pip install 'overspill[plot]'") from None
    events = _read(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    work = [e for e in events if e["ph"] == "X" and e["cat"] in _COLOURS]
    rows = sorted({(e["pid"], e["tid"]) for e in work})
    figure = Figure(figsize=(14, 0.9 + 0.38 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        bars = [e for e in work if (e["pid"], e["tid"]) == row]
        spans = [(e["ts"] / 1e3, e["dur"] / 1e3) for e in bars]
        axes.broken_barh(spans, (i - 0.4, 0.8), facecolors=[_COLOURS[e["cat"]] for e in bars])
    axes.set_yticks(range(len(rows)), [f"{names[pid]} {_LANES[tid].value}" for pid, tid in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    kinds = {e["cat"] for e in work}
    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _COLOURS.items() if kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.12),
        ncols=len(kinds),
        frameon=False,
    )
    figure.savefig(out, dpi=110)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        events = json.loads(path.read_text())["traceEvents"]
        if not any(e["ph"] == "X" for e in events):
            raise UserError(f"{path}: the trace holds no work")
        return list(events)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a trace file ({error})") from None
