"""Draws what `scaling.py --devices virtual` measured and `scaling_predicted.py` predicts: rates by number of devices.

python benchmarks/scaling_picture.py VIRTUAL.json PREDICTED.json OUT.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scaling import COUNTS, LONG, UBATCH, Row

_COLOURS = {"breadth-first": "#4878a8", "depth-first": "#d08040"}
_GREENS = ("#a8d5a2", "#5fa55a", "#2e6b2a")


def rows_of(path: Path) -> list[Row]:
    """Of a results file."""
    return list(json.loads(path.read_text())["rows"])


def line(axes: Axes, rows: Iterable[Row], rate: str, **how: Any) -> None:
    """Rates of one kind of row by number of devices."""
    points = sorted((row["n_devices"], row[rate]) for row in rows)
    axes.plot([n for n, _ in points], [y for _, y in points], **how)


def draw_virtual(axes: Axes, rows: list[Row]) -> None:
    for schedule, colour in _COLOURS.items():
        of_one = [row for row in rows if row["schedule"] == schedule]
        line(axes, of_one, "avg_ts", color=colour, marker="o", label=f"{schedule}, measured")
        line(axes, of_one, "predicted_ts", color=colour, linestyle=":", label="predicted")
    alone = max(row["avg_ts"] for row in rows if row["n_devices"] == 1)
    axes.plot(COUNTS, [n * alone for n in COUNTS], color="#bbbbbb", linewidth=1, label="N times one")
    axes.set_title("virtual devices, links the bound")


def draw_predicted(axes: Axes, rows: list[Row], n_prompt: int) -> None:
    """Breadth-first with experts in host RAM: by bandwidth of the host, and by time of the issuing thread."""
    rows = [r for r in rows if (r["experts_home"], r["schedule"]) == ("host", "breadth-first")]
    rows = [r for r in rows if (r["n_prompt"], r["n_ubatch"]) == (n_prompt, UBATCH)]
    hosts = sorted({row["host_gbps"] for row in rows})
    for style, issue_us in ((":", min(r["issue_us"] for r in rows)), ("-", max(r["issue_us"] for r in rows))):
        for colour, host_gbps in zip(_GREENS, hosts, strict=True):
            of_one = [row for row in rows if (row["host_gbps"], row["issue_us"]) == (host_gbps, issue_us)]
            label = f"{host_gbps:g} GB/s, {issue_us:g} us a split"
            line(axes, of_one, "predicted_ts", color=colour, linestyle=style, marker=".", label=label)
    axes.set_title(f"H200s, pp{n_prompt}, predicted")


def main(virtual: Path, predicted: Path, out: Path) -> None:
    """Three panels."""
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    panels = figure.subplots(1, 3)
    draw_virtual(panels[0], rows_of(virtual))
    for axes, n_prompt in zip(panels[1:], LONG, strict=True):
        draw_predicted(axes, rows_of(predicted), n_prompt)
    for axes in panels:
        axes.set_xticks(COUNTS)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("devices")
        axes.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel("tokens/s")
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
